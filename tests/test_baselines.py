"""Random tokens, and the nearest passage of pairs and of passages without vectors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recovering import FakeEncoder, make_tokenizer

from unembed.baselines import nearest, random_tokens
from unembed.corpus import prepare
from unembed.errors import UnembedError
from unembed.evaluate import score
from unembed.scoring import refer
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
