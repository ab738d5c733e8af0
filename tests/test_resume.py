"""A run that is killed, stopped, diverged or shared by two processes: the same bits, the same curve."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import torch
from running import assert_no_rests, assert_same_run, hashes, rows_of, watch_steps
from safetensors.torch import load_file
from syllables import (
    CONFIG,
    GUESSING,
    LEFT_TO_RIGHT,
    T,
)
from torch import Tensor

from unembed.config import Config
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.run import Group, Run
from unembed.train import train

# `import unembed.train as training` would give the function.
training = import_module("unembed.train")

# --- killed and resumed ---------------------------------------------------------------------------


RUNS = {
    "adamw": CONFIG.override(optimizer="adamw"),
    "muon": CONFIG.override(optimizer="muon", **GUESSING),
    "dropout": CONFIG.override(dropout=0.2, causal=True, causal_share=0.5, causal_hidden=0.3),
}
KILLED = """
import os, signal, sys
from importlib import import_module
from pathlib import Path
from unembed.config import Config

training, run, logbook = (import_module(f"unembed.{name}") for name in ("train", "run", "logbook"))
config, data, out, moment = sys.argv[1:]
write, save_file, saved = logbook.MetricsLog.write, run.save_file, []

def write_and_die(log, row):
    write(log, row)
    if moment == "step" and row["step"] == 40:  # saved at 30, not yet at 45
        os.kill(os.getpid(), signal.SIGKILL)

def save_and_die(tensors, path):
    save_file(tensors, path)
    saved.append(path)
    if moment == "saving" and len(saved) == 5:  # two files of the second state are written
        os.kill(os.getpid(), signal.SIGKILL)

logbook.MetricsLog.write, run.save_file = write_and_die, save_and_die
training.train(Config.from_json(Path(config).read_text()), data=data, out=out)
"""


@pytest.fixture(scope="module")
def killed(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[Config, Path]]:
    """Runs that were killed with SIGKILL, side by side, each at its moment."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "run.py").write_text(KILLED)
    found, processes = {}, []
    for name, moment in (("adamw", "step"), ("muon", "step"), ("dropout", "step"), ("adamw", "saving")):
        config, out = RUNS[name], folder / f"{name}-{moment}"
        (folder / f"{out.name}.json").write_text(config.to_json())
        command = [
            sys.executable,
            *map(str, (folder / "run.py", folder / f"{out.name}.json", data, out)),
            moment,
        ]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        found[name, moment] = (config, out)
    assert [process.wait(timeout=200) for process in processes] == [-signal.SIGKILL] * 4
    return found


@pytest.mark.parametrize(
    ("name", "moment", "saved"),
    [("adamw", "step", 30), ("muon", "step", 30), ("dropout", "step", 30), ("adamw", "saving", 15)],
)
def test_a_killed_run_ends_in_the_same_bits(
    name: str,
    moment: str,
    saved: int,
    killed: dict[tuple[str, str], tuple[Config, Path]],
    data: Path,
    tmp_path: Path,
) -> None:
    config, out = killed[name, moment]
    assert json.loads((out / "state" / "progress.json").read_text())["step"] == saved
    assert not (out / "curves.png").exists()
    assert len(list(out.glob(".state-*"))) == (moment == "saving")
    resumed = train(config, data=data, out=out, resume=True)
    assert_no_rests(out)
    whole = train(config, data=data, out=tmp_path)
    assert (resumed.steps, resumed.validation_loss) == (50, whole.validation_loss)
    assert not resumed.interrupted
    assert_same_run(out, tmp_path)
    # The log tells each step once; only the smoothing of the training loss began anew.
    kinds = [[(row["step"], "loss" in row) for row in rows_of(run)] for run in (out, tmp_path)]
    assert kinds[0] == kinds[1] and len(set(kinds[0])) == len(kinds[0])
    held_out = [
        [row["validation_loss"] for row in rows_of(run) if "token_f1" in row] for run in (out, tmp_path)
    ]
    assert held_out[0] == held_out[1]


def test_a_kill_between_two_renames_loses_nothing(data: Path, tmp_path: Path) -> None:
    train(CONFIG, data=data, out=tmp_path)
    before = hashes(tmp_path / "state")
    (tmp_path / ".state-old-1").mkdir()
    (tmp_path / "state").rename(tmp_path / ".state-old-1" / "state")
    (tmp_path / ".state-2").mkdir()
    assert train(CONFIG, data=data, out=tmp_path, resume=True).steps == 50
    assert hashes(tmp_path / "state") == before
    assert_no_rests(tmp_path)


