"""train: the same bits after a kill, the same curve in two processes, and what a run leaves behind."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from syllables import (
    ALONE,
    CONFIG,
    GUESSING,
    LEFT_TO_RIGHT,
    SIZE,
    FakeEncoder,
    T,
    syllable_tokenizer,
    texts,
)
from torch import Tensor, nn

from unembed import encoders
from unembed.backbone import build
from unembed.checkpoint import load_checkpoint, read_weights
from unembed.config import Config
from unembed.corpus import PreparedData, prepare
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.logbook import MetricsLog, alone
from unembed.pairs import CachedPairs, FreshSpans
from unembed.run import Group, Run
from unembed.step import masked_loss, train_step
from unembed.train import TrainResult, fit_to_data, flushed_denormals, train
from unembed.validation import validate

# `import unembed.train as training` would give the function.
training = import_module("unembed.train")

# --- data -----------------------------------------------------------------------------------------


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


# --- the steps ------------------------------------------------------------------------------------


def test_the_average_is_warmed_up(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.override(ema=0.35, steps=7)  # few steps: a wrong weight is soon forgotten
    torch.manual_seed(config.train.seed)
    expected: dict[str, Tensor] = dict(
        build(fit_to_data(config, PreparedData.open(data)).model).named_parameters()
    )

    def follow(run: Run) -> None:
        decay = min(0.35, (1 + run.step) / (10 + run.step))  # 0.1 at first, 0.35 from the fifth step on
        for name, p in run.model.named_parameters():
            expected[name] = decay * expected[name].detach() + (1 - decay) * p.detach()

    watch_steps(monkeypatch, follow)
    train(config, data=data, out=tmp_path)
    average = load_file(tmp_path / "state" / "average.safetensors")
    assert average.keys() == expected.keys()
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert not torch.equal(average["places"], load_file(tmp_path / "state" / "model.safetensors")["places"])


def test_the_rate_warms_up_and_falls(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[list[float]] = []
    watch_steps(
        monkeypatch, lambda run: rates.append([g["lr"] for o in run.optimizers for g in o.param_groups])
    )
    config = CONFIG.override(optimizer="muon", warmup=10, steps=40, learning_rate=4e-3, muon_rate=1e-2)
    train(config, data=data, out=tmp_path)
    shares = [min(1, (k + 1) / 10) * min(1, 2 * (1 - k / 40)) for k in range(40)]
    assert len(rates) == 40
    for found, share in zip(rates, shares, strict=True):
        assert found == pytest.approx([4e-3 * share] * 2 + [1e-2 * share])  # two groups of adamw, one of muon
    assert [row["rate"] for row in rows_of(tmp_path) if "rate" in row] == pytest.approx(
        [shares[19], shares[39]]
    )


@pytest.mark.parametrize(("clip", "size", "expected"), [(1.0, 50.0, 1.0), (1.0, 0.5, 0.5), (0.0, 50.0, 50.0)])
def test_gradients_are_clipped(
    clip: float, size: float, expected: float, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fit_to_data(CONFIG.override(clip=clip), PreparedData.open(data)), group=ALONE)
    parameters = list(run.model.parameters())
    scale = size / math.sqrt(sum(p.numel() for p in parameters))
    for p in parameters:
        p.grad = torch.full_like(p, scale)
    norms: list[float] = []

    def norm() -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))

    monkeypatch.setattr(run.optimizers[0], "step", norm)
    run.apply_gradients()
    assert norms == [pytest.approx(expected, rel=1e-4)]
    assert all(p.grad is None for p in parameters)


LEARNING = CONFIG.override(
    embeds=True, embed_share=0.5, pairs="fresh", batch_size=64, optimizer="muon", steps=200, validation=50,
    evaluate_every=50,
)  # fmt: skip


def test_guesses_are_learnt(passages: Path, tmp_path: Path, local: list[str]) -> None:
    result = train(LEARNING, data=passages, out=tmp_path / "run")
    cosines = [row["embed_cosine"] for row in rows_of(tmp_path / "run") if "embed_cosine" in row]
    prepared = PreparedData.open(passages)
    fresh = Run(fit_to_data(LEARNING, prepared), group=ALONE)
    x0, e = training.open_pairs(fresh.config, prepared, ALONE).validation()
    first = validate(fresh, (x0, e))["embed_cosine"]
    assert abs(first) < 0.1 and cosines[-1] > max(cosines[0] + 0.1, first + 0.4)
    # By the model as it is used, too, and saved in bytes; and of each text its own vector, not any.
    inverter = Inverter.from_pretrained(result.model)
    inverter.save_pretrained(tmp_path / "int8", int8=True)
    for found in (inverter, Inverter.from_pretrained(tmp_path / "int8")):
        model: Any = found.ready
        assert model.embeds is True
        with torch.inference_mode():
            guesses = model.embed(x0)
        own, others = (float(F.cosine_similarity(guesses, e.roll(n, 0)).mean()) for n in (0, 1))
        assert own > others + 0.3
        assert any(own == pytest.approx(cosine, abs=0.02) for cosine in cosines)  # the best is kept


def test_a_batch_with_nothing_masked_has_a_finite_loss(data: Path, tmp_path: Path) -> None:
    sparse = CONFIG.override(
        schedule="fixed", mask_ratio=0.01, batch_size=1, validation=1, steps=20, evaluate_every=5
    )
    train(sparse, data=data, out=tmp_path)
    figures = [value for row in rows_of(tmp_path) for value in row.values()]
    assert all(math.isfinite(value) for value in figures)
    assert all(t.isfinite().all() for t in load_file(tmp_path / "state" / "model.safetensors").values())


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"bag_weight": 0.1, "time_conditioning": True},
        {"schedule": "exponential", "weight": "inverse-t", "stratified": False, "suffix_share": 0.5},
        LEFT_TO_RIGHT,
        {**LEFT_TO_RIGHT, **GUESSING, "bag_weight": 0.1, "precision": "bf16"},
        {"dropout": 0.1},
        {"validation": 0},
    ],
)
def test_other_settings_learn_too(changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    result = train(CONFIG.override(steps=100, **changes), data=data, out=tmp_path)
    losses = [row["loss"] for row in rows_of(tmp_path) if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert Inverter.from_pretrained(result.model).config.train.steps == 100
    assert (
        (result.validation_loss is None)
        == (changes == {"validation": 0})
        == (not (tmp_path / "curves.png").exists())
    )


# --- measuring ------------------------------------------------------------------------------------


def test_dropout_is_no_part_of_what_is_measured_or_used(data: Path, tmp_path: Path) -> None:
    prepared = PreparedData.open(data)
    held_out = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu").validation()
    plain, dropped = (
        Run(fit_to_data(CONFIG.override(dropout=share), prepared), group=ALONE) for share in (0.0, 0.5)
    )
    assert dropped.model.training and validate(plain, held_out) == validate(dropped, held_out)
    result = train(CONFIG.override(steps=20, dropout=0.5), data=data, out=tmp_path)
    inverter, vectors = Inverter.from_pretrained(result.model), prepared.vectors(np.arange(8))
    assert inverter.config.model.dropout == 0.5
    one, two = (inverter.invert(vectors, seed=0) for _ in range(2))
    assert one == two


def test_a_run_that_gets_no_better_stops_early(data: Path, tmp_path: Path) -> None:
    still = CONFIG.override(learning_rate=0.0, patience=2, steps=500)
    result = train(still, data=data, out=tmp_path)
    assert result.steps == 30 and not result.interrupted  # one validation to set the mark, two in vain
    losses = [row["validation_loss"] for row in rows_of(tmp_path) if "validation_loss" in row]
    assert losses == [result.validation_loss] * 3
    assert train(still, data=data, out=tmp_path, resume=True).steps == 30


def test_the_best_model_is_kept(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averages: dict[int, dict[str, Tensor]] = {}
    losses = iter([3.0, 1.0, 2.0, 1.0, 5.0])

    def measure(run: Run, held_out: object) -> dict[str, float]:
        averages[run.step] = {key: value.clone() for key, value in run.average.state_dict().items()}
        return {"validation_loss": next(losses), "token_accuracy": 0.0, "token_f1": 0.0}

    monkeypatch.setattr(training, "validate", measure)
    result = train(CONFIG, data=data, out=tmp_path)
    assert result.validation_loss == 1.0 and result.steps == 50
    saved = load_checkpoint(result.model)
    assert all(torch.equal(saved.weights[key], value) for key, value in averages[20].items())
    assert not torch.equal(saved.weights["places"], averages[50]["places"])
    assert saved.facts["training"]["steps"] == 20 and saved.facts["training"]["passages"] == 180
    assert saved.config.encoder == "fake" and saved.config.model.embedding_size == SIZE
    assert saved.tokenizer.to_json() == syllable_tokenizer().to_json()
    assert json.dumps(saved.facts["data"]).count("made up") == 1


# --- what a run writes ----------------------------------------------------------------------------


def test_metrics_and_curves(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(CONFIG.override(steps=45), data=data, out=tmp_path, show_progress=True)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [20, 40]
    # On its schedule, and at the end.
    assert [row["step"] for row in rows if "validation_loss" in row] == [10, 20, 30, 40, 45]
    for row in rows:
        figures = {"loss", "rate"} if "loss" in row else {"validation_loss", "token_accuracy", "token_f1"}
        assert row.keys() == figures | {"step", "seconds"}
    times = [row["seconds"] for row in rows]
    assert times == sorted(times) and times[-1] <= result.seconds + 0.01
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "model", "state"]
    shown = capsys.readouterr()
    assert shown.out == "" and "45/45" in shown.err.replace("\n", "")


def test_the_log_drops_what_the_resumed_run_will_say_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 20, "loss": 2.0}\n{"step": 40, "loss": 1.0}\n{"step": 60, "lo')  # cut by a kill
    MetricsLog(path, last_step=99, write=False)
    assert path.read_text().count("\n") == 2  # only one process writes
    log = MetricsLog(path, last_step=30, write=True)
    log.write({"step": 40, "loss": 1.5})
    assert log.rows() == [{"step": 20, "loss": 2.0}, {"step": 40, "loss": 1.5}]


def test_minutes_end_a_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    watch_steps(monkeypatch, lambda run: rates.append(run.optimizers[0].param_groups[0]["lr"]))
    config = CONFIG.override(minutes=0.005, steps=10**6, save_every=10**6, warmup=0)
    result = train(config, data=data, out=tmp_path)
    assert 0.3 <= result.seconds < 60 and len(rates) == result.steps < 10**6 and not result.interrupted
    assert rates == sorted(rates, reverse=True)  # the rate falls by the clock
    assert rows_of(tmp_path)[-1]["step"] == result.steps and "token_f1" in rows_of(tmp_path)[-1]


def test_folders_that_cannot_be_used(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UnembedError, match="holds no run to resume; leave out --resume"):
        train(CONFIG, data=data, out=run, resume=True)
    assert not run.exists()
    train(CONFIG.override(steps=2), data=data, out=run)
    with pytest.raises(UnembedError, match="holds a run already; add --resume"):
        train(CONFIG, data=data, out=run)
    for changes in (
        {"hidden": 64},
        {"learning_rate": 1e-2},
        {"seed": 1},
        {"weight": "elbo"},
        {"batch_size": 8},
    ):
        (name,) = changes
        with pytest.raises(UnembedError, match=f"the run was started with {name} = "):
            train(CONFIG.override(**changes), data=data, out=run, resume=True)
    with pytest.raises(UnembedError, match="no prepared data|manifest"):
        train(CONFIG, data=tmp_path / "nothing", out=tmp_path / "other")
    with pytest.raises(UnembedError, match="lower --validation"):
        train(CONFIG.override(validation=48), data=data, out=tmp_path / "new" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # what is refused leaves nothing behind


def test_a_run_goes_on_with_its_own_data(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options: dict[str, Any] = {"encoder": FakeEncoder(), "max_tokens": T}
    train(CONFIG.override(steps=2), data=data, out=out)
    other = prepare(texts(49, 6)[1:], out=tmp_path / "other", **options).path
    before = hashes(out / "state")
    with pytest.raises(
        UnembedError, match="started on other data; resume with the same data, or start another"
    ):
        train(CONFIG.override(steps=4), data=other, out=out, resume=True)
    assert hashes(out / "state") == before
    # The same texts, prepared again, are the same data.
    again = prepare(texts(48, 6), out=tmp_path / "again", source_names=["elsewhere"], **options).path
    assert train(CONFIG.override(steps=4), data=again, out=out, resume=True).steps == 4
    # A run that was saved before its data was noted goes on.
    path = out / "state" / "progress.json"
    progress = json.loads(path.read_text())
    del progress["data"]
    path.write_text(json.dumps(progress))
    assert train(CONFIG.override(steps=6), data=data, out=out, resume=True).steps == 6
    assert json.loads(path.read_text())["data"] == PreparedData.open(data).digest


def test_a_run_that_did_not_know_a_setting_goes_on(data: Path, tmp_path: Path) -> None:
    train(CONFIG.override(steps=2), data=data, out=tmp_path)
    path = tmp_path / "state" / "progress.json"
    progress = json.loads(path.read_text())
    new = {
        "model": ["dropout", "embeds"],
        "diffusion": ["causal_hidden", "embed_share"],
        "train": ["splice_share", "swap_share", "embed_weight"],
    }
    for section, names in new.items():
        for name in names:
            del progress["config"][section][name]
    path.write_text(json.dumps(progress))
    with pytest.raises(UnembedError, match="the run was started with dropout = 0.0, not 0.1"):
        train(CONFIG.override(dropout=0.1), data=data, out=tmp_path, resume=True)
    with pytest.raises(UnembedError, match="the run was started with embeds = False, not True"):
        train(CONFIG.override(**GUESSING), data=data, out=tmp_path, resume=True)
    assert train(CONFIG.override(steps=4), data=data, out=tmp_path, resume=True).steps == 4


def test_one_run_at_a_time_writes_a_folder(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(CONFIG.override(steps=2), data=data, out=out)
    before = (out / "state" / "progress.json").read_bytes()
    draft = out / ".state-draft"
    draft.mkdir()  # the other run is just writing it
    with alone(out), pytest.raises(UnembedError, match="run is being written by another run; wait"):
        train(CONFIG.override(steps=4), data=data, out=out, resume=True)
    assert (out / "state" / "progress.json").read_bytes() == before and draft.exists()
    assert train(CONFIG.override(steps=4), data=data, out=out, resume=True).steps == 4
    assert_no_rests(out)


# --- beginning with given weights -----------------------------------------------------------------


def test_start_from_begins_with_the_given_weights(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG, data=data, out=tmp_path / "first")
    given = read_weights(first.model)
    train(
        CONFIG.override(learning_rate=0.0, steps=3),
        data=data,
        out=tmp_path / "second",
        start_from=first.model,
    )
    state = load_file(tmp_path / "second" / "state" / "model.safetensors")
    assert state.keys() == given.keys() and all(torch.equal(state[key], given[key]) for key in given)
    with pytest.raises(UnembedError, match="are not of this model"):
        train(CONFIG.override(hidden=64), data=data, out=tmp_path / "third", start_from=first.model)
    assert not (tmp_path / "third").exists()


def test_a_model_may_grow_and_says_the_same_at_first(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG.override(adaln_rank=4), data=data, out=tmp_path / "first")
    small = fit_to_data(CONFIG.override(adaln_rank=4), PreparedData.open(data))
    large = small.override(adaln_rank=6, adaln_diagonal=True)
    models = [Run(config, group=ALONE, start_from=first.model).average for config in (small, large)]
    x0, e = CachedPairs(
        PreparedData.open(data), batch_size=8, validation=4, seed=0, device="cpu"
    ).validation()
    assert torch.equal(*(model(x0, e) for model in models))
    grown = train(large, data=data, out=tmp_path / "second", start_from=first.model)
    weights = read_weights(grown.model)
    assert all(weights[f"blocks.0.modulation.{name}"].any() for name in ("diagonal", "up.weight"))
    assert weights["blocks.0.modulation.up.weight"][:, 4:].any()  # what is new has learnt
    with pytest.raises(UnembedError, match="are not of this model"):  # nothing is cut away
        train(CONFIG.override(adaln_rank=2), data=data, out=tmp_path / "third", start_from=first.model)


def test_a_model_learns_to_read_left_to_right_later(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG.override(steps=20), data=data, out=tmp_path / "first")
    config = CONFIG.override(steps=100, **LEFT_TO_RIGHT)
    second = train(config, data=data, out=tmp_path / "second", start_from=first.model)
    rows = rows_of(tmp_path / "second")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert all({"causal_loss", "causal_f1"} <= row.keys() for row in rows if "validation_loss" in row)
    vectors = PreparedData.open(data).vectors(np.arange(3))
    inverter = Inverter.from_pretrained(second.model)
    found = inverter.invert(vectors, strategy="causal", seed=0)
    assert [i.forward_passes for i in found] == [min(len(i.ids) + 1, inverter.max_tokens) for i in found]


@pytest.fixture(scope="module")
def started(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the encoder `fake`."""
    return train(CONFIG.override(steps=20), data=data, out=tmp_path_factory.mktemp("started") / "run").model


