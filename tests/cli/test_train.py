"""`unembed train`: settings, interrupts, full disks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from cli.commands import SMALL, Run, full_disk
from unembed.config import Config


def test_train_then_reconstruct(run: Run, prepared: Path, tmp_path: Path) -> None:
    argv = ("train", "--preset", "tiny", "--data", prepared, "-o", tmp_path / "run", *SMALL)
    result = run(*argv, "--steps", 3, "--learning-rate", 3e-4, "--no-stratified", "--json")
    assert result.code == 0
    assert (result.json["steps"], result.json["interrupted"]) == (3, False)
    config = Config.from_json((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config.model.layers, config.model.max_tokens) == (1, 12)
    assert (config.train.learning_rate, config.diffusion.stratified) == (3e-4, False)
    assert config.train.pairs == "cached"
    (record,) = run("reconstruct", "A text.", "--model", result.json["model"], "--json").json
    assert record["original"] == "A text."

    assert "--resume" in run(*argv, "--steps", 3).sentence
    further = run("train", "--data", prepared, "-o", tmp_path / "run", "--resume", "--steps", 5)
    assert "5 steps" in further.out
    assert "unembed reconstruct --model" in further.err
    other = run("train", "--data", prepared, "-o", tmp_path / "run", "--resume", "--hidden", 64)
    assert "hidden" in other.sentence


def test_a_run_that_was_killed_while_it_saved_can_be_resumed(
    run: Run, prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    argv = ("--data", prepared, "-o", out)
    assert run("train", "--preset", "tiny", *argv, *SMALL, "--steps", 2).code == 0
    aside = out / ".state-old-1"  # as a kill between the two moves leaves it
    aside.mkdir()
    (out / "state").rename(aside / "state")
    assert run("train", *argv, "--resume", "--steps", 4, "--json").json["steps"] == 4
    assert not aside.exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--preset", "tinny"], "'tiny'"),
        (["--preset", "tiny", "--layers", 0], "layers must be at least 1"),
        (["--preset", "tiny", "--hidden", 100, "--heads", 3], "not a multiple"),
        (["--preset", "tiny", "--mask-ratio", 2], "mask_ratio"),
        (["--preset", "tiny", "--seed", -1], "seed must be between 0 and"),
        (["--preset", "tiny", "--seed", 10**23], "seed must be between 0 and"),
        (
            ["--preset", "tiny", "--max-tokens", 16],
            "prepared with max_tokens 12, not 16; leave --max-tokens out",
        ),
        (["--preset", "tiny", *SMALL, "--learning-rate", 1e30], "diverged"),
        (["--resume"], "no run to resume"),
        (["--preset", "tiny", "--validation", 100], "--validation"),
        (["--preset", "tiny", "--pairs", "fresh"], "passages"),
        (["--preset", "tiny", "--start-from", "nowhere"], "nowhere"),
    ],
)
def test_bad_settings(run: Run, prepared: Path, tmp_path: Path, argv: list[object], expected: str) -> None:
    result = run("train", "--data", prepared, "-o", tmp_path / "run", *argv)
    assert expected in result.sentence
    assert not (tmp_path / "run" / "model").exists()


def test_data_that_is_none(run: Run, tmp_path: Path) -> None:
    argv = ("train", "--preset", "tiny", "--data", tmp_path, "-o", tmp_path / "run")
    assert "manifest.json" in run(*argv).sentence


def test_full_disk_while_saving(
    run: Run, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "checkpoint"):
        monkeypatch.setattr(import_module(f"unembed.{module}"), "save_file", full_disk)
    out = tmp_path / "run"
    result = run("train", "--preset", "tiny", "--data", prepared, "-o", out, *SMALL, "--steps", 1)
    assert "disk is full" in result.sentence
    assert sorted(p.name for p in out.iterdir()) == ["metrics.jsonl"]


def test_interrupted_training_can_be_resumed(run: Run, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = ["train", "--preset", "tiny", "--data", str(prepared), "-o", str(out), *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "unembed", *argv, "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (130, "")
    last = stderr.splitlines()[-1]
    step = int(re.search(r"stopped at step (\d+)", last)[1])  # type: ignore[index]
    assert last.endswith(f": unembed train --data {prepared} -o {out} --resume")
    again = run(
        *last.partition("unembed train ")[2].join(["train ", ""]).split(), "--steps", step + 2, "--json"
    )
    assert again.json["steps"] == step + 2
