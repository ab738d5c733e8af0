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
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tabled import TabledEncoder
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from unembed import encoders
from unembed.backbone import build
from unembed.checkpoint import load_checkpoint, read_weights
from unembed.config import Config, DiffusionConfig, ModelConfig, TrainConfig
from unembed.corpus import PreparedData, prepare
from unembed.diffusion import causal_rows, embedded_rows
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.logbook import MetricsLog, alone
from unembed.pairs import CachedPairs, FreshSpans, Pairs, step_generator
from unembed.run import Group, Run
from unembed.tokens import TextTokenizer
from unembed.train import TrainResult, fit_to_data, flushed_denormals, train, train_step, validate

# `import unembed.train as training` would give the function.
training = import_module("unembed.train")

T, SIZE = 8, 16
SYLLABLES = [c + v for c in "bdgkm" for v in "aeiou"]
ALONE = Group(0, 1, torch.device("cpu"))
CONFIG = Config(
    model=ModelConfig(layers=1, hidden=32, heads=2, ffn=64, adaln_rank=0),
    train=TrainConfig(
        batch_size=9, steps=50, learning_rate=5e-3, muon_rate=1e-2, warmup=5, decay="linear", ema=0.9,
        validation=8, evaluate_every=10, save_every=15, precision="fp32",
    ),
)  # fmt: skip


# --- data -----------------------------------------------------------------------------------------


