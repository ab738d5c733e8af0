"""A folder on disk: whole or not at all, read back as written, and nothing foreign taken for it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from unembed import checkpoint
from unembed.backbone import build
from unembed.checkpoint import (
    Checkpoint,
    bundled_models,
    dequantise,
    find_checkpoint,
    load_checkpoint,
    load_into,
    model_card,
    quantise,
    save_checkpoint,
)
from unembed.config import Config
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.tokens import TextTokenizer
from unembed.whole import mend_folder, whole_folder

SPECIAL = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, *(f"word{i}" for i in range(40))]
FACTS = {"training": {"steps": 10, "minutes": 0.5}, "data": ["tests of unembed"], "figures": [{"bleu": 0.25}]}


def small(**changes: Any) -> Checkpoint:
    base = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(SPECIAL)
    values = {
        "layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "max_tokens": 8, "vocab_size": len(VOCAB),
        "mask_id": 3, "end_id": 2, "pad_id": 0, "embedding_size": 6, "adaln_rank": 0, **changes,
    }  # fmt: skip
    config = Config().override(**values)
    torch.manual_seed(0)
    model = build(config.model, pretrained=False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return Checkpoint(config, model.state_dict(), TextTokenizer.wrap(base), FACTS)


@pytest.fixture(scope="module")
def saved() -> Checkpoint:
    return small()


@pytest.fixture
def folder(saved: Checkpoint, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", saved)
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


def refused(folder: Path | str) -> str:
    """Return the one sentence with which a model is refused."""
    with pytest.raises(UnembedError) as caught:
        Inverter.from_pretrained(folder, device="cpu")
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".")
    assert str(folder) in said
    return said


# There and back


def test_what_is_saved_is_read_back(saved: Checkpoint, folder: Path) -> None:
    again = load_checkpoint(folder)
    assert again.config == saved.config and again.facts == FACTS
    assert again.tokenizer.to_json() == saved.tokenizer.to_json()
    assert_same(again.weights, saved.weights)
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md", "config.json", "facts.json", "model-00001-of-00001.safetensors", "tokenizer.json",
        "tokens.json",
    ]  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o755  # others may read it, though a temporary folder is private


def test_a_model_without_facts_is_read(folder: Path) -> None:
    (folder / "facts.json").unlink()
    assert load_checkpoint(folder).facts == {}


@pytest.mark.parametrize("int8", [False, True])
def test_shards_are_small_and_join_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Checkpoint, int8: bool
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 3_000)
    monkeypatch.setattr(checkpoint, "HEADER_BYTES", 1_400)
    save_checkpoint(tmp_path / "model", saved, int8=int8)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert all(p.stat().st_size <= 3_000 for p in files)
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    names = [name for p in files for name in load_file(p)]
    assert ("blocks.0.modulation.up.weight@001" in names) != int8  # in four bytes, larger than a shard
    expected = dequantise(quantise(saved.weights)) if int8 else saved.weights
    assert_same(load_checkpoint(tmp_path / "model").weights, expected)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_a_large_tensor_is_cut_by_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1_000)
    monkeypatch.setattr(checkpoint, "HEADER_BYTES", 200)
    weights = {"a": torch.randn(rows, 60), "b": torch.randn(4), "c": torch.randn(199), "d": torch.tensor(2.0)}
    shards = list(checkpoint._shards(weights))
    assert all(sum(t.nbytes for t in shard.values()) <= 800 for shard in shards)
    raw = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert_same(dict(sorted(checkpoint._join(raw).items())), weights)


def test_the_bundled_size_is_met_with_real_shards(saved: Checkpoint, tmp_path: Path) -> None:
    # One that fits to the byte, were it not for the header of the file.
    weights = {"edge": torch.zeros(checkpoint.SHARD_BYTES // 4096, 1024), "small": torch.ones(3)}
    save_checkpoint(tmp_path / "model", dataclasses.replace(saved, weights=weights))
    sizes = [p.stat().st_size for p in (tmp_path / "model").glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) <= 16 * 2**20
    assert_same(load_checkpoint(tmp_path / "model").weights, weights)


def test_a_pretrained_denoiser_is_read_back_with_whole_buffers(tmp_path: Path) -> None:
    values = {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "ffn": 48,
        "backbone": "a/backbone",
        "time_conditioning": True,
    }
    model = small(**values)
    draw = torch.Generator().manual_seed(0)
    xt, e = torch.randint(0, 40, (3, 8), generator=draw), torch.randn(3, 6, generator=draw)
    for int8 in (False, True):
        save_checkpoint(tmp_path / "model", model, int8=int8)
        again = load_checkpoint(tmp_path / "model")
        for name in ("thetas", "windows"):
            assert again.weights[name].dtype == torch.int64
            assert torch.equal(again.weights[name], model.weights[name])
        if not int8:
            assert_same(again.weights, model.weights)
        own = build(model.config.model, pretrained=False).eval()
        load_into(own, model.weights, source="memory")
        loaded: Any = Inverter.from_pretrained(tmp_path / "model", device="cpu").model
        with torch.no_grad():
            one, two = (m(xt, e, t=torch.rand(3, generator=torch.Generator().manual_seed(1)))
                        for m in (own, loaded))  # fmt: skip
        others = torch.arange(len(VOCAB)) != 3
        torch.testing.assert_close(one[..., others], two[..., others], atol=0.1 if int8 else 0.0, rtol=0)


# int8


@given(
    rows=st.integers(1, 6), columns=st.integers(1, 9), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 2**32)
)
def test_int8_is_wrong_by_half_a_step_at_most(rows: int, columns: int, scale: float, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    stored = quantise({"w": matrix})
    assert stored["w"].dtype == torch.int8 and stored["w.scale"].shape == (rows, 1)
    assert int(stored["w"].abs().max()) <= 127
    step = stored["w.scale"]
    torch.testing.assert_close(step, matrix.abs().amax(1, keepdim=True) / 127, rtol=2**-17, atol=0)
    read = dequantise(stored)
    assert ((read["w"] - matrix).abs() <= step * 0.5001).all()
    again = quantise(read)  # what was read from bytes is saved as the same bytes
    assert all(torch.equal(again[name], stored[name]) for name in stored)


def test_int8_leaves_what_is_no_matrix_of_numbers() -> None:
    weights = {
        "w": torch.tensor([[0.0, 0.0], [1.0, -2.0]]),
        "bias": torch.randn(5),
        "count": torch.tensor([160_000, 2**31 - 1]),
        "table": torch.tensor([[2**40, -3]]),
        "norm.scale": torch.randn(3),  # a weight of that name, not the scale of another
    }
    again = dequantise(quantise(weights))
    assert again.keys() == weights.keys()
    for name in ("bias", "count", "table", "norm.scale"):
        assert again[name].dtype == weights[name].dtype and torch.equal(again[name], weights[name])
    assert torch.allclose(again["w"], weights["w"], atol=0.01) and (again["w"][0] == 0).all()


def test_half_precision_is_read_as_float32() -> None:
    again = dequantise({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, 2, dtype=torch.float16)})
    assert {t.dtype for t in again.values()} == {torch.float32}
    stored = quantise({"a": torch.randn(3, 4).bfloat16()})
    assert stored["a.scale"].dtype == dequantise(stored)["a"].dtype == torch.float32


# Whole or not at all


def test_a_folder_appears_when_all_went_well(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with whole_folder(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists() and draft.parent == target.parent  # so that one rename is enough
    assert contents(target) == {"a": b"1"}
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "sub" / "old").write_text("old")
    with whole_folder(tmp_path / "out") as draft:
        (draft / "new").write_text("new")
        assert contents(tmp_path / "out") == {"sub/old": b"old"}
    assert contents(tmp_path / "out") == {"new": b"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="no such permissions")
@pytest.mark.parametrize(("mask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_others_may_read_a_folder_as_the_user_s_mask_says(
    tmp_path: Path, saved: Checkpoint, mask: int, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(mask)
    try:
        save_checkpoint(tmp_path / "model", saved)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == folder_mode
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "model").iterdir()} == {file_mode}


def test_weights_that_may_not_be_read_are_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unembed.checkpoint.os.access", lambda *_: False)
    with pytest.raises(UnembedError, match=r"cannot read .*\.safetensors: permission denied; change its"):
        load_checkpoint(folder)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            UnembedError,
            "could not write .*out: the disk is full; ",
        ),
        (SafetensorError("I/O error: No space left on device"), UnembedError, "the disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            UnembedError,
            "Permission denied; what was there",
        ),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (UnembedError("a mistake."), UnembedError, "^a mistake.$"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
def test_on_an_error_the_old_folder_is_untouched(
    tmp_path: Path, error: BaseException, raised: type[BaseException], said: str, exists: bool
) -> None:
    if exists:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(raised, match=said), whole_folder(tmp_path / "out") as draft:
        (draft / "half").write_text("half")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if exists else [])
    if exists:
        assert contents(tmp_path / "out") == {"old": b"old"}


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_even_a_failing_rename_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    calls, real = [0], os.replace

    def replace(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] == failing:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((UnembedError, KeyboardInterrupt)), whole_folder(tmp_path / "out") as draft:
        (draft / "new").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert contents(tmp_path / "out") == {"old": b"old"}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_a_kill_the_folder_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        """Stand for SIGKILL: nothing after this moment is done."""

    calls, real = [0], os.replace

    def replace(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] < failing:
            real(source, target)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "age").write_text("old")
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(shutil, "rmtree", killed)
        with whole_folder(tmp_path / "out") as draft:
            (draft / "age").write_text("new")
    assert len(list(tmp_path.iterdir())) > 2
    mend_folder(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]
    assert contents(tmp_path / "out") == {"age": b"new" if failing == 3 else b"old"}
    mend_folder(tmp_path / "nothing" / "here")


@pytest.mark.parametrize("file", range(3))
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left"), KeyboardInterrupt()],
)
def test_a_full_disk_while_saving_leaves_the_old_model(
    folder: Path, saved: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: BaseException, file: int
) -> None:
    before, written = contents(folder), []

    def fail(tensors: dict[str, Tensor], path: Path) -> None:
        written.append(path)
        if len(written) > file:
            path.write_bytes(b"half")
            raise error
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 3_000)
    monkeypatch.setattr(checkpoint, "HEADER_BYTES", 1_000)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UnembedError
    with pytest.raises(kind) as caught:
        save_checkpoint(folder, small())
    if kind is UnembedError:
        assert str(caught.value).endswith("the disk is full; what was there before is unchanged.")
    assert len(written) == file + 1
    assert contents(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_really_full_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="the disk is full"), whole_folder(tmp_path / "out"):
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)


def test_a_parent_that_is_a_file_is_said(tmp_path: Path, saved: Checkpoint) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UnembedError, match="could not write"):
        save_checkpoint(tmp_path / "file" / "model", saved)
    assert (tmp_path / "file").read_text() == "mine"


def test_other_peoples_files_are_not_replaced(tmp_path: Path, saved: Checkpoint) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years")
    (tmp_path / "note").write_text("mine")
    for name in ("thesis", "note"):
        with pytest.raises(UnembedError, match=f"{name} exists and is not an unembed model; choose"):
            save_checkpoint(tmp_path / name, saved)
    assert contents(tmp_path) == {"thesis/chapter.tex": b"years", "note": b"mine"}
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", saved)
    assert load_checkpoint(tmp_path / "empty").facts == FACTS


# Found or not


def test_names_are_folders_bundled_or_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checkpoint(folder) == find_checkpoint(str(folder)) == folder
    monkeypatch.setattr(checkpoint, "bundled_models", lambda: {"all-MiniLM-L6-v2": folder})
    assert find_checkpoint("all-MiniLM-L6-v2") == folder
    assert "did you mean 'all-MiniLM-L6-v2'" in refused("all-MiniLM-L6")
    asked = []

    def download(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_checkpoint("someone/inverter") == folder
    ((repo, patterns),) = asked
    assert repo == "someone/inverter"
    assert not any(fnmatched.endswith((".bin", ".pt", ".py", "*")) for fnmatched in patterns)


def test_bundled_models_are_folders_with_settings() -> None:
    assert all((path / "config.json").is_file() for path in bundled_models().values())


def test_an_unknown_name_is_said() -> None:
    assert refused("no-such-model").startswith("unknown model 'no-such-model'")
    assert "unknown model" in refused("./no/such/folder")
    assert "unknown model" in refused("/no/folder")


def test_a_hub_that_cannot_be_reached_is_said() -> None:
    # Offline, as every test is.
    said = refused("someone/inverter")
    assert said.startswith("there is no folder 'someone/inverter', and the hub did not give it (")
    assert refused("some one/in?verter").startswith("there is no folder 'some one/in?verter'")


def test_without_the_hubs_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'unembed[hub]'" in refused("someone/inverter")


def test_a_file_is_no_model(folder: Path) -> None:
    assert "is a file; expected the folder" in refused(folder / "config.json")


# Damaged or foreign


def test_no_settings(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "is not an unembed model: it has no config.json" in refused(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"[]", b"3", b"null", b"", b"\xff\xfe\x00", b'{"model_type": "bert", "hidden_size": 768}',
        b'{"encoder": "x", "model": {"hiden": 3}}', b'{"encoder": "x", "model": {"layers": "many"}}',
        b'{"encoder": "x", "model": 3}',
    ],
)  # fmt: skip
def test_settings_of_something_else(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    assert "was not written by unembed" in refused(folder)


def test_facts_that_cannot_be_read(folder: Path) -> None:
    (folder / "facts.json").write_bytes(b"{half")
    assert "was not written by unembed" in refused(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokens.json"])
@pytest.mark.parametrize("raw", [None, b"{", b"{}", b"\xff"])
def test_a_tokenizer_missing_or_damaged(folder: Path, name: str, raw: bytes | None) -> None:
    (folder / name).unlink() if raw is None else (folder / name).write_bytes(raw)
    with pytest.raises(UnembedError):
        load_checkpoint(folder)


def test_no_weights_or_only_a_pickle(folder: Path) -> None:
    (folder / "model-00001-of-00001.safetensors").unlink()
    assert "holds no weights; expected .safetensors" in refused(folder)
    for name in ("model.pt", "pytorch_model.bin", "model.ckpt"):
        (folder / name).write_bytes(pickle.dumps(_Trap()))
        assert f"holds only {name}, a pickle, which unembed never loads" in refused(folder)
        (folder / name).unlink()


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def test_a_pickle_in_disguise_is_not_loaded(folder: Path) -> None:
    (folder / "model-00001-of-00001.safetensors").write_bytes(pickle.dumps(_Trap()))
    assert "is damaged (" in refused(folder)


def test_a_missing_shard(tmp_path: Path, saved: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 6_000)
    monkeypatch.setattr(checkpoint, "HEADER_BYTES", 1_400)
    save_checkpoint(tmp_path / "model", saved)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    for missing in (files[0], files[-1]):
        shutil.move(missing, tmp_path / "kept")
        assert f"has {len(files) - 1} of {len(files)} weight files; fetch" in refused(tmp_path / "model")
        shutil.move(tmp_path / "kept", missing)
    load_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5_000])
def test_a_file_cut_short(folder: Path, keep: int) -> None:
    file = folder / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    said = refused(folder)
    assert "is damaged (" in said and "fetch or save the model again" in said


def test_a_damaged_header(folder: Path) -> None:
    file = folder / "model-00001-of-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8:40] = b"\x00" * 32
    file.write_bytes(bytes(raw))
    assert "is damaged (" in refused(folder)


def _without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {k: v for k, v in weights.items() if k != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: {"bert.embeddings.weight": torch.ones(3)}, "the file lacks bias"),
        (lambda w: {}, "the file lacks bias"),
        (lambda w: _without(w, "places"), "the file lacks places"),
        (lambda w: w | {"extra": torch.ones(1)}, "the file has extra, which the model has not"),
        (
            lambda w: w | {"places": torch.ones(9, 16)},
            r"places is torch.float32 of \(9, 16\), expected .*\(8, 16\)",
        ),
        (lambda w: w | {"places": torch.ones(8, 16, dtype=torch.int8)}, "places is torch.int8 of"),
        (lambda w: _without(w, "places") | {"places@000": torch.ones(4, 16)}, r"places is .*\(4, 16\)"),
    ],
)
@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "model.safetensors", "adapter-x.safetensors"]
)
def test_foreign_weights(folder: Path, saved: Checkpoint, change: Any, said: str, name: str) -> None:
    (folder / "model-00001-of-00001.safetensors").unlink()
    save_file(change(dict(saved.weights)), folder / name)
    sentence = refused(folder)
    assert sentence.startswith(f"the weights in {folder} are not of this model: ")
    assert re.search(said, sentence)


def test_weights_of_another_size_of_model(folder: Path, saved: Checkpoint) -> None:
    config = saved.config.override(hidden=24)
    (folder / "config.json").write_text(config.to_json())
    assert "expected torch.float32 of (" in refused(folder)


def test_weights_go_into_a_model_with_or_without_memory(saved: Checkpoint) -> None:
    model = Denoiser(saved.config.model)
    load_into(model, saved.weights, source="memory")
    assert_same(dict(model.state_dict()), saved.weights)
    kept = model.tokens.weight
    load_into(model, saved.weights, source="memory")
    assert model.tokens.weight is kept  # an optimiser that holds it still does
    with torch.device("meta"):
        empty = Denoiser(saved.config.model)
    load_into(empty, saved.weights, source="memory")
    assert_same(dict(empty.state_dict()), saved.weights)


# The card


def test_the_card_says_what_the_model_is(saved: Checkpoint) -> None:
    card = model_card(saved)
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: unembed\n")
    for said in (
        "# unembed inverter for all-MiniLM-L6-v2",
        "(6 numbers)",
        "up to 8 tokens",
        "Inverter.from_pretrained(",
        "1 layers x 16; schedule linear, weight mean",
        "## Training\n\n- steps: 10\n- minutes: 0.5\n",
        "## Data\n\n- tests of unembed\n",
        "## Figures\n\n| bleu |\n| --- |\n| 0.250 |\n",
        "## Limits\n",
        "## Intended use\n",
    ):
        assert said in card, said
    assert "int8" not in card and ", int8;" in model_card(saved, int8=True)


def test_the_card_leaves_out_what_is_not_known(saved: Checkpoint) -> None:
    card = model_card(dataclasses.replace(saved, facts={}))
    assert not any(f"## {name}" in card for name in ("Training", "Data", "Figures"))
    figures = [
        {"strategy": "confidence", "steps": 8, "bleu": 12.3456},
        {"strategy": "euler", "steps": 8, "bleu": 1.0},
    ]
    card = model_card(dataclasses.replace(saved, facts={"figures": figures}))
    assert (
        "| strategy | steps | bleu |\n| --- | --- | --- |\n| confidence | 8 | 12.346 |\n| euler | 8 | 1.000 |"
        in card
    )


def test_the_card_counts_parameters(saved: Checkpoint) -> None:
    weights = {"w": torch.empty(2_340_000, device="meta")}
    assert "2.3M parameters" in model_card(dataclasses.replace(saved, weights=weights))


def test_the_saved_card_and_facts_are_those(folder: Path, saved: Checkpoint) -> None:
    assert (folder / "README.md").read_text() == model_card(saved)
    assert json.loads((folder / "facts.json").read_text()) == FACTS
    assert Config.from_json((folder / "config.json").read_text()) == saved.config
