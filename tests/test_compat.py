"""vec2text's two calls."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import unembed
from unembed import UnembedError, invert_embeddings, invert_strings
from unembed.backbone import build
from unembed.config import Config, ModelConfig
from unembed.encoders import load_encoder
from unembed.inverter import Inverter

TEXTS = ["The kettle clicked off.", "We left the umbrella on the bus."]


def tiny(*, causal: bool = False) -> Inverter:
    """A tiny random inverter of MiniLM's vectors."""
    encoder = load_encoder("all-MiniLM-L6-v2", device="cpu")
    t = encoder.tokenizer  # type: ignore[attr-defined]
    shape = ModelConfig(
        layers=1, hidden=32, heads=2, ffn=64, adaln_rank=0, max_tokens=16, embedding_size=encoder.size,
        vocab_size=t.size, mask_id=t.mask_id, end_id=t.end_id, pad_id=t.pad_id, causal=causal,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Inverter(build(shape), config=Config(model=shape), tokenizer=t, device="cpu")
    made._encoder = encoder
    return made


@pytest.fixture(scope="module")
def inverter() -> Inverter:
    """One that does not read left to right."""
    return tiny()


@pytest.fixture
def vectors() -> np.ndarray:
    """Two random vectors."""
    return np.random.default_rng(0).normal(size=(2, 384)).astype(np.float32)


def test_embeddings_as_invert_does(inverter: Inverter, vectors: np.ndarray) -> None:
    expected = [found.text for found in inverter.invert(vectors, steps=16)]
    assert invert_embeddings(vectors, inverter) == expected
    assert invert_embeddings(torch.from_numpy(vectors), corrector=inverter) == expected
    assert invert_embeddings(embeddings=vectors, inverter=inverter, steps=16) == expected


def test_num_steps_is_steps(inverter: Inverter, vectors: np.ndarray) -> None:
    expected = [found.text for found in inverter.invert(vectors, "sequential", 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert invert_embeddings(vectors, inverter, 3, strategy="sequential") == expected
        assert invert_embeddings(vectors, inverter, num_steps=3, strategy="sequential") == expected
        assert invert_embeddings(vectors, inverter, steps=3, strategy="sequential") == expected
    with pytest.raises(UnembedError, match="two names"):
        invert_embeddings(vectors, inverter, num_steps=3, steps=3)
    with pytest.raises(UnembedError, match="between 1 and 16"):
        invert_embeddings(vectors, inverter, num_steps=0)
    with pytest.raises(UnembedError, match="between 1 and 16"):
        invert_embeddings(vectors, inverter, steps=17)
    with pytest.warns(UserWarning, match="using 16"):
        invert_embeddings(vectors, inverter, num_steps=50)


def test_by_default_the_model_does_its_best(vectors: np.ndarray) -> None:
    inverter = tiny(causal=True)
    for options, strategy, steps in (
        ({}, "beam", 16),
        ({"num_steps": 3}, "confidence", 3),
        ({"strategy": "confidence"}, "confidence", 16),
    ):
        expected = [found.text for found in inverter.invert(vectors, strategy, steps)]
        assert invert_embeddings(vectors, inverter, **options) == expected
    drafted = [found.text for found in inverter.invert(vectors, "confidence", 16, drafts=3, seed=0)]
    assert invert_embeddings(vectors, inverter, drafts=3, seed=0) == drafted


def test_what_has_no_meaning_is_named(inverter: Inverter, vectors: np.ndarray) -> None:
    with pytest.warns(UserWarning) as caught:
        found = invert_embeddings(vectors, inverter, num_steps=2, sequence_beam_width=4, max_length=128)
    assert len(found) == 2
    assert [str(w.message).split()[0] for w in caught] == ["sequence_beam_width", "max_length"]
    assert all(w.filename == __file__ for w in caught)


def test_strings(inverter: Inverter) -> None:
    expected = [found.text for found in inverter.reconstruct(TEXTS, steps=4)]
    assert invert_strings(TEXTS, inverter, num_steps=4) == expected
    assert invert_strings(TEXTS, corrector=inverter, steps=4) == expected


def test_model_by_name_is_loaded_once(inverter: Inverter, vectors: np.ndarray, tmp_path: Path) -> None:
    inverter.save_pretrained(tmp_path / "model")
    expected = invert_embeddings(vectors, inverter)
    assert invert_embeddings(vectors, tmp_path / "model") == expected
    assert invert_embeddings(vectors, str(tmp_path / "model")) == expected
    assert unembed.compat._load.cache_info().hits == 1


def test_wrong_correctors(inverter: Inverter, vectors: np.ndarray) -> None:
    with pytest.raises(UnembedError, match="Inverter.from_pretrained"):
        invert_embeddings(vectors, object())  # type: ignore[arg-type]
    with pytest.raises(UnembedError, match="two names"):
        invert_embeddings(vectors, inverter, corrector=inverter)
    with pytest.raises(UnembedError, match="unknown model"):
        invert_embeddings(vectors, "nothing-here")
