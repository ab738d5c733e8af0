"""Tables: LSA equals scikit-learn's own pipeline, a static model model2vec's own way of adding up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from unembed.classical import TableEncoder, fit_lsa, is_table, save_table, table_of_model2vec
from unembed.config import preset
from unembed.corpus import PreparedData, prepare
from unembed.encoders import IdEncoder, LocalEncoder, load_encoder
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.pairs import FreshSpans
from unembed.run import Group
from unembed.tokens import TextTokenizer
from unembed.train import open_pairs, train

WORDS = [c + v + d for c in "bdgkm" for v in "aeiou" for d in "nrst"]
SPECIAL = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]
SIZE = 12


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """A vocabulary of a hundred words."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer.wrap(inner, name="words")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of one to twenty words, some words often and some repeated in a text."""
    rng = np.random.default_rng(0)
    often = 1 / np.arange(1, len(WORDS) + 1)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 21), p=often / often.sum())) for _ in range(200)]


@pytest.fixture(scope="module")
def lsa(tokenizer: TextTokenizer, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LSA fitted on the texts, saved."""
    folder = tmp_path_factory.mktemp("encoders") / "lsa"
    save_table(
        folder, _fit(tokenizer, texts), tokenizer=tokenizer, kind="lsa", facts={"passages": len(texts)}
    )
    return folder


def _fit(tokenizer: TextTokenizer, texts: list[str]) -> np.ndarray:
    spans = tokenizer.spans(texts)
    offsets = np.cumsum([0, *map(len, spans)])
    return fit_lsa(np.concatenate(spans).astype(np.uint16), offsets, vocab_size=tokenizer.size, size=SIZE)


def _sklearn(texts: list[str], others: list[str]) -> np.ndarray:
    """Fit scikit-learn's pipeline from text to vector and embed other texts."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    pipeline = make_pipeline(
        TfidfVectorizer(vocabulary=[*SPECIAL, *WORDS], token_pattern=r"\S+", lowercase=False),
        TruncatedSVD(SIZE, random_state=0),
        Normalizer(copy=False),
    )
    return pipeline.fit(texts).transform(others)


def test_lsa_is_scikit_learns(lsa: Path, texts: list[str]) -> None:
    others = [" ".join(WORDS[i : i + 5] + WORDS[i : i + 2]) for i in range(20)]
    ours = load_encoder(lsa).encode(others)
    assert ours.shape == (20, SIZE)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(
        ours, _sklearn(texts, others), atol=2e-3
    )  # the table is kept in half precision


def test_lsa_before_rounding_is_scikit_learns(tokenizer: TextTokenizer, texts: list[str]) -> None:
    table = _fit(tokenizer, texts)
    sums = np.stack([table[span].sum(0) for span in tokenizer.spans(texts)])
    ours = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, _sklearn(texts, texts), atol=1e-5)


def test_ids_give_the_vectors_of_their_text(lsa: Path, texts: list[str]) -> None:
    encoder = TableEncoder(lsa, device="cpu")
    encoded = encoder.tokenizer.encode(texts, max_tokens=32)
    ids, lengths = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.lengths)
    by_ids = encoder.encode_ids(ids, lengths).numpy()
    np.testing.assert_allclose(by_ids, encoder.encode(texts, batch_size=7), atol=1e-6)
    behind = torch.where(torch.arange(32) < lengths[:, None], ids, 5)  # what lies behind is not read
    np.testing.assert_array_equal(encoder.encode_ids(behind, lengths).numpy(), by_ids)