def prepare_other(out: Path, *, name: str = "other", size: int = SIZE) -> Path:
    """Pairs of another encoder, in the same vocabulary."""
    encoder = FakeEncoder(size)
    encoder.name = name
    return prepare(texts(48, 6), encoder=encoder, out=out, max_tokens=T).path


READING = {"projection.w1.weight", "projection.w1.bias"}


@pytest.mark.parametrize(
    ("name", "size", "fresh"),
    [("fake", SIZE, set()), ("other", SIZE, READING), ("other", SIZE + 4, READING), ("fake", 12, READING)],
)
def test_for_another_encoder_only_what_reads_the_vector_is_fresh(
    started: Path, tmp_path: Path, name: str, size: int, fresh: set[str]
) -> None:
    given = read_weights(started)
    config = fit_to_data(CONFIG, PreparedData.open(prepare_other(tmp_path, name=name, size=size)))
    new, run = Run(config, group=ALONE), Run(config, group=ALONE, start_from=started)
    weights = dict(run.model.named_parameters())
    assert weights.keys() == given.keys()
    assert {key for key, w in weights.items() if not torch.equal(w, given[key])} == fresh
    own = dict(new.model.named_parameters())
    assert all(torch.equal(weights[key], own[key]) for key in fresh)  # drawn as in a run from nothing
    assert not torch.equal(weights["projection.w2.weight"], own["projection.w2.weight"])


