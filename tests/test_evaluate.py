from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from unembed.config import Config
from unembed.errors import UnembedError
from unembed.evaluate import evaluate, nearest, random_tokens, refer, score
from unembed.inverter import Inversion, Inverter
from unembed.tokens import TextTokenizer

WORDS = "the a small old red cat dog bird sat ran on under mat roof road today".split()
TEXTS = [
    "The small cat sat on the mat",
    "the old dog ran",
    "a red bird sat on a roof today",
    "the red cat ran on the old road",
]
LONG = "the red cat ran on the old road today and tomorrow"
KEYS = {
    "strategy", "steps", "texts", "token_accuracy", "token_f1", "exact_match", "bleu", "rouge_l", "cosine",
    "forward_passes", "encoder_calls", "texts_per_second", "intervals",
}  # fmt: skip


@pytest.fixture
def tokenizer() -> TextTokenizer:
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[SEP]", "[MASK]", *WORDS])}
    base = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    base.normalizer = normalizers.Lowercase()
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(["[PAD]", "[UNK]", "[SEP]", "[MASK]"])
    return TextTokenizer.wrap(base)


class FakeEncoder:
    """Gives every text, whatever its case, a vector of its own, and notes what it was asked."""

    name = "fake"
    size = 16

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        seeds = [list(text.lower().encode()) for text in texts]
        rows = [np.random.default_rng(seed).standard_normal(self.size) for seed in seeds]
        return np.array(rows, dtype=np.float32)


class FakeInverter(Inverter):
    """Knows some texts by their vectors, and answers one fixed text to all others."""

    def __init__(self, tokenizer: TextTokenizer, *, known: Sequence[str], guess: str = "the old cat") -> None:
        config = Config().override(
            encoder="fake", max_tokens=8, vocab_size=tokenizer.size, embedding_size=FakeEncoder.size
        )
        super().__init__(torch.nn.Identity(), config=config, tokenizer=tokenizer, device="cpu")
        encoded = tokenizer.encode([*known, guess], max_tokens=8)
        contents = [ids[:n].tolist() for ids, n in zip(encoded.ids, encoded.lengths, strict=True)]
        vectors = FakeEncoder().encode(encoded.texts)
        self.memory = {v.tobytes(): ids for v, ids in zip(vectors[:-1], contents[:-1], strict=True)}
        self.guess = contents[-1]
        self.calls: list[dict[str, Any]] = []

    def invert(self, vectors: Any, strategy: str = "confidence", **options: Any) -> list[Inversion]:  # type: ignore[override]
        self.calls.append(options | {"count": len(vectors)})
        time.sleep(0.002 * len(vectors))
        rows = [self.memory.get(vector.tobytes(), self.guess) for vector in vectors]
        texts = self.tokenizer.decode(rows)
        return [
            Inversion(text, ids, [1.0] * len(ids), strategy, options["steps"])
            for text, ids in zip(texts, rows, strict=True)
        ]