def syllable_tokenizer() -> TextTokenizer:
    """Build a vocabulary of 53 tokens: syllables that begin a word, and syllables that follow."""
    tokens = ["[PAD]", "[SEP]", "[MASK]", *SYLLABLES, *(f"##{s}" for s in SYLLABLES)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer.wrap(tokenizer, name="syllables")


class FakeEncoder(TabledEncoder):
    """A random vector for each token at each place."""

    def __init__(self, size: int = SIZE) -> None:
        table = torch.randn(64, T, size, generator=torch.Generator().manual_seed(0))
        super().__init__(table, syllable_tokenizer())


def texts(count: int, longest: int) -> list[str]:
    """Return texts of words of one or two syllables."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, longest, count)
    return [" ".join("".join(rng.choice(SYLLABLES, rng.integers(1, 3))) for _ in range(n)) for n in lengths]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    return prepare(
        texts(48, 6), encoder=FakeEncoder(), out=folder, max_tokens=T, source_names=["made up"]
    ).path


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Passages for spans."""
    folder = tmp_path_factory.mktemp("passages")
    return prepare(texts(400, 30), encoder=FakeEncoder(), out=folder, max_tokens=T, kind="passages").path


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

GUESSING: dict[str, Any] = {"embeds": True, "embed_share": 0.25}
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
LEFT_TO_RIGHT: dict[str, Any] = {"causal": True, "causal_share": 0.5, "causal_hidden": 0.2, "lowest_t": 0.3}
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


def test_the_average_does_not_remember_how_it_came_about(data: Path) -> None:
    """A graph behind it would grow with every step."""
    prepared = PreparedData.open(data)
    run = Run(fit_to_data(CONFIG, prepared), group=ALONE)
    pairs = CachedPairs(prepared, batch_size=CONFIG.train.batch_size, validation=8, seed=0, device="cpu")
    train_step(run, pairs, training.masked_loss)
    assert all(p.is_leaf and not p.requires_grad for p in run.average.parameters())


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


class Told(nn.Module):
    """A model that notes what it is told, and answers the same whatever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensor] = []

    def hidden(self, xt: Tensor, e: Tensor, **_: Any) -> Tensor:
        self.told.append(xt)
        return torch.zeros(*xt.shape, 1)

    def head(self, h: Tensor) -> Tensor:
        return torch.linspace(-1, 1, 53).expand(len(h), 53)


def test_hidden_tokens_are_not_told_but_stay_targets() -> None:
    config = CONFIG.override(vocab_size=53, mask_id=2, end_id=1, pad_id=0, max_tokens=T, **LEFT_TO_RIGHT)
    draw = torch.Generator().manual_seed(0)
    x0 = torch.randint(3, 53, (6, T), generator=draw)
    x0[:, -1] = 0
    causal = torch.tensor([True, False] * 3)
    masked = torch.where(causal[:, None], x0 != 0, torch.rand(6, T, generator=draw) < 0.5)
    hidden = torch.rand(6, T, generator=draw) < 0.4
    model, ones = Told(), torch.ones(6)
    losses = [
        training.masked_loss(
            model, x0, ones, ones, masked, ones > 1, config=config, count=int(masked.sum()), causal=causal,
            hidden=given,
        )
        for given in (hidden, None)
    ]  # fmt: skip
    told, plain = model.told
    assert torch.equal(told == 2, torch.where(causal[:, None], hidden, masked))
    assert torch.equal(told[told != 2], x0[told != 2])
    assert torch.equal(plain[causal], x0[causal]) and torch.equal(plain[~causal], told[~causal])
    # The model answers the same to both, so the loss is the same: that of every token of a causal row.
    assert losses[0] == losses[1]
    wanted = -torch.linspace(-1, 1, 53).log_softmax(0)[x0[masked]].sum()
    torch.testing.assert_close(losses[0], wanted)


def ask_step(run: Run, pairs: Pairs) -> dict[str, Any]:
    """Take a step and return what its loss was asked for."""
    asked: dict[str, Any] = {}

    def loss(
        model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, **more: Any
    ) -> Tensor:
        asked.update(more, x0=x0, t=t, masked=masked, drop=drop)
        return model.places.sum()

    train_step(run, pairs, loss)
    return asked


def test_a_share_of_the_tokens_is_hidden_in_every_step(data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=40, validation=8, seed=0, device="cpu")

    def ask(step: int, **changes: Any) -> dict[str, Any]:
        config = fit_to_data(CONFIG.override(batch_size=40, **{**LEFT_TO_RIGHT, **changes}), prepared)
        run = Run(config, group=ALONE)
        run.step = step
        return ask_step(run, pairs)

    shares = {share: ask(3, causal_hidden=share) for share in (0.0, 0.3, 1.0)}
    for share, asked in shares.items():
        assert float(asked["hidden"].float().mean()) == pytest.approx(share, abs=0.1)
        # Nothing else depends on it: neither what is masked nor what is asked for.
        for name in ("t", "masked", "drop", "causal", "count"):
            assert torch.equal(*(torch.as_tensor(each[name]) for each in (asked, shares[0.0]))), name
    causal = shares[0.3]["causal"]
    assert int(causal.sum()) == 20
    assert torch.equal(shares[0.3]["masked"][causal], shares[0.3]["x0"][causal] != 0)
    assert torch.equal(ask(3, causal_hidden=0.3)["hidden"], shares[0.3]["hidden"])
    assert not torch.equal(ask(4, causal_hidden=0.3)["hidden"], shares[0.3]["hidden"])
    assert "hidden" not in ask(3, causal_share=0.0)


@pytest.mark.parametrize(("share", "more"), [(0.0, {}), (0.5, {}), (0.0, GUESSING)])
def test_compiled_steps_have_room_for_all_targets_and_little_more(
    share: float, more: dict[str, Any], passages: Path
) -> None:
    """Logits of a compiled step have one shape, so that it is compiled once: it must do for every batch."""
    prepared, B = PreparedData.open(passages), 6000
    config = CONFIG.override(
        batch_size=B, compile=True, pairs="fresh", splice_share=share, **LEFT_TO_RIGHT, **more
    )
    run = Run(fit_to_data(config, prepared), group=ALONE)
    pairs = FreshSpans(
        prepared, encoder=FakeEncoder(), batch_size=B, validation=8, seed=0, device="cpu", splice_share=share
    )
    counts, targets = set(), []
    for run.step in range(20):
        asked = ask_step(run, pairs)
        counts.add(asked["count"])
        targets.append(int(asked["masked"].sum()))
    (count,) = counts
    assert max(targets) <= count < 1.03 * max(targets) and count % 512 == 0


def guessing_config(**changes: Any) -> Config:
    """Settings of a model for the data that reads left to right and guesses vectors, without the data."""
    config = CONFIG.override(vocab_size=53, mask_id=2, end_id=1, pad_id=0, max_tokens=T, embedding_size=SIZE)
    return config.override(**LEFT_TO_RIGHT, **GUESSING, time_conditioning=True, **changes)


@torch.no_grad()
@pytest.mark.parametrize("weight", ["mean", "elbo", "inverse-t"])
def test_of_a_whole_row_the_vector_is_the_target_and_no_token_is(weight: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x0 = torch.randint(3, 53, (6, T), generator=draw)
    x0[torch.arange(T) >= torch.tensor([[8], [3], [5], [1], [6], [8]])] = 0
    e, t = torch.randn(6, SIZE, generator=draw), torch.rand(6, generator=draw)
    whole = torch.tensor([True, True, False, True, False, False])
    causal = torch.tensor([False, False, True, False, False, True])
    masked = torch.where(causal[:, None], x0 != 0, torch.rand(6, T, generator=draw) < 0.5)
    masked, t, drop = masked & ~whole[:, None], t.masked_fill(whole, 0.0), torch.arange(6) == 4
    torch.manual_seed(0)
    model: Any = build(guessing_config().model)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=draw) * 0.1)

    def loss(rows: Tensor, *, vectors: Tensor = e, asked: bool = True, **changes: Any) -> Tensor:
        more = {"whole": whole[rows]} if asked else {}
        return training.masked_loss(
            model, x0[rows], vectors[rows], t[rows], masked[rows], drop[rows], causal=causal[rows],
            config=guessing_config(weight=weight, **changes), count=int(masked[rows].sum()), **more,
        )  # fmt: skip

    every = torch.ones(6, dtype=torch.bool)
    others = loss(~whole, asked=False)
    assert others > 1
    torch.testing.assert_close(loss(every, embed_weight=0.0), others)
    torch.testing.assert_close(loss(~whole), others)
    # What is added is how far each guess is from the vector's direction, for each token of the text.
    apart = (model.embed(x0[whole]) - F.normalize(e[whole], dim=1)).norm(dim=1)
    wanted = 3.0 * (apart * torch.tensor([8, 3, 1])).sum()
    torch.testing.assert_close(loss(every, embed_weight=3.0) - others, wanted, rtol=1e-4, atol=1e-4)
    # It is not told: what is guessed is the same, so that its opposite is as far as the other side.
    turned = torch.where(whole[:, None], -e, e)
    apart = (model.embed(x0[whole]) + F.normalize(e[whole], dim=1)).norm(dim=1)
    wanted = 3.0 * (apart * torch.tensor([8, 3, 1])).sum()
    found = loss(every, vectors=turned, embed_weight=3.0) - others
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [0.0, 0.5])
def test_a_share_of_the_rows_is_whole_in_every_step(causal: float, data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=40, validation=8, seed=0, device="cpu")
    left = {**LEFT_TO_RIGHT, "causal_share": causal}

    def ask(**changes: Any) -> dict[str, Any]:
        run = Run(fit_to_data(CONFIG.override(batch_size=40, **left, **changes), prepared), group=ALONE)
        return ask_step(run, pairs)

    plain, asked = ask(), ask(**GUESSING)
    assert "whole" not in plain and int(asked["whole"].sum()) == 10
    whole, config = asked["whole"], CONFIG.override(**left, **GUESSING).diffusion
    assert torch.equal(whole, embedded_rows(40, config, device="cpu"))
    assert not (whole & causal_rows(40, config, device="cpu")).any()
    # There nothing is masked; to the other rows, and to what is drawn, it makes no difference.
    assert not asked["masked"][whole].any() and not asked["t"][whole].any()
    for name in ("t", "masked"):
        assert torch.equal(asked[name][~whole], plain[name][~whole]), name
    for name in ("x0", "drop", *(["causal", "hidden"] if causal else [])):
        assert torch.equal(asked[name], plain[name]), name
    assert asked["count"] == int(asked["masked"].sum()) < plain["count"]


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


# --- dropout --------------------------------------------------------------------------------------


def test_a_step_with_dropout_depends_on_seed_and_step_alone(data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")

    def loss(dropout: float, *, drawn: int = 0) -> float:
        run = Run(fit_to_data(CONFIG.override(dropout=dropout), prepared), group=ALONE)
        torch.rand(drawn)  # by others, before
        return float(train_step(run, pairs, training.masked_loss))

    assert loss(0.3) == loss(0.3, drawn=9) != loss(0.0)


def test_dropout_draws_anew_in_every_step_and_process(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")
    run = Run(fit_to_data(CONFIG.override(dropout=0.3), prepared), group=ALONE)
    drawn = []

    def loss(model: Any, *_: Any, **__: Any) -> Tensor:
        drawn.append(float(torch.rand(())))
        return model.places.sum()

    monkeypatch.setattr(Group, "rows", lambda group, size: slice(size))  # no second process is there
    for step, rank in ((0, 0), (1, 0), (0, 1)):
        run.step, run.group = step, Group(rank, 1, torch.device("cpu"))
        train_step(run, pairs, loss)
    assert len(set(drawn)) == 3


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


# --- validation -----------------------------------------------------------------------------------


def test_validation_has_the_same_masks_every_time(data: Path) -> None:
    prepared = PreparedData.open(data)

    def figures(seed: int, *, times: int = 1) -> list[dict[str, float]]:
        run = Run(fit_to_data(CONFIG, prepared), group=ALONE)
        run.config = run.config.override(seed=seed)
        held_out = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu").validation()
        found = []
        for _ in range(times):
            torch.rand(7)  # draws of others do not matter, nor does the step
            run.step += 1
            found.append(validate(run, held_out))
        return found

    first, second = figures(0, times=2)
    assert first == second == figures(0)[0]
    assert first.keys() == {"validation_loss", "token_accuracy", "token_f1"}
    assert 0 <= first["token_accuracy"] <= 1 and 0 <= first["token_f1"] <= 1
    assert first["validation_loss"] == pytest.approx(math.log(52), rel=0.1)  # untrained: any of 52 tokens
    assert figures(1)[0]["validation_loss"] != first["validation_loss"]


@torch.no_grad()
def test_what_is_said_of_guesses_is_their_mean_cosine(data: Path) -> None:
    prepared = PreparedData.open(data)
    run = Run(fit_to_data(CONFIG.override(**GUESSING), prepared), group=ALONE)
    x0, e = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu").validation()
    figures = validate(run, (x0, e))
    assert figures.keys() == {"validation_loss", "token_accuracy", "token_f1", "embed_cosine"}
    model: Any = run.average
    guesses = torch.cat([model.embed(text[None]) for text in x0])
    mean = float(F.cosine_similarity(guesses, e).mean())
    assert figures["embed_cosine"] == pytest.approx(mean, abs=1e-5)
    run.config = run.config.override(embed_share=0.0)
    assert "embed_cosine" not in validate(run, (x0, e))


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
        train_step(run, pairs, training.masked_loss)
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


def rewording_run(prepared: PreparedData, *, group: Group = ALONE, **changes: Any) -> Run:
    """Begin a run in which the model rewords all rows, or as many as is said."""
    values = {"pairs": "fresh", "batch_size": 40, "reword_share": 1.0, **changes}
    return Run(fit_to_data(CONFIG.override(**values), prepared), group=group)


def spans_of(prepared: PreparedData, **changes: Any) -> FreshSpans:
    """Open the passages for the batches of such a run."""
    values = {"encoder": FakeEncoder(), "batch_size": 40, "validation": 8, "seed": 0, "device": "cpu"}
    return FreshSpans(prepared, **{**values, **changes})


def content(ids: Tensor) -> Tensor:
    """Tokens of each row before its end."""
    return (ids > 1).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("swap_share", [0.0, 1.0])
def test_texts_are_reworded_before_they_are_embedded(
    swap_share: float, compiled: bool, passages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared), spans_of(prepared, swap_share=swap_share)
    if compiled:  # as fast as without
        monkeypatch.setattr(spans, "_compiled", spans.encoder.encode_ids)
    plain, _ = spans.batch(run.step, slice(None))
    # The words are written into the very texts of this step, whose words are swapped by then.
    given: list[Tensor] = []

    def note(ids: Tensor) -> Tensor:
        given.append(ids)
        return ids

    assert torch.equal(spans.batch(run.step, slice(3, 30), note)[0], plain[3:30])
    assert len(given) == 1 and torch.equal(given[0], plain[3:30])
    x0, e = training.step_batch(run, spans, slice(None))
    assert torch.equal(content(x0), content(plain))
    changed = x0 != plain
    assert 0.05 < changed.float().mean() < 0.3 and spans.opens[x0[changed]].all()
    # The vectors are those of what was written, which is what training is told.
    torch.testing.assert_close(e, FakeEncoder().encode_ids(x0, content(x0)))
    told: list[Tensor] = []

    def loss(model: Any, *given: Any, **more: Any) -> Tensor:
        told.extend(given[:2])
        return model.places.sum()

    train_step(run, spans, loss)
    assert torch.equal(told[0], x0) and torch.equal(told[1], e)


def test_rewording_follows_the_weights_as_they_are_learnt(passages: Path) -> None:
    """It is the model of this step that writes, not the one of the beginning, nor the average."""
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared), spans_of(prepared)
    plain, _ = spans.batch(0, slice(None))
    with torch.no_grad():
        run.model.bias[7] = 100.0  # type: ignore[operator]
    x0, _ = training.step_batch(run, spans, slice(None))
    assert set(x0[x0 != plain].tolist()) == {7}


def test_rewording_is_drawn_anew_for_every_seed_step_and_process(
    passages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PreparedData.open(passages)
    spans, asked = spans_of(prepared), []

    def note(model: Any, ids: Tensor, **more: Any) -> Tensor:
        asked.append((model, {**more, "half": torch.is_autocast_enabled("cpu")}))
        return ids

    monkeypatch.setattr(training, "reword", note)
    seeds: list[int] = []
    for seed in range(3):
        for rank in range(3):
            group = Group(rank, 3, torch.device("cpu"))
            precision = "bf16" if rank else "fp32"
            run = rewording_run(prepared, group=group, seed=seed, reword_share=0.4, precision=precision)
            for run.step in range(4):
                training.step_batch(run, spans, slice(None))
                model, more = asked.pop()
                assert model is run.model and more["share"] == 0.4 and more["opens"] is spans.opens
                assert more["half"] == (precision == "bf16")
                seeds.append(more["generator"].initial_seed())
    others = {
        step_generator(seed, step, stream=stream).initial_seed()
        for seed in range(3)
        for step in range(4)
        for stream in range(20)
    }
    assert len(set(seeds)) == len(seeds) == 36 and not others & set(seeds)


def test_rewording_does_not_know_of_the_steps_before(passages: Path) -> None:
    """What torch's own generator has drawn before is another thing after a stop."""
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared, dropout=0.5), spans_of(prepared)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(10.0)  # so that it matters what is dropped
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(ask_step(run, spans)["x0"])
    assert torch.equal(found[0], found[1])
    assert run.model.training  # in the step itself much is dropped


