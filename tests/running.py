"""What tests of training ask of a run's folder, and how they watch its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unembed.checkpoint import read_weights
from unembed.run import Run
from unembed.step import train_step

# `import unembed.train as training` would give the function.
training = import_module("unembed.train")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def hashes(folder: Path) -> dict[str, str]:
    """Hash every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def assert_same_run(a: Path, b: Path) -> None:
    """Check that two runs ended in the same bits: weights, average, optimiser, best model."""
    for name in ("model", "average", "optimizers"):
        one, two = (load_file(run / "state" / f"{name}.safetensors") for run in (a, b))
        assert one.keys() == two.keys() and one
        assert all(torch.equal(one[key], two[key]) for key in one), name
    progress = [json.loads((run / "state" / "progress.json").read_text()) for run in (a, b)]
    for key in ("step", "best", "waited"):
        assert progress[0][key] == progress[1][key], key
    one, two = read_weights(a / "model"), read_weights(b / "model")
    assert all(torch.equal(one[key], two[key]) for key in one)


def assert_no_rests(run: Path) -> None:
    """Check that no draft lies about."""
    assert [p.name for p in run.iterdir() if p.name.startswith(".") or p.suffix == ".tmp"] == []


def watch_steps(monkeypatch: pytest.MonkeyPatch, watch: Callable[[Run], None]) -> None:
    """Call `watch` after every optimisation step, before the run counts it."""

    def watched(run: Run, *args: Any) -> Tensor:
        loss = train_step(run, *args)
        watch(run)
        return loss

    monkeypatch.setattr(training, "train_step", watched)