@pytest.fixture(scope="module")
def guesses(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the encoder `fake` that guesses vectors, too."""
    config = CONFIG.override(steps=20, **GUESSING)
    return train(config, data=data, out=tmp_path_factory.mktemp("guesses") / "run").model


LEARNT = {"vector.weight", "vector.bias", "whole"}


@pytest.mark.parametrize(
    ("start", "name", "size", "fresh"),
    [
        ("started", "fake", SIZE, LEARNT),
        ("started", "other", SIZE, LEARNT | READING),
        ("guesses", "fake", SIZE, set()),
        ("guesses", "other", SIZE, LEARNT | READING),
        ("guesses", "other", SIZE + 4, LEARNT | READING),
        ("guesses", "fake", 12, LEARNT | READING),
    ],
)
def test_guessing_begins_where_nothing_is_told_unless_it_was_learnt_for_this_encoder(
    request: pytest.FixtureRequest, tmp_path: Path, start: str, name: str, size: int, fresh: set[str]
) -> None:
    model: Path = request.getfixturevalue(start)
    given = read_weights(model)
    other = PreparedData.open(prepare_other(tmp_path, name=name, size=size))
    config = fit_to_data(CONFIG.override(**GUESSING), other)
    new, run = Run(config, group=ALONE), Run(config, group=ALONE, start_from=model)
    weights, own = dict(run.model.named_parameters()), dict(new.model.named_parameters())
    assert weights.keys() == own.keys() >= LEARNT
    assert {key for key, w in weights.items() if key not in given or not torch.equal(w, given[key])} == fresh
    # Drawn as in a run from nothing, but for what stands for the vector.
    assert all(torch.equal(weights[key], own[key]) for key in fresh - {"whole"})
    assert given["projection.null"].any()
    assert not fresh or torch.equal(weights["whole"], given["projection.null"])
    assert torch.equal(run.average.whole, run.model.whole)  # type: ignore[arg-type]


def test_a_model_that_is_to_guess_says_the_same_at_first(started: Path, guesses: Path, data: Path) -> None:
    prepared = PreparedData.open(data)
    x0, e = CachedPairs(prepared, batch_size=8, validation=4, seed=0, device="cpu").validation()
    plain, more = (fit_to_data(CONFIG.override(**changes), prepared) for changes in ({}, GUESSING))
    for start in (started, guesses):
        one, two = (Run(config, group=ALONE, start_from=start).average for config in (plain, more))
        assert torch.equal(one(x0, e), two(x0, e))
    # What a model guessed by is dropped where it is not asked for.
    run = Run(plain, group=ALONE, start_from=guesses)
    given, weights = read_weights(guesses), dict(run.model.named_parameters())
    assert given.keys() - weights.keys() == LEARNT
    assert all(torch.equal(weights[key], given[key]) for key in weights)


def test_a_model_learns_to_guess_later(
    started: Path, passages: Path, tmp_path: Path, local: list[str]
) -> None:
    train(LEARNING.override(steps=50), data=passages, out=tmp_path / "run", start_from=started)
    result = train(LEARNING, data=passages, out=tmp_path / "run", resume=True)
    cosines = [row["embed_cosine"] for row in rows_of(tmp_path / "run") if "embed_cosine" in row]
    assert result.steps == 200 and len(cosines) == 4 and cosines[-1] > cosines[0] + 0.1


def test_another_encoder_does_not_make_another_vocabulary_fit(started: Path, data: Path) -> None:
    config = fit_to_data(CONFIG, PreparedData.open(data)).override(encoder="other", vocab_size=60)
    with pytest.raises(UnembedError, match="are not of this model: bias is .* expected"):
        Run(config, group=ALONE, start_from=started)


def test_a_vocabulary_of_the_same_size_is_not_the_same(started: Path, data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(started, tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    a, b, *_ = (token for token in spec["model"]["vocab"] if not token.startswith("["))
    words = spec["model"]["vocab"]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnembedError, match="another vocabulary"):
        train(CONFIG.override(steps=1), data=data, out=tmp_path / "run", start_from=other)
    assert train(CONFIG.override(steps=1), data=data, out=tmp_path / "run", start_from=started).steps == 1


def test_a_resumed_run_needs_no_weights_to_start_from(data: Path, started: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(started, tmp_path / "gone")
    states = []
    for name, start_from in (("one", None), ("two", gone)):
        train(CONFIG.override(steps=2), data=data, out=tmp_path / name, start_from=gone)
        if start_from:
            shutil.rmtree(gone)
        train(CONFIG.override(steps=4), data=data, out=tmp_path / name, resume=True, start_from=start_from)
        states.append((tmp_path / name / "state" / "model.safetensors").read_bytes())
    assert states[0] == states[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_a_model_brought_stays_if_frozen(started: Path, tmp_path: Path, optimizer: str) -> None:
    data, given = prepare_other(tmp_path / "data", size=SIZE + 4), read_weights(started)
    config = CONFIG.override(freeze="backbone", optimizer=optimizer, steps=3)
    with pytest.raises(UnembedError, match="begins with nothing such"):
        train(config, data=data, out=tmp_path / "nothing")
    result = train(config, data=data, out=tmp_path / "run", start_from=started)
    result = train(config.override(steps=6), data=data, out=tmp_path / "run", resume=True)
    learning = {key for key in given if key.startswith("projection.") or "modulation" in key} | {"places"}
    assert {
        "tokens.weight",
        "bias",
        "blocks.0.attention.qkv.weight",
        "blocks.0.up.weight",
    } <= given.keys() - learning
    state = load_file(tmp_path / "run" / "state" / "model.safetensors")
    same = {
        key for key in given if state[key].shape == given[key].shape and torch.equal(state[key], given[key])
    }
    assert same == given.keys() - learning
    inverter = Inverter.from_pretrained(result.model)
    assert len(inverter.invert(PreparedData.open(data).vectors(np.arange(2)), seed=0)) == 2


def test_guessing_is_learnt_even_if_what_a_model_brought_is_frozen(started: Path, data: Path) -> None:
    prepared = PreparedData.open(data)
    config = fit_to_data(CONFIG.override(freeze="backbone", **GUESSING), prepared)
    run = Run(config, group=ALONE, start_from=started)
    before = {key: p.detach().clone() for key, p in run.model.named_parameters()}
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")
    for run.step in range(3):
        run.set_rate()
        train_step(run, pairs, masked_loss)
    changed = {key for key, p in run.model.named_parameters() if not torch.equal(p, before[key])}
    assert LEARNT <= changed and "tokens.weight" not in changed


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random ModernBERT with the vocabulary of the data."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    tokenizer, folder = syllable_tokenizer(), tmp_path_factory.mktemp("lm")
    rope = {"rope_type": "default", "rope_theta": 160_000.0}
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": tokenizer.size,
        "rope_parameters": {"full_attention": dict(rope), "sliding_attention": dict(rope)},
        "pad_token_id": tokenizer.pad_id,
        "mask_token_id": tokenizer.mask_id,
        **{f"{name}_token_id": tokenizer.end_id for name in ("bos", "eos", "cls", "sep")},
    }
    ModernBertForMaskedLM(ModernBertConfig(**values)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("freeze", ["embeddings", "backbone"])
def test_what_is_frozen_stays(freeze: str, masked_lm: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "vocab_size": syllable_tokenizer().size}
    config = CONFIG.override(backbone=str(masked_lm), freeze=freeze, mask_id=2, steps=20, **sizes)
    torch.manual_seed(config.train.seed)
    fresh = build(fit_to_data(config, PreparedData.open(data)).model)
    frozen = {name for name, p in fresh.named_parameters() if not p.requires_grad}
    assert "tokens.weight" in frozen and "projection.w1.weight" not in frozen
    train(config, data=data, out=tmp_path)
    for file in ("model", "average"):
        trained = load_file(tmp_path / "state" / f"{file}.safetensors")
        changed = {name for name, p in fresh.named_parameters() if not torch.equal(p, trained[name])}
        assert not changed & frozen
        assert {"projection.w1.weight", "places", "bias"} - frozen <= changed


def test_a_backbone_of_another_vocabulary(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="prepare the data with the backbone's tokenizer"):
        train(CONFIG.override(backbone="some/model", vocab_size=99), data=data, out=tmp_path)


# --- both kinds of data ---------------------------------------------------------------------------


def learn(config: Config, data: Path, out: Path, *, fall: float) -> TrainResult:
    """Train for longer, and check that the loss fell to this share."""
    result = train(config.override(steps=200, evaluate_every=50), data=data, out=out)
    losses = [row["validation_loss"] for row in rows_of(out) if "validation_loss" in row]
    assert min(losses) < 0.9 * math.log(52)
    training_losses = [row["loss"] for row in rows_of(out) if "loss" in row]
    assert training_losses[-1] < fall * training_losses[0]
    return result


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let `fake` be an encoder that is found by its name."""
    asked: list[str] = []

    def find(name: str, *, device: str | None = None, **options: Any) -> FakeEncoder:
        asked.append(name)
        assert device == "cpu"
        assert not any(options.values())  # neither half precision nor trust unless asked
        return FakeEncoder()

    monkeypatch.setattr(encoders, "load_encoder", find)
    yield asked


def test_cached_pairs_are_learnt(data: Path, tmp_path: Path) -> None:
    result = learn(CONFIG, data, tmp_path, fall=0.7)
    inverter, prepared = Inverter.from_pretrained(result.model), PreparedData.open(data)
    assert inverter.encoder_name == "fake" and inverter.size == SIZE
    assert len(inverter.invert(prepared.vectors(np.arange(3)), seed=0)) == 3


def test_fresh_spans_are_learnt(passages: Path, tmp_path: Path, local: list[str]) -> None:
    learn(CONFIG.override(pairs="fresh", batch_size=32), passages, tmp_path, fall=0.9)  # no span comes twice
    assert local == ["fake"]


def test_splicing_and_swapping_are_settings(passages: Path, local: list[str]) -> None:
    prepared = PreparedData.open(passages)
    config = fit_to_data(CONFIG.override(pairs="fresh", splice_share=0.4, swap_share=0.2), prepared)
    pairs = training.open_pairs(config, prepared, ALONE)
    assert isinstance(pairs, FreshSpans) and (pairs.splice_share, pairs.swap_share) == (0.4, 0.2)


@pytest.mark.parametrize("share", ["splice_share", "swap_share", "reword_share"])
def test_fresh_spans_go_on_after_a_stop(share: str, passages: Path, tmp_path: Path, local: list[str]) -> None:
    config = CONFIG.override(pairs="fresh", decay="constant", **{share: 0.5})
    train(config.override(steps=20), data=passages, out=tmp_path / "stopped")
    train(config, data=passages, out=tmp_path / "stopped", resume=True)
    train(config, data=passages, out=tmp_path / "whole")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_data_and_kind_must_fit(data: Path, passages: Path, tmp_path: Path, local: list[str]) -> None:
    with pytest.raises(UnembedError, match="train with --pairs fresh"):
        train(CONFIG, data=passages, out=tmp_path)
    with pytest.raises(UnembedError, match="train with --pairs cached"):
        train(CONFIG.override(pairs="fresh"), data=data, out=tmp_path)
    with pytest.raises(UnembedError, match="lower --validation"):
        train(CONFIG.override(validation=48), data=data, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fresh_spans_need_a_local_encoder_of_the_right_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: list[str]
) -> None:
    # Prepared by name alone, the data does not know the size of the vectors.
    folder = prepare(
        texts(40, 30), encoder="fake", tokenizer=syllable_tokenizer(), out=tmp_path / "data", max_tokens=T,
        kind="passages",
    ).path  # fmt: skip
    config = CONFIG.override(pairs="fresh")
    with pytest.raises(UnembedError, match=f"embedding_size is 384; train with --embedding-size {SIZE}"):
        train(config, data=folder, out=tmp_path / "run")
    assert train(config.override(embedding_size=SIZE, steps=2), data=folder, out=tmp_path / "run").steps == 2
    monkeypatch.setattr(encoders, "load_encoder", lambda name, **options: object())
    with pytest.raises(UnembedError, match="fake is not local; prepare pairs"):
        train(config, data=folder, out=tmp_path / "other")


@pytest.mark.parametrize(("device", "largest", "tried"), [
    ("cpu", 1e9, [None]), ("cuda", 1.0, ["float16"]), ("cuda", 1e6, ["float16", "bfloat16"]),
])  # fmt: skip
def test_spans_are_embedded_in_a_half_precision_that_holds_them(
    device: str, largest: float, tried: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Overflowing(FakeEncoder):
        def encode(self, texts: Any, **_: Any) -> np.ndarray:
            with np.errstate(over="ignore"):
                return np.full((len(texts), 2), largest, np.float16 if asked[-1] == "float16" else np.float32)

    def find(name: str, *, dtype: str | None = None, **options: Any) -> FakeEncoder:
        assert options == {"device": device, "trust_remote_code": True}
        asked.append(dtype)
        return Overflowing()

    monkeypatch.setattr(encoders, "load_encoder", find)
    training.open_span_encoder("fake", torch.device(device), trust_remote_code=True)
    assert asked == tried


def flushes() -> bool:
    """Tell whether numbers too small for full precision count as zero."""
    return float(torch.full((), 1e-40) * 1) == 0


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU does not take them as zero")
def test_denormals_are_zero_while_training_and_no_longer(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def step(*given: Any) -> Tensor:
        seen.append(flushes())
        return train_step(*given)

    # By the module itself: `unembed.train` is the function of that name.
    monkeypatch.setattr(sys.modules["unembed.train"], "train_step", step)
    assert not flushes()
    train(CONFIG.override(steps=2), data=data, out=tmp_path / "run")
    assert seen == [True, True] and not flushes()
    try:
        torch.set_flush_denormal(True)
        with flushed_denormals():
            assert flushes()
        assert flushes()  # as it was
    finally:
        torch.set_flush_denormal(False)
