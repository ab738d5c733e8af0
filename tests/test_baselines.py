"""Random tokens, and the nearest passage of pairs and of passages without vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from recovering import WORDS, FakeEncoder, make_tokenizer
from torch import Tensor

from unembed.baselines import nearest, random_tokens
from unembed.corpus import PreparedData, prepare
from unembed.encoders import CallableEncoder, load_encoder
from unembed.errors import UnembedError
from unembed.evaluate import score
from unembed.scoring import References, refer
from unembed.tokens import TextTokenizer

TEXTS = [
    "The small cat sat on the mat",
    "the old dog ran",
    "a red bird sat on a roof today",
    "the red cat ran on the old road",
]


@pytest.fixture
def tokenizer() -> TextTokenizer:
    return make_tokenizer()


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
    monkeypatch.setattr("unembed.baselines.ENTRIES", 2 * FakeEncoder.size)
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


def test_nearest_of_passages_is_embedded_on_the_fly(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = FakeEncoder()
    # The third window of the second passage is a text that is looked for, the first of the last another.
    passages = ["the dog sat", f"{'a cat ' * 8}{TEXTS[3]} today today", "the mat", TEXTS[1]]
    data = prepare(
        passages, encoder="fake", tokenizer=tokenizer, out=tmp_path / "data", max_tokens=8, kind="passages"
    )
    references = refer([TEXTS[3], TEXTS[1]], tokenizer=tokenizer, encoder=encoder, max_tokens=8)
    monkeypatch.setattr("unembed.baselines.WINDOWS", 2)
    found = nearest(references, data=data, encoder=encoder)
    assert found.texts == [TEXTS[3], TEXTS[1]]
    assert [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in references.ids]
    assert nearest(references, data=data, encoder=encoder, limit=2).texts[1] != TEXTS[1]


# --- by ids ---------------------------------------------------------------------------------------


class ReadsIds:
    """An encoder of ids and, by way of them, of text; it notes what it is asked."""

    name, size = "fake", 16
    tokenizer = make_tokenizer()

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.texts: list[str] = []
        shape = (self.tokenizer.size, 8, self.size)
        self.table = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        self.rows.append(len(ids))
        places = torch.arange(ids.shape[1])
        return (self.table[ids, places] * (places < lengths[:, None])[..., None]).sum(1)

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.texts += texts
        encoded = self.tokenizer.encode(texts, max_tokens=8)
        return self.encode_ids(torch.from_numpy(encoded.ids), torch.from_numpy(encoded.lengths)).numpy()


def passages_of(words: Sequence[str], folder: Path, encoder: Any, more: Sequence[str] = ()) -> PreparedData:
    """Prepare some passages, and 30 of 1 to 30 of these words."""
    rng = np.random.default_rng(0)
    texts = [*more, *(" ".join(rng.choice(words, length)) for length in range(1, 31))]
    tokenizer = None if hasattr(encoder, "tokenizer") else make_tokenizer()
    return prepare(texts, encoder=encoder, tokenizer=tokenizer, out=folder, max_tokens=8, kind="passages")


def test_nearest_by_ids_is_nearest_by_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unembed.baselines.WINDOWS", 20)
    monkeypatch.setattr("unembed.baselines.ROWS", {"cpu": 7})
    encoder = ReadsIds()
    data = passages_of(WORDS, tmp_path / "data", encoder)
    references = refer(TEXTS, tokenizer=data.tokenizer, encoder=encoder, max_tokens=8)
    encoder.rows, encoder.texts = [], []
    found = nearest(references, data=data, encoder=encoder)
    windows = sum(-(-length // 8) for length in range(1, 31))
    assert encoder.texts == [] and max(encoder.rows) == 7  # a bounded number of rows, and no way through text
    assert sum(encoder.rows) == windows + 1  # one more, to see whether it takes ids
    by_text = nearest(references, data=data, encoder=CallableEncoder(ReadsIds().encode))
    assert [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in by_text.ids]
    assert found.texts == by_text.texts and len(set(found.texts)) > 1


def test_nearest_by_ids_and_by_text_of_minilm(tmp_path: Path) -> None:
    encoder: Any = load_encoder("all-MiniLM-L6-v2", device="cpu")
    words = "the a small old red cat dog bird sat ran under mat roof road today river sold built".split()
    data = passages_of(words, tmp_path / "data", encoder)
    # Each word is a token of its own, so every window begins with a word.
    assert data.tokenizer.word_start[data.tokens].all()
    texts = [*TEXTS, "a bird under the old roof", "today the river sold a small dog", "red road"]
    references = refer(texts, tokenizer=data.tokenizer, encoder=encoder, max_tokens=8)
    by_ids = nearest(references, data=data, encoder=encoder)
    by_text = nearest(references, data=data, encoder=CallableEncoder(encoder.encode))
    assert by_ids.texts == by_text.texts and len(set(by_ids.texts)) > 3


def test_the_nearest_passage_can_be_read(tmp_path: Path) -> None:
    """A window of unknown words has a vector, but to answer with it would be to say nothing."""
    encoder = ReadsIds()
    data = passages_of(WORDS, tmp_path / "data", encoder, more=["xyz qqq", "the xyz"])
    assert data.tokens[:2].tolist() == [1, 1]
    vectors = encoder.encode_ids(torch.tensor([[1, 1], [4, 1]]), torch.tensor([2, 2])).numpy()
    references = References(ids=[np.array([4])] * 2, texts=["the"] * 2, vectors=vectors)
    for each in (encoder, CallableEncoder(encoder.encode)):
        found = nearest(references, data=data, encoder=each)
        assert found.texts[0].strip()
    assert nearest(references, data=data, encoder=encoder).ids[1].tolist() == [4, 1]


class Refuses(FakeEncoder):
    """Shares the vocabulary, but its prompt joins the text's first token."""

    tokenizer = make_tokenizer()

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        raise UnembedError("ids cannot be embedded.")


class Foreign(FakeEncoder):
    """Takes ids, but of another vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        spec = json.loads(make_tokenizer().to_json())
        spec["model"]["vocab"]["tree"] = len(spec["model"]["vocab"])
        self.tokenizer = TextTokenizer.wrap(tokenizers.Tokenizer.from_str(json.dumps(spec)))

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        pytest.fail("these ids mean something else to it")


@pytest.mark.parametrize("kind", [Refuses, Foreign])
def test_nearest_goes_through_text_where_ids_would_not_do(kind: type[FakeEncoder], tmp_path: Path) -> None:
    data = passages_of(WORDS, tmp_path / "data", "fake", more=[TEXTS[1]])
    references = refer(TEXTS[:2], tokenizer=data.tokenizer, encoder=FakeEncoder(), max_tokens=8)
    encoder = kind()
    found = nearest(references, data=data, encoder=encoder)
    assert found.texts == nearest(references, data=data, encoder=FakeEncoder()).texts
    assert found.texts[1] == TEXTS[1] and TEXTS[1] in encoder.seen