def run(inverter: Inverter, texts: Iterable[str] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    options.setdefault("encoder", FakeEncoder())
    records = evaluate(texts, inverter=inverter, **options)
    return [dataclasses.asdict(record) for record in records]


def test_perfect_inverter(tokenizer: TextTokenizer) -> None:
    (record,) = run(FakeInverter(tokenizer, known=TEXTS))
    assert set(record) == KEYS
    for metric in ("token_accuracy", "token_f1", "exact_match", "rouge_l", "cosine"):
        assert record[metric] == pytest.approx(1)
        assert record["intervals"][metric] == pytest.approx((1, 1))
    assert record["bleu"] == pytest.approx(100)
    assert record["intervals"]["bleu"] == pytest.approx((100, 100))
    assert (record["texts"], record["steps"], record["forward_passes"]) == (4, 8, 8)
    assert record["encoder_calls"] == 0
    assert 0 < record["texts_per_second"] < 500
    assert json.loads(json.dumps(record))["strategy"] == "confidence"


def test_half_known(tokenizer: TextTokenizer) -> None:
    (record,) = run(FakeInverter(tokenizer, known=TEXTS[:2]), texts=[TEXTS[0], "a red bird ran"])
    # Against "a red bird ran", "the old cat" has no token right.
    for metric in ("token_accuracy", "token_f1", "exact_match", "rouge_l"):
        assert record[metric] == pytest.approx(0.5)
        low, high = record["intervals"][metric]
        assert 0 <= low < 0.5 < high <= 1
    assert 0 < record["bleu"] < 100
    assert record["cosine"] < 0.99


def test_each_strategy_and_number_of_steps(tokenizer: TextTokenizer) -> None:
    inverter = FakeInverter(tokenizer, known=TEXTS)
    records = run(
        inverter,
        texts=iter(TEXTS),
        limit=3,
        strategies=["euler", "confidence"],
        steps=[2, 8],
        guidance=1.5,
        seed=7,
        batch_size=2,
    )
    assert [(r["strategy"], r["steps"]) for r in records] == [
        ("euler", 2), ("euler", 8), ("confidence", 2), ("confidence", 8)
    ]  # fmt: skip
    assert [r["forward_passes"] for r in records] == [2, 8, 2, 8]
    assert {r["texts"] for r in records} == {3}
    warm_up, *calls = inverter.calls
    assert warm_up["count"] == 1
    assert all(call["count"] == 3 for call in calls)
    for option, value in {"guidance": 1.5, "seed": 7, "batch_size": 2, "temperature": None}.items():
        assert {call[option] for call in calls} == {value}


def test_texts_are_embedded_as_cut_with_their_case(tokenizer: TextTokenizer) -> None:
    encoder = FakeEncoder()
    with pytest.warns(UserWarning, match="1 of 3 texts are longer than 8 tokens"):
        references = refer([*TEXTS[:2], LONG], tokenizer=tokenizer, encoder=encoder, max_tokens=8)
    assert encoder.seen == [*TEXTS[:2], "the red cat ran on the old road"]
    assert references.texts[0] == TEXTS[0].lower()
    assert [len(ids) for ids in references.ids] == [7, 4, 8]


def test_empty_hypothesis_scores_nothing(tokenizer: TextTokenizer) -> None:
    inverter = FakeInverter(tokenizer, known=[])
    inverter.guess = []
    encoder = FakeEncoder()
    (record,) = run(inverter, encoder=encoder)
    for metric in ("token_accuracy", "token_f1", "exact_match", "bleu", "rouge_l", "cosine"):
        assert record[metric] == 0
    assert "" not in encoder.seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ["confidense"]}, "did you mean 'confidence'"),
        ({"steps": [0]}, "steps must be between 1 and 8"),
        ({"steps": [8, 9]}, "steps must be between 1 and 8"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"texts": "the cat"}, "list of texts"),
        ({"texts": []}, "no text to evaluate"),
        ({"texts": ["the cat", " "]}, "blank"),
        ({"encoder": SimpleNamespace(name="other", size=3)}, "other gives vectors of 3 numbers.*fake, of 16"),
    ],
)
def test_mistakes_are_named_before_any_inversion(
    tokenizer: TextTokenizer, options: dict[str, Any], message: str
) -> None:
    inverter = FakeInverter(tokenizer, known=TEXTS)
    with pytest.raises(UnembedError, match=message):
        run(inverter, **options)
    assert not inverter.calls


def test_random_tokens(tokenizer: TextTokenizer) -> None:
    encoder = FakeEncoder()
    references = refer(TEXTS * 50, tokenizer=tokenizer, encoder=encoder, max_tokens=8)
    guesses = random_tokens(references, tokenizer=tokenizer, seed=1)
    assert [len(ids) for ids in guesses.ids] == [len(ids) for ids in references.ids]
    drawn = {int(i) for ids in guesses.ids for i in ids}
    assert not drawn & {tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id}
    assert guesses.texts == random_tokens(references, tokenizer=tokenizer, seed=1).texts
    assert guesses.texts != random_tokens(references, tokenizer=tokenizer, seed=2).texts
    record = score(references, guesses, encoder=encoder, strategy="random-tokens")
    assert record.token_accuracy < 0.2
    assert (record.steps, record.forward_passes) == (0, 0)


def test_nearest(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FakeEncoder()
    references = refer(TEXTS[:3], tokenizer=tokenizer, encoder=encoder, max_tokens=8)
    passages = ["the dog sat", TEXTS[2], "a cat", TEXTS[0], "the mat"]
    vectors = encoder.encode(passages)
    # Near, not equal, and of another length; the last would win if lengths counted.
    vectors[3] = 0.1 * vectors[3] + 0.01
    vectors[4] = 100 * vectors[4]
    encoded = tokenizer.encode(passages, max_tokens=8)
    data: Any = SimpleNamespace(
        kind="pairs",
        count=5,
        embedding_size=16,
        tokenizer=tokenizer,
        ids=lambda rows: encoded.ids[rows],
        vectors=lambda rows: vectors[rows],
    )
    monkeypatch.setattr(sys.modules["unembed.evaluate"], "_NEAREST_ENTRIES", 2 * FakeEncoder.size)
    found = nearest(references, data=data)
    assert found.texts[0] == TEXTS[0].lower()
    assert found.texts[2] == TEXTS[2]
    expected = int(
        (references.vectors[1] @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T).argmax()
    )
    assert found.texts[1] == passages[expected].lower()
    assert found.ids[0].tolist() == references.ids[0].tolist()

    data.embedding_size = 32
    with pytest.raises(UnembedError, match="vectors of size 32, the texts have size 16"):
        nearest(references, data=data)
    data.kind = "passages"
    with pytest.raises(UnembedError, match="kind 'pairs'"):
        nearest(references, data=data)
