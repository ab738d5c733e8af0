"""The whole way: sentences, MiniLM's vectors, the preset `tiny`, and the sentences back from the vectors."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from unembed.config import preset
from unembed.corpus import PreparedData, prepare
from unembed.encoders import Encoder, load_encoder
from unembed.inverter import Inverter
from unembed.train import train

# One training for all, minutes at most; a busy machine may take longer than other tests are given.
pytestmark = pytest.mark.timeout(900)

COUNT, ENOUGH = 32, 30
SENTENCES = (
    (resources.files("unembed") / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()[:COUNT]
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """MiniLM with its real weights, from its package."""
    return load_encoder("all-MiniLM-L6-v2", device="cpu")


@pytest.fixture(scope="module")
def data(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The sentences and their vectors."""
    return prepare(SENTENCES, encoder=encoder, out=tmp_path_factory.mktemp("whole") / "data")


@pytest.fixture(scope="module")
def vectors(encoder: Encoder) -> np.ndarray:
    """The sentences as any database would hold them."""
    return encoder.encode(SENTENCES)


@pytest.fixture(scope="module")
def inverter(data: PreparedData) -> Inverter:
    """The preset, trained on the sentences; so few of them need fewer of its steps."""
    result = train(preset("tiny").override(steps=200), data=data.path, out=data.path.parent / "run")
    return Inverter.from_pretrained(result.model, device="cpu")


def recovered(inverter: Inverter, vectors: np.ndarray, *, strategy: str, steps: int) -> int:
    """Count the sentences that come back word for word (the vocabulary knows no case)."""
    found = inverter.invert(vectors, strategy=strategy, steps=steps, seed=0)
    assert all(inversion.forward_passes <= steps for inversion in found)
    references = inverter.tokenizer.decode(inverter.tokenizer.encode(SENTENCES, max_tokens=32).ids)
    assert len(set(references)) == COUNT
    return sum(a == b.text for a, b in zip(references, found, strict=True))


@pytest.mark.parametrize(("strategy", "steps"), [("sequential", 32), ("confidence", 8)])
def test_sentences_come_back_from_their_vectors(
    strategy: str, steps: int, inverter: Inverter, vectors: np.ndarray
) -> None:
    assert recovered(inverter, vectors, strategy=strategy, steps=steps) >= ENOUGH


def test_what_came_back_embeds_to_the_same_vector(inverter: Inverter, encoder: Encoder) -> None:
    pairs = inverter.reconstruct(SENTENCES[:8], encoder=encoder, seed=0)
    assert np.median([pair.cosine for pair in pairs]) > 0.999


def test_without_the_vector_nothing_comes_back(
    data: PreparedData, vectors: np.ndarray, tmp_path: Path
) -> None:
    blind = preset("tiny").override(condition_dropout=1.0, steps=60)
    result = train(blind, data=data.path, out=tmp_path)
    inverter = Inverter.from_pretrained(result.model, device="cpu")
    for strategy, steps in (("sequential", 32), ("confidence", 8)):
        assert recovered(inverter, vectors, strategy=strategy, steps=steps) == 0
