"""surrogate: a small network that is asked as an encoder is, and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from unembed import surrogate
from unembed.checkpoint import SHARD_BYTES, bundled_models, load_checkpoint
from unembed.config import Config
from unembed.errors import UnembedError
from unembed.reader import Reader
from unembed.surrogate import DistilledEncoder, Surrogate
from unembed.tokens import TextTokenizer

WORDS = [f"w{i}" for i in range(40)]
T, E = 8, 12
CONFIG = Config().override(
    encoder="words", layers=2, hidden=32, heads=2, ffn=64, max_tokens=T, embedding_size=E,
    vocab_size=43, mask_id=2, end_id=1, pad_id=0,
)  # fmt: skip


def word_tokenizer() -> TextTokenizer:
    """Build a vocabulary of 40 words."""
    vocabulary = {t: i for i, t in enumerate(["[PAD]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer.wrap(tokenizer, name="words")


@pytest.fixture
def encoder() -> DistilledEncoder:
    torch.manual_seed(0)
    facts = {
        "training": {"minutes": 2.0},
        "data": ["made up"],
        "agreement": [{"text": "chat", "cosine": 0.9375}],
    }
    model = Surrogate(CONFIG.model)
    return DistilledEncoder(model, config=CONFIG, tokenizer=word_tokenizer(), facts=facts, device="cpu")


def test_it_is_asked_as_an_encoder(encoder: DistilledEncoder) -> None:
    assert (encoder.name, encoder.target, encoder.size, encoder.max_tokens) == (
        "distilled words", "words", E, T,
    )  # fmt: skip
    vectors = encoder.encode(["w1 w2", "w3", "w1 w2 w3 w4 w5 w6 w7 w8", "w2 w1"], batch_size=2)
    assert vectors.shape == (4, E) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(vectors[0] - vectors[3]).max() > 1e-3  # order counts
    long = encoder.encode(["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"])
    assert np.allclose(long, vectors[2], atol=1e-6)  # of a text too long, its beginning
    assert encoder.encode([]).shape == (0, E)


def test_what_lies_behind_a_text_is_not_seen(encoder: DistilledEncoder) -> None:
    lengths = torch.tensor([3, 8])
    ids = torch.randint(3, 43, (2, T), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 3:] = torch.tensor([1, 0, 0, 0, 0])
    vectors = encoder.encode_ids(ids, lengths)
    assert torch.allclose(vectors, encoder.encode_ids(other, lengths), atol=1e-6)
    assert torch.allclose(vectors[:1], encoder.encode_ids(ids[:1, :3], lengths[:1]), atol=1e-5)
    assert not torch.allclose(vectors[0], encoder.encode_ids(ids, torch.tensor([4, 8]))[0], atol=1e-3)
    assert not vectors.is_inference()


def test_a_search_may_ask_it_by_ids(encoder: DistilledEncoder) -> None:
    reader = Reader(encoder, word_tokenizer())
    assert reader.by_ids


@pytest.mark.parametrize("int8", [True, False])
def test_saved_and_loaded(encoder: DistilledEncoder, tmp_path: Path, int8: bool) -> None:
    texts = ["w1 w2 w3", "w39 w0"]
    encoder.save_pretrained(tmp_path / "encoder", int8=int8)
    again = DistilledEncoder.from_pretrained(tmp_path / "encoder", device="cpu")
    near = (encoder.encode(texts) * again.encode(texts)).sum(1)
    assert (near > (0.999 if int8 else 1 - 1e-6)).all()
    assert (again.target, again.config, again.facts) == ("words", CONFIG, encoder.facts)
    assert again.tokenizer.to_json() == encoder.tokenizer.to_json()
    card = (tmp_path / "encoder" / "README.md").read_text()
    assert "# Distilled encoder for words" in card and "| chat | 0.938 |" in card and "made up" in card
    assert ("int8" in card) == int8
    encoder.save_pretrained(tmp_path / "encoder")  # in the place of the one before
    assert [p.name for p in tmp_path.iterdir()] == ["encoder"]


def test_the_default_network_fits_into_16_megabytes(tmp_path: Path) -> None:
    from unembed.distill import DISTILLED

    model = Surrogate(DISTILLED.model)
    encoder = DistilledEncoder(model, config=DISTILLED, tokenizer=word_tokenizer(), device="cpu")
    encoder.save_pretrained(tmp_path / "encoder")
    sizes = [p.stat().st_size for p in (tmp_path / "encoder").iterdir()]
    vocabulary = 470_000  # MiniLM's tokenizer.json, in the place of the small one here
    assert sum(sizes) + vocabulary < 16e6 and max(sizes) <= SHARD_BYTES


def test_it_is_no_inverter(
    encoder: DistilledEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder.save_pretrained(tmp_path / "words-encoder")
    with pytest.raises(UnembedError, match="is not an unembed model: it has no config.json"):
        load_checkpoint(tmp_path / "words-encoder")
    for module in ("surrogate", "checkpoint"):
        monkeypatch.setattr(f"unembed.{module}.bundled_folder", lambda: tmp_path)
    assert bundled_models() == {}
    assert DistilledEncoder.from_pretrained("words", device="cpu").target == "words"


def test_bad_folders(encoder: DistilledEncoder, tmp_path: Path) -> None:
    def load(path: Any) -> DistilledEncoder:
        return DistilledEncoder.from_pretrained(path, device="cpu")

    with pytest.raises(UnembedError, match="there is no distilled encoder for nowhere at hand; train one"):
        load("nowhere")
    with pytest.raises(UnembedError, match="holds no distilled encoder: it has no encoder.json"):
        load(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UnembedError, match="exists and is not a distilled encoder"):
        encoder.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    encoder.save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / surrogate.CONFIG).write_text("{")
    with pytest.raises(UnembedError, match="was not written by unembed train-encoder"):
        load(tmp_path / "broken")
    encoder.save_pretrained(tmp_path / "other")
    settings = json.loads((tmp_path / "other" / surrogate.CONFIG).read_text())
    settings["model"]["layers"] = 3
    (tmp_path / "other" / surrogate.CONFIG).write_text(json.dumps(settings))
    with pytest.raises(UnembedError, match="are not of this model: the file lacks blocks.2"):
        load(tmp_path / "other")