def test_without_a_share_nothing_is_reworded(passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedData.open(passages)
    spans = spans_of(prepared)
    monkeypatch.delattr(training, "reword")
    run = rewording_run(prepared, reword_share=0.0)
    assert torch.equal(ask_step(run, spans)["x0"], spans.batch(0, slice(None))[0])


@pytest.mark.parametrize("share", ["splice_share", "swap_share", "reword_share"])
def test_cached_pairs_stay_as_they_are(share: str, data: Path) -> None:
    """Their vectors were computed beforehand."""
    prepared = PreparedData.open(data)
    batches = []
    for value in (0.0, 1.0):
        config = fit_to_data(CONFIG.override(**{share: value}), prepared)
        batches.append(ask_step(Run(config, group=ALONE), training.open_pairs(config, prepared, ALONE)))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("x0", "masked", "t", "drop"))


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


def test_training_follows_the_diffusion_settings(data: Path) -> None:
    """Without its vector a row is worth the null condition: nothing else of `e` may reach the loss."""
    prepared = PreparedData.open(data)
    dropped = fit_to_data(CONFIG.override(condition_dropout=1.0), prepared)
    assert dropped.diffusion == DiffusionConfig(condition_dropout=1.0)
    run = Run(dropped, group=ALONE)
    train_step(
        run, CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu"), training.masked_loss
    )
    state = run.optimizers[0].state
    moved = {
        name for name, p in run.model.named_parameters() if p in state and state[p]["exp_avg"].abs().max() > 0
    }
    assert "tokens.weight" in moved and not {"projection.w1.weight", "projection.w2.weight"} & moved


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
