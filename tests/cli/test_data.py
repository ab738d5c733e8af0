"""`unembed encode` and `unembed prepare`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.commands import SIZE, TEXTS, Run, feed
from unembed.encoders import Encoder


def test_encode(run: Run, texts: Path, tmp_path: Path, encoder: Encoder) -> None:
    target = tmp_path / "v.npy"
    summary = run("encode", texts, "--encoder", "all-MiniLM-L6-v2", "-o", target, "--json").json
    assert (summary["texts"], summary["embedding_size"]) == (len(TEXTS), SIZE)
    expected = encoder.encode(TEXTS)
    np.testing.assert_allclose(np.load(target), expected, atol=1e-5)
    lines = run("encode", texts, "--limit", 2).out.splitlines()
    np.testing.assert_allclose([json.loads(line) for line in lines], expected[:2], atol=1e-5)
    assert len(run("encode", texts, "--json", "--limit", 2).json) == 2
    assert run("encode", texts, "--limit", 2, "-o", "-").out.splitlines() == lines


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_encode_says_what_it_left_out(run: Run, tmp_path: Path, encoder: Encoder, ending: str) -> None:
    import pyarrow
    from pyarrow import parquet

    file, lines = tmp_path / f"texts{ending}", [TEXTS[0], "", TEXTS[1], " ", TEXTS[2], ""]
    if ending == ".parquet":
        parquet.write_table(pyarrow.table({"text": lines}), file)
    else:
        rows = [json.dumps({"text": x}) if x and ending == ".jsonl" else x for x in lines]
        file.write_text("\n".join(rows) + "\n")
    result = run("encode", file, "--json")
    np.testing.assert_allclose(result.json, encoder.encode(TEXTS[:3]), atol=1e-5)
    said = "of {} texts are blank and were left out; rows are numbered without them\n"
    assert result.err == f"unembed: note: 3 {said.format(6)}"
    assert run("encode", file, "--limit", 2).err == f"unembed: note: 1 {said.format(3)}"
    assert run("encode", file, "--limit", 1).err == ""


def test_encode_pipes_into_invert(
    run: Run, texts: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, run("encode", texts).out.encode())
    assert len(run("invert", "-", "--model", model).out.splitlines()) == len(TEXTS)


def test_bad_input_of_encode(run: Run, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    target = tmp_path / "v.npy"
    assert "is empty" in run("encode", tmp_path / "empty.txt", "-o", target).sentence
    assert "not UTF-8" in run("encode", tmp_path / "latin.txt", "-o", target).sentence
    assert "body" in run("encode", tmp_path / "a.jsonl", "-o", target).sentence
    assert "there is no file" in run("encode", tmp_path / "missing.txt", "-o", target).sentence
    assert "'all-MiniLM-L6-v2'" in run("encode", texts, "--encoder", "MiniLM-L6-v2", "-o", target).sentence
    assert ".npy" in run("encode", texts, "-o", tmp_path / "v.csv").sentence
    assert "limit" in run("encode", texts, "-o", target, "--limit", 0).sentence
    assert not target.exists()


# Prepare


def test_prepare(run: Run, texts: Path, tmp_path: Path) -> None:
    argv = ("prepare", texts, "-o", tmp_path / "data", "--tokens", 6, "--limit", 4)
    summary = run(*argv, "--json").json
    assert (summary["kind"], summary["texts"], summary["max_tokens"]) == ("pairs", 4, 6)
    assert summary["truncated"] > 0
    assert "4 pairs for all-MiniLM-L6-v2" in run(*argv).out  # again: nothing is left to do
    more = run("prepare", texts, "-o", tmp_path / "data", "--tokens", 6, "--json").json
    assert more["texts"] == len(TEXTS)


def test_prepare_passages_with_a_tokenizer(run: Run, texts: Path, model: Path, tmp_path: Path) -> None:
    argv = ("prepare", texts, "-o", tmp_path / "data", "--passages", "--tokenizer", model, "--json")
    assert (run(*argv).json["kind"], run(*argv).json["embedding_size"]) == ("passages", SIZE)


def test_bad_input_of_prepare(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    (tmp_path / "empty.txt").write_text("\n")
    assert "--dataset" in run("prepare", "-o", out).sentence
    assert "--dataset" in run("prepare", texts, "--dataset", "c4", "-o", out).sentence
    assert "unknown dataset" in run("prepare", "--dataset", "c5", "-o", out).sentence
    assert "is empty" in run("prepare", tmp_path / "empty.txt", "-o", out).sentence
    assert "max_tokens" in run("prepare", texts, "-o", out, "--tokens", 0).sentence
    assert "unknown encoder" in run("prepare", texts, "-o", out, "--encoder", "x").sentence
    assert "tokenizer" in run("prepare", texts, "-o", out, "--tokenizer", texts).sentence
    assert not (out / "manifest.json").exists()


def test_prepare_can_be_stopped(
    run: Run, texts: Path, tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    argv = ("prepare", texts, "-o", tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "encode", press)
        result = run(*argv)
    assert (result.code, result.out) == (130, "")
    assert result.err == "unembed: stopped; run the same command again to go on.\n"
    assert run(*argv).code == 0