def test_vectors_have_length_one_in_any_order(lsa: Path, texts: list[str]) -> None:
    encoder = load_encoder(lsa)
    vectors = encoder.encode(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    backwards = encoder.encode([" ".join(reversed(text.split())) for text in texts])
    np.testing.assert_allclose(backwards, vectors, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_near(lsa: Path, texts: list[str], dtype: str) -> None:
    half = load_encoder(lsa, dtype=dtype).encode(texts)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, load_encoder(lsa).encode(texts), atol=2e-2)


def test_loaded_by_its_folder(lsa: Path, tokenizer: TextTokenizer) -> None:
    encoder: Any = load_encoder(str(lsa), device="cpu")
    assert isinstance(encoder, TableEncoder)
    assert isinstance(encoder, IdEncoder)
    assert (encoder.name, encoder.size, encoder.kind) == (str(lsa), SIZE, "lsa")
    assert encoder.facts == {"passages": 200}
    assert encoder.tokenizer.to_json() == tokenizer.to_json()
    assert not issubclass(TableEncoder, LocalEncoder)
    assert encoder.encode([]).shape == (0, SIZE)
    assert load_encoder(lsa, trust_remote_code=True).size == SIZE  # which has no code to run


def test_saving_rounds_by_half_precision_alone(lsa: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    table = load_file(lsa / "table.safetensors")["table"].astype(np.float32)
    for scale in (1, 8, 2**-10):  # a power of two changes no digit
        save_table(tmp_path / str(scale), table * scale, tokenizer=tokenizer, kind="lsa", facts={})
        again = load_file(tmp_path / str(scale) / "table.safetensors")["table"]
        np.testing.assert_array_equal(again, table)
    assert 0.5 < np.abs(table).max() <= 1


def test_trains_an_inverter(lsa: Path, texts: list[str], tmp_path: Path) -> None:
    encoder = load_encoder(lsa)
    data = prepare(texts, encoder=encoder, out=tmp_path / "data", kind="passages", max_tokens=8)
    assert data.embedding_size == SIZE
    config = preset("tiny").override(
        pairs="fresh", steps=2, batch_size=4, layers=1, hidden=32, heads=2, ffn=32, evaluate_every=10,
    )  # fmt: skip
    result = train(config, data=tmp_path / "data", out=tmp_path / "run")
    inverter = Inverter.from_pretrained(result.model, device="cpu")
    assert inverter.encoder_name == str(lsa)
    (found,) = inverter.reconstruct(["ban ban bas"], steps=2)
    assert -1 <= found.cosine <= 1.0001


def test_spans_are_embedded_as_they_are(lsa: Path, texts: list[str], tmp_path: Path) -> None:
    encoder: Any = load_encoder(lsa, device="cpu")
    data = prepare(texts, encoder=encoder, out=tmp_path / "data", kind="passages", max_tokens=8)
    config = preset("tiny").override(
        encoder=str(lsa), pairs="fresh", batch_size=16, embedding_size=SIZE, max_tokens=8
    )
    pairs = open_pairs(config, PreparedData.open(data.path), Group(0, 1, torch.device("cpu")))
    assert isinstance(pairs, FreshSpans)
    ids, vectors = pairs.batch(3, slice(None))
    np.testing.assert_allclose(
        vectors.numpy(), encoder.encode(encoder.tokenizer.decode(ids.numpy())), atol=1e-5
    )


@pytest.mark.parametrize("text", ["", "  "])
def test_blank_text_is_refused(lsa: Path, text: str) -> None:
    with pytest.raises(UnembedError, match="text 1 is .*not blank"):
        load_encoder(lsa).encode(["ban", text])


def test_bad_options_are_named(lsa: Path) -> None:
    with pytest.raises(UnembedError, match="option of TableEncoder 'allow_pickle'"):
        load_encoder(lsa, allow_pickle=True)
    with pytest.raises(UnembedError, match="unknown dtype 'float8'"):
        load_encoder(lsa, dtype="float8")
    with pytest.raises(UnembedError, match="batch_size must be at least 1"):
        load_encoder(lsa).encode(["ban"], batch_size=0)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("encoder.json", b"{"),
        ("encoder.json", b'{"format": 2}'),
        ("encoder.json", b'{"format": 1}'),
        ("table.safetensors", b"nothing"),
    ],
)
def test_damaged_folders_are_refused(lsa: Path, tmp_path: Path, file: str, content: bytes) -> None:
    folder = _copy(lsa, tmp_path / "damaged")
    (folder / file).write_bytes(content)
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(folder)


