"""What the command line says of itself, and how commands end."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import SIZE, Run, full_disk
from unembed.cli import COMMANDS, EXTRAS
from unembed.config import PRESETS, DiffusionConfig, ModelConfig, TrainConfig
from unembed.decode import decode
from unembed.inverter import Inverter
from unembed.strategies import STRATEGIES


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for commands in COMMANDS.values():
        for name, (_, summary, _) in commands.items():
            assert re.search(rf"{name} +{re.escape(summary)}", result.out)


@pytest.mark.parametrize("name", [name for commands in COMMANDS.values() for name in commands])
def test_every_command_has_help_and_json(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.code == 0
    assert f"Usage: unembed {name}" in result.out
    assert "--json" in result.out


def test_help_of_train_is_the_help_of_the_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(run("train", "--help").out.split())
    for section in (ModelConfig, DiffusionConfig, TrainConfig):
        for f in fields(section):
            assert f"--{f.name.replace('_', '-')} " in shown
            assert f.metadata["help"] in shown


def test_version(run: Run) -> None:
    assert re.fullmatch(r"unembed \d+\.\d+\.\d+\n", run("--version").out)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["recontruct"], "reconstruct"),
        (["reconstruct", "--stepz", "3"], "--steps"),
        (["invert", "v.npy", "--steps", "many"], "many"),
        (
            ["reconstruct", "-5 degrees"],
            "unknown option: -5 degrees. -5 is not a recognized option. Texts that",
        ),
        (["reconstruct", "-5 degrees"], "Texts that begin with a dash go last, after --. See unembed"),
        (["reconstruct", "--so he said"], "Texts that begin with a dash go last, after --."),
        (["invert"], "needs a value for FILE"),
        (["train", "--preset", "tiny"], "needs a value for --data"),
        (["train", "--data", "x", "-o", "y", "--schedule", "linera"], "linear"),
    ],
)
def test_parse_errors(run: Run, argv: list[str], expected: str) -> None:
    assert expected in run(*argv).sentence


def test_a_misspelt_option_is_not_taken_for_a_text(run: Run) -> None:
    assert "dash" not in run("reconstruct", "--stepz", "3").sentence
    assert "dash" not in run("train", "-x").sentence


# What there is


def test_presets(run: Run) -> None:
    rows = run("presets", "--json").json
    assert {row["name"] for row in rows} == set(PRESETS)
    for row in rows:
        assert row["layers"] == PRESETS[row["name"]].model.layers
        assert row["hidden_size"] == PRESETS[row["name"]].model.hidden
        assert row["vocabulary"] == PRESETS[row["name"]].model.vocab_size
        assert 0 < row["trainable_parameters"] <= row["total_parameters"]
    modes = [row["freeze"] for row in rows if row["name"] == "mmbert-22"]
    assert modes == ["none", "embeddings", "backbone"]
    assert "mmbert-22" in run("presets").out


def test_strategies_and_encoders(run: Run) -> None:
    assert [row["name"] for row in run("strategies", "--json").json] == list(STRATEGIES)
    assert "MaskGIT" in run("strategies").out
    assert "auto, the default, is beam" in run("strategies").err
    sizes = {row["name"]: row["embedding_size"] for row in run("encoders", "--json").json}
    assert sizes["all-MiniLM-L6-v2"] == SIZE
    assert "jina-embeddings-v3" in run("encoders").out


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("doctor", "--json").json
    assert report["ok"]
    assert report["self_test"] == dict.fromkeys(STRATEGIES, "ok")
    assert report["packages"]["torch"] == torch.__version__
    assert f"{SIZE} numbers" in report["encoder"]
    monkeypatch.setattr(Inverter, "invert", full_disk)
    result = run("doctor")
    assert result.code == 1
    assert "failed" in result.out


# How it ends


def test_ctrl_c(run: Run, model: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Inverter, "invert", press)
    result = run("invert", vectors, "--model", model)
    assert (result.code, result.out, result.err) == (130, "", "unembed: stopped.\n")


def test_ctrl_c_keeps_the_texts_of_finished_batches(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("invert", vectors, "--model", model, "--strategy", "euler", "--seed", 1, "--batch-size", 2)
    lines, records = run(*argv).out.splitlines(), run(*argv, "--json").json
    target, begun = tmp_path / "out.txt", list[object]()

    def press(*args: Any, **options: Any) -> Any:
        begun.append(None)
        if len(begun) % 2 == 0:
            raise KeyboardInterrupt
        return decode(*args, **options)

    monkeypatch.setattr("unembed.inverter.decode", press)
    shown, printed, written = run(*argv), run(*argv, "--json"), run(*argv, "-o", target)
    assert [shown.code, printed.code, written.code] == [130] * 3
    assert (shown.out.splitlines(), printed.json, written.out) == (lines[:2], records[:2], "")
    assert target.read_text().splitlines() == lines[:2]
    more = "the first 2 of 3 texts; for the others, invert the vectors after them.\n"
    assert shown.err == printed.err == f"unembed: stopped: stdout holds {more}"
    assert written.err == f"unembed: stopped: {target} holds {more}"


def test_missing_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "v.parquet").write_bytes(b"PAR1")
    assert "pip install 'unembed[data]'" in run("invert", tmp_path / "v.parquet").sentence
    assert EXTRAS["pyarrow"] == "data"


def test_a_bug_keeps_its_traceback(
    run: Run, model: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Inverter, "invert", fail)
    with pytest.raises(ZeroDivisionError):
        run("invert", vectors, "--model", model)


def test_quiet_when_the_reader_has_gone() -> None:
    code = "import sys; from unembed.cli import main; main(['--version'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) in (0, 1, 141)


def test_output_that_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("resource")  # Unix
    code = (
        "import resource; from unembed.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); main(['--version'])"
    )
    with (tmp_path / "out").open("wb") as stdout:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 2
    assert result.stderr == (
        "unembed: could not write all of the output: file too large; make room, or send it elsewhere.\n"
    )


def test_options_of_decoding_are_usual_where_the_library_s_are() -> None:
    from unembed.cli.options import Decoding
    from unembed.decode import DecodeOptions

    # Written twice, since the command line must not wait for torch before it can say what it takes.
    ours, theirs = vars(Decoding()), vars(DecodeOptions())
    assert {key: ours[key] for key in theirs} == theirs
