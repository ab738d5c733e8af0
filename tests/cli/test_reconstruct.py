"""`unembed reconstruct`, and models that are none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.commands import LONG, SIZE, TEXTS, Run, feed
from unembed.backbone import build
from unembed.encoders import Encoder
from unembed.inverter import Inverter


def test_reconstruct(run: Run, model: Path) -> None:
    result = run("reconstruct", *TEXTS[:2], "--model", model)
    assert result.code == 0
    assert result.err == ""
    for word in ("original", "recovered", "cosine", "confidence", "kettle", "umbrella"):
        assert word in result.out


def test_reconstruct_json(run: Run, model: Path) -> None:
    (record,) = run("reconstruct", TEXTS[0], "--model", model, "--json", "--steps", 4).json
    assert record["original"] == TEXTS[0]
    assert record["forward_passes"] == 4
    assert record["strategy"] == "confidence"
    assert -1 <= record["cosine"] <= 1
    assert 0 <= record["confidence"] <= 1
    assert len(record["confidences"]) > 0
    assert isinstance(record["recovered"], str)
    assert record["likeness"] is None  # this model does not guess


def test_a_model_that_guesses_vectors_says_so(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    plain = Inverter.from_pretrained(model, device="cpu")
    config = plain.config.override(causal=True, embeds=True, embed_share=0.1)
    torch.manual_seed(0)
    guessing = Inverter(build(config.model), config=config, tokenizer=plain.tokenizer, device="cpu")
    guessing.save_pretrained(tmp_path / "m")
    found = guessing.invert(np.load(vectors))
    records = run("invert", vectors, "--model", tmp_path / "m", "--device", "cpu", "--json").json
    assert [r["likeness"] for r in records] == [pytest.approx(one.likeness, abs=1e-5) for one in found]
    argv = ("reconstruct", TEXTS[0], "--model", tmp_path / "m")
    (record,) = run(*argv, "--json").json
    live = run(*argv, "--live").out
    assert f"cosine {record['cosine']:.3f}   likeness {record['likeness']:.3f}   confidence" in live
    assert "likeness" not in run("reconstruct", TEXTS[0], "--model", model, "--live").out


def test_several_drafts_and_one_answer(run: Run, model: Path) -> None:
    argv = ("reconstruct", TEXTS[0], "--model", model, "--steps", 4, "--seed", 1)
    (record,) = run(*argv, "--drafts", 3, "--json").json
    assert (record["strategy"], record["forward_passes"]) == ("confidence", 12)
    assert run(*argv, "--json").json[0]["recovered"] != record["recovered"]
    live = run(*argv, "--drafts", 3, "--live")
    assert f"cosine {record['cosine']:.3f}" in live.out


def test_output_says_what_auto_was(run: Run, model: Path, encoder: Encoder, tmp_path: Path) -> None:
    def strategies(folder: Path, *options: str) -> list[str]:
        return [
            run("reconstruct", TEXTS[0], "--model", folder, "--json", "--seed", 0, *more).json[0]["strategy"]
            for more in (options, (*options, "--strategy", "auto"))
        ]

    assert strategies(model) == ["confidence"] * 2
    plain = Inverter.from_pretrained(model, device="cpu")
    reading = plain.config.override(causal=True)
    torch.manual_seed(0)
    Inverter(build(reading.model), config=reading, tokenizer=plain.tokenizer).save_pretrained(tmp_path / "m")
    assert strategies(tmp_path / "m") == ["beam"] * 2
    assert strategies(tmp_path / "m", "--temperature", "0.5") == ["causal"] * 2
    assert strategies(tmp_path / "m", "--steps", "4") == ["confidence"] * 2


def test_reconstruct_reads_standard_input(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["-"], []):
        feed(monkeypatch, f"{TEXTS[0]}\n\n{TEXTS[1]}\n".encode())
        records = run("reconstruct", *argv, "--model", model, "--json", "--steps", 1).json
        assert [r["original"] for r in records] == TEXTS[:2]


def test_a_text_may_begin_with_a_dash(run: Run, model: Path) -> None:
    (record,) = run("reconstruct", "--model", model, "--json", "--steps", 1, "--", "-5 degrees").json
    assert record["original"] == "-5 degrees"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["reconstruct"], "texts"),
        (["reconstruct", "x", "-"], "texts"),
        (["encode", "-"], "texts"),
        (["prepare", "-", "-o", "data"], "texts"),
        (["evaluate", "-"], "texts"),
        (["invert", "-"], "vectors"),
    ],
)
def test_who_has_to_type_is_told_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    feed(monkeypatch, b"")
    assert "standard input is empty" in run(*argv).sentence  # and nothing else
    feed(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    first, second = run(*argv).err.splitlines()
    assert first == f"unembed: reading {what} from here, one a line, until Ctrl-D"
    assert "standard input is empty" in second


def test_live_ends_in_what_invert_returns(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    live = run("reconstruct", TEXTS[0], "--model", model, "--live")
    (record,) = run("reconstruct", TEXTS[0], "--model", model, "--json").json
    assert live.code == 0
    assert TEXTS[0] in live.out
    assert f"{SIZE} numbers" in live.out
    assert f"cosine {record['cosine']:.3f}" in live.out
    assert "░" not in live.out


def test_live_and_json_are_refused(run: Run) -> None:
    assert "choose one" in run("reconstruct", "x", "--live", "--json").sentence


def test_no_model_is_bundled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unembed.checkpoint.bundled_models", dict)
    sentence = run("reconstruct", "x").sentence
    assert "--model" in sentence
    assert "unembed train" in sentence


def test_bundled_model_is_found(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unembed.checkpoint.bundled_models", lambda: {"all-MiniLM-L6-v2": model})
    (record,) = run("reconstruct", TEXTS[0], "--json").json
    assert record["original"] == TEXTS[0]
    (row,) = run("models", "--json").json
    assert (row["name"], row["encoder"], row["max_tokens"]) == ("all-MiniLM-L6-v2",) * 2 + (32,)
    assert "all-MiniLM-L6-v2" in run("models").out


def test_long_text_is_cut_with_a_note(run: Run, model: Path) -> None:
    for extra in ("--json", "--live"):
        result = run("reconstruct", LONG, "--model", model, "--steps", 1, extra)
        assert result.code == 0
        assert result.err == "unembed: note: 1 of 1 texts are longer than 32 tokens and were cut.\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["", "--steps", 2], "blank"),
        (["x", "--steps", 0], "at least 1"),
        (["x", "--steps", 33], "between 1 and 32"),
        (["x", "--strategy", "confidense"], "'confidence'"),
        (["x", "--temperature", -1], "temperature"),
        (["x", "--guidance", "nan"], "guidance"),
        (["x", "--remask", 2], "remask"),
        (["x", "--restart", -0.5], "restart"),
        (["x", "--reveal", "sine"], "reveal"),
        (["x", "--beams", 129], "beams must be a whole number from 1 to 128"),
        (["x", "--looks", 9], "looks must be a whole number from 0 to 8, not 9"),
        (["x", "--strategy", "causal", "--looks", 1], "--looks concerns beam; add --strategy beam, or"),
        (["x", "--steps", 2.5], "invalid value for --steps: must be a whole number, not 2.5. See unembed"),
        (["x", "--steps", "two"], 'unable to convert "two" into int'),
        (["x", "--drafts", 0], "drafts must be a whole number from 1 to 64"),
        (["x", "--strategy", "beam", "--drafts", 2], "leave drafts out"),
        (["x", "--drafts", 2, "--temperature", 0], "all would be the same"),
        (["x", "--strategy", "beam", "--temperature", 0.5], "leave temperature out"),
        (["x", "--strategy", "beam", "--beams", 4], "does not read left to right, as beam does"),
        (["x", "--strategy", "confidence", "--beams", 4], "--beams concerns beam; add --strategy beam, or"),
        (["x", "--remask", 0.1], "--remask concerns euler-remask"),
        (["x", "--batch-size", 0], "--batch-size must be at least 1, not 0. See unembed reconstruct --help."),
        (["x", "--batch-size", -3], "must be at least 1, not -3"),
        (["x", "--live", "--pace", "nan"], "--pace must be a number of seconds, 0 or more, not nan."),
        (["x", "--live", "--pace", -1], "not -1"),
        (["x", "--pace", 2], "--pace concerns --live; add --live, or leave it out."),
        (["x", "--seed", -1], "seed"),
        (["x", "--encoder", "all-minilm-l7-v2"], "'all-MiniLM-L6-v2'"),
        (["x", "--device", "gpu"], "unknown device"),
        (["x", "--device", "cuda:77"], "no device cuda:77"),
    ],
)
def test_bad_options_of_reconstruct(run: Run, model: Path, argv: list[object], expected: str) -> None:
    assert expected in run("reconstruct", *argv, "--model", model).sentence


def test_jina_needs_trust(run: Run, model: Path) -> None:
    assert (
        "--trust-remote-code"
        in run("reconstruct", "x", "--model", model, "--encoder", "jina-embeddings-v3").sentence
    )


# Models that are none


def test_bad_models(run: Run, model: Path, vectors: Path, tmp_path: Path) -> None:
    def said(folder: Path | str) -> str:
        return run("invert", vectors, "--model", folder).sentence

    assert "unknown model" in said("nothing-here")
    assert "is a file" in said(vectors)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in said(empty)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "not written by unembed" in said(foreign)

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (pickled / file.name).write_bytes(file.read_bytes())
    assert "no weights" in said(pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert "pickle" in said(pickled)

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        raw = file.read_bytes()
        (damaged / file.name).write_bytes(raw[: len(raw) // 2] if file.suffix == ".safetensors" else raw)
    assert "damaged" in said(damaged)