def test_a_table_of_another_vocabulary_is_refused(lsa: Path, tmp_path: Path) -> None:
    folder = _copy(lsa, tmp_path / "short")
    save_file({"table": np.ones((3, SIZE), np.float16)}, folder / "table.safetensors")
    with pytest.raises(UnembedError, match=r"shape \(3, 12\) for a vocabulary of 104"):
        load_encoder(folder)


def test_nothing_is_overwritten_or_half_written(lsa: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="exists already"):
        save_table(lsa, np.ones((tokenizer.size, 2)), tokenizer=tokenizer, kind="lsa", facts={})
    for bad in (np.ones((3, 2)), np.full((tokenizer.size, 2), np.nan), np.zeros((tokenizer.size, 2))):
        with pytest.raises(UnembedError, match="expected finite numbers"):
            save_table(tmp_path / "bad", bad, tokenizer=tokenizer, kind="lsa", facts={})
    with pytest.raises(TypeError):  # what cannot be written leaves no folder
        save_table(
            tmp_path / "bad", np.ones((tokenizer.size, 2)), tokenizer=tokenizer, kind="lsa", facts={"a": {1}}
        )
    assert not (tmp_path / "bad").exists()
    assert not is_table(tmp_path / "bad")


@pytest.mark.parametrize("size", [0, 104, 500])
def test_too_large_an_lsa_is_refused(tokenizer: TextTokenizer, size: int) -> None:
    tokens, offsets = np.arange(300) % 104, np.arange(0, 301, 2)
    with pytest.raises(UnembedError, match="size must lie between 1 and 103"):
        fit_lsa(tokens, offsets, vocab_size=tokenizer.size, size=size)


# --- model2vec ------------------------------------------------------------------------------------


@pytest.fixture
def model2vec(tmp_path: Path) -> Path:
    """A static model as model2vec 0.10 saves it: no special tokens but two, numbered anew."""
    folder = tmp_path / "model2vec"
    folder.mkdir()
    tokens = ["[PAD]", "[UNK]", *sorted(WORDS, reverse=True)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(0).normal(size=(len(tokens), 6)).astype(np.float16)
    save_file({"embeddings": vectors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"normalize": True, "apply_pca": 6}))
    return folder


def test_static_vectors_are_those_of_model2vec(
    model2vec: Path, tokenizer: TextTokenizer, texts: list[str], tmp_path: Path
) -> None:
    table = table_of_model2vec(model2vec, tokenizer)
    save_table(tmp_path / "static", table, tokenizer=tokenizer, kind="static", facts={})
    encoder = load_encoder(tmp_path / "static")
    # Its own way: the unknown token is left out, the rest averaged, and brought to length one.
    theirs = Tokenizer.from_file(str(model2vec / "tokenizer.json"))
    vectors = load_file(model2vec / "model.safetensors")["embeddings"].astype(np.float32)
    texts = [*texts, "Ban unheard-of kor", "xyz DER"]
    for text, ours in zip(texts, encoder.encode(texts), strict=True):
        ids = [i for i in theirs.encode(text, add_special_tokens=False).ids if i != 1]
        mean = vectors[ids].mean(0)
        np.testing.assert_allclose(ours, mean / np.linalg.norm(mean), atol=1e-5)
    assert not encoder.encode(["xyz"]).any()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", b'{"normalize": false}'),
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", b"no"),
    ],
)
def test_other_static_models_are_refused(
    model2vec: Path, tokenizer: TextTokenizer, file: str, change: bytes
) -> None:
    (model2vec / file).write_bytes(change)
    with pytest.raises(UnembedError, match="cannot be read"):
        table_of_model2vec(model2vec, tokenizer)


def test_another_vocabulary_is_refused(model2vec: Path) -> None:
    inner = Tokenizer(models.WordPiece({"[PAD]": 0, "[SEP]": 1, "ban": 2}, unk_token="[PAD]"))
    with pytest.raises(UnembedError, match="has another vocabulary: 99 tokens"):
        table_of_model2vec(model2vec, TextTokenizer.wrap(inner))


def _copy(folder: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, to))