def test_processes_look_for_a_run_once_the_first_has_mended_its_folder(tmp_path: Path) -> None:
    """After a kill in the midst of saving, one of them puts the state back; the others must not miss it."""
    aside = tmp_path / ".state-old-1" / "state"
    aside.mkdir(parents=True)
    mended = threading.Barrier(2)

    class Pair(Group):
        def any(self, flag: bool) -> bool:
            mended.wait(10)
            return flag

    def claim(rank: int) -> bool:
        with training.claimed_folder(tmp_path, Pair(rank, 2, torch.device("cpu")), resume=True):
            return (tmp_path / "state").is_dir()

    with ThreadPoolExecutor(2) as threads:
        follower = threads.submit(claim, 1)
        with pytest.raises(TimeoutError):
            follower.result(0.2)
        assert threads.submit(claim, 0).result() and follower.result()


@pytest.mark.parametrize(("optimizer", "at"), [("adamw", 17), ("muon", 30)])
def test_ctrl_c_leaves_a_run_that_goes_on(
    optimizer: str, at: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.override(optimizer=optimizer, patience=4)
    with monkeypatch.context() as patch:
        watch_steps(patch, lambda run: signal.raise_signal(signal.SIGINT) if run.step == at - 1 else None)
        stopped = train(config, data=data, out=tmp_path / "stopped")
    assert stopped.interrupted and stopped.steps == at
    measured = [row["step"] for row in rows_of(tmp_path / "stopped") if "validation_loss" in row]
    assert measured == list(range(10, at + 1, 10))  # one more would count against the patience
    assert json.loads((tmp_path / "stopped" / "state" / "progress.json").read_text())["step"] == at
    assert Inverter.from_pretrained(stopped.model).max_tokens == T
    assert not train(config, data=data, out=tmp_path / "stopped", resume=True).interrupted
    train(config, data=data, out=tmp_path / "whole")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(run: Run) -> None:
        if run.step == 20:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    watch_steps(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, data=data, out=tmp_path)
    assert signal.getsignal(signal.SIGINT) is handler
    assert json.loads((tmp_path / "state" / "progress.json").read_text())["step"] == 15


@pytest.mark.parametrize("module", ["run", "checkpoint"])
def test_a_full_disk_keeps_what_was_saved(
    module: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second state, or the third model, does not fit."""
    home = import_module(f"unembed.{module}")
    room = iter(range(5 if module == "run" else 2))
    kept: dict[str, dict[str, str]] = {}
    save_file = home.save_file

    def fill_up(tensors: dict[str, Tensor], path: Path) -> None:
        if next(room, None) is None:
            kept.update({name: hashes(tmp_path / "run" / name) for name in ("state", "model")})
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(home, "save_file", fill_up)
        with pytest.raises(UnembedError, match="the disk is full; what was there before is unchanged"):
            train(CONFIG, data=data, out=tmp_path / "run")
    assert kept == {name: hashes(tmp_path / "run" / name) for name in ("state", "model")}
    assert_no_rests(tmp_path / "run")
    train(CONFIG, data=data, out=tmp_path / "run", resume=True)
    train(CONFIG, data=data, out=tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(data: Path, tmp_path: Path) -> None:
    train(CONFIG, data=data, out=tmp_path / "a")
    before = hashes(tmp_path / "a" / "model"), rows_of(tmp_path / "a")
    assert train(CONFIG, data=data, out=tmp_path / "a", resume=True).steps == 50
    assert before == (hashes(tmp_path / "a" / "model"), rows_of(tmp_path / "a"))
    # More steps may be asked for; at a constant rate they are those of a longer run.
    constant = CONFIG.override(decay="constant")
    train(constant.override(steps=30), data=data, out=tmp_path / "b")
    train(constant, data=data, out=tmp_path / "b", resume=True)
    train(constant, data=data, out=tmp_path / "c")
    assert_same_run(tmp_path / "b", tmp_path / "c")


# --- diverged -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "noticed"),
    [(16, 20), (29, 30), (44, 45), (47, 50)],
    ids=["logged", "measured", "saved", "ended"],
)
def test_a_diverged_run_keeps_what_was_good(
    at: int, noticed: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, dict[str, str]] = {}

    def spoil(run: Run) -> None:
        if run.step == at - 1:
            kept.update({name: hashes(tmp_path / name) for name in ("state", "model")})
            next(run.model.parameters()).data.fill_(torch.nan)

    with monkeypatch.context() as patch:
        watch_steps(patch, spoil)
        with pytest.raises(
            UnembedError, match=f"diverged: at step {noticed} .* is kept; .* lower learning_rate"
        ):
            train(CONFIG, data=data, out=tmp_path)
    assert kept == {name: hashes(tmp_path / name) for name in ("state", "model")}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert rows_of(tmp_path)[-1]["step"] < noticed
    assert_no_rests(tmp_path)
    assert train(CONFIG, data=data, out=tmp_path, resume=True).steps == 50


@pytest.mark.parametrize("changes", [{"validation": 0}, {"steps": 5}, {"steps": 5, "validation": 0}], ids=str)
def test_a_rate_that_is_far_too_high(changes: dict[str, int], data: Path, tmp_path: Path) -> None:
    config = CONFIG.override(learning_rate=1e30, **changes)
    with pytest.raises(UnembedError, match="diverged: .* nothing was saved yet; start another run"):
        train(config, data=data, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"] and rows_of(tmp_path) == []
    assert train(CONFIG.override(**changes), data=data, out=tmp_path).steps == changes.get("steps", 50)


# --- two processes --------------------------------------------------------------------------------


TOGETHER = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from unembed.config import Config
from unembed.train import train

folder, data, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
if len(names) > 1:  # torch cannot join a group a second time, so several runs share one
    dist.init_process_group("gloo")
for name in names:
    config = Config.from_json((folder / f"{name}.json").read_text())
    result = train(config, data=data, out=folder / name)
    (folder / f"{name}-{os.environ['RANK']}.steps").write_text(str(result.steps))
"""
WEIGHTS = {
    "mean": CONFIG.override(**LEFT_TO_RIGHT, embeds=True, embed_share=0.3),  # not the same in each half
    "elbo": CONFIG.override(weight="elbo", optimizer="muon"),
}


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def together(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, for each weight, and one that ends by the clock."""
    folder = tmp_path_factory.mktemp("together")
    endless = CONFIG.override(minutes=0.004, steps=10**6, evaluate_every=10**6, save_every=10**6)
    for name, config in {**WEIGHTS, "minutes": endless}.items():
        (folder / f"{name}.json").write_text(config.to_json())
    (folder / "run.py").write_text(TOGETHER)
    launched = [launch(folder, data, "mean"), launch(folder, data, "elbo", "minutes")]
    try:
        for process in launched:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in launched:
            process.terminate()  # one that hangs takes its two processes with it
    return folder


def launch(folder: Path, data: Path, *names: str) -> subprocess.Popen[str]:
    """Start two processes under torchrun that train the named settings one after the other."""
    run = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, "-m", *run, str(folder / "run.py"), str(folder), str(data), *names]
    # One thread each, whatever the machine; and the network interface that is always there.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_two_processes_follow_one(weight: str, together: Path, data: Path, tmp_path: Path) -> None:
    train(WEIGHTS[weight], data=data, out=tmp_path)
    one, two = rows_of(tmp_path), rows_of(together / weight)
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() & {"loss", "validation_loss", "rate", "embed_cosine"}:
            assert a[key] == pytest.approx(b[key], abs=1e-4)
    for name in ("model", "average"):
        alone, shared = (
            load_file(run / "state" / f"{name}.safetensors") for run in (tmp_path, together / weight)
        )
        for key in alone:
            torch.testing.assert_close(alone[key], shared[key], rtol=0, atol=2e-4, msg=f"{name} {key}")
    assert (together / weight / "curves.png").exists()


def test_two_processes_end_by_one_clock(together: Path) -> None:
    steps = [int((together / f"minutes-{rank}.steps").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] < 10**6


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 9, 16])
def test_shares_make_up_the_batch(world: int, batch_size: int) -> None:
    shares = [Group(rank, world, torch.device("cpu")).rows(batch_size) for rank in range(world)]
    rows = [row for share in shares for row in range(batch_size)[share]]
    assert rows == list(range(batch_size))
