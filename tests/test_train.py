"""train: how it steps, what it measures, and what a run leaves behind."""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from running import assert_no_rests, assert_same_run, hashes, rows_of, watch_steps
from safetensors.torch import load_file
from syllables import (
    ALONE,
    CONFIG,
    GUESSING,
    LEARNING,
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
from unembed.checkpoint import load_checkpoint
from unembed.config import Config
from unembed.corpus import PreparedData, prepare
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.logbook import MetricsLog, alone
from unembed.pairs import CachedPairs, FreshSpans
from unembed.run import Run
from unembed.step import train_step
from unembed.train import TrainResult, fit_to_data, flushed_denormals, train
from unembed.validation import validate

# `import unembed.train as training` would give the function.
training = import_module("unembed.train")

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


# --- both kinds of data ---------------------------------------------------------------------------


def learn(config: Config, data: Path, out: Path, *, fall: float) -> TrainResult:
    """Train for longer, and check that the loss fell to this share."""
    result = train(config.override(steps=200, evaluate_every=50), data=data, out=out)
    losses = [row["validation_loss"] for row in rows_of(out) if "validation_loss" in row]
    assert min(losses) < 0.9 * math.log(52)
    training_losses = [row["loss"] for row in rows_of(out) if "loss" in row]
    assert training_losses[-1] < fall * training_losses[0]
    return result


def test_cached_pairs_are_learnt(data: Path, tmp_path: Path) -> None:
    result = learn(CONFIG, data, tmp_path, fall=0.7)
    inverter, prepared = Inverter.from_pretrained(result.model), PreparedData.open(data)
    assert inverter.encoder_name == "fake" and inverter.size == SIZE
    assert len(inverter.invert(prepared.vectors(np.arange(3)), seed=0)) == 3


def test_fresh_spans_are_learnt(passages: Path, tmp_path: Path, local: list[str]) -> None:
    learn(CONFIG.override(pairs="fresh", batch_size=32), passages, tmp_path, fall=0.9)  # no span comes twice
    assert local == ["fake"]


def test_what_is_done_to_spans_are_settings(passages: Path, local: list[str]) -> None:
    prepared = PreparedData.open(passages)
    config = CONFIG.override(pairs="fresh", splice_share=0.4, swap_share=0.2)
    usual, rare = (
        training.open_pairs(fit_to_data(config.override(rare_share=share), prepared), prepared, ALONE)
        for share in (0.0, 0.5)
    )
    assert isinstance(usual, FreshSpans) and (usual.splice_share, usual.swap_share) == (0.4, 0.2)
    assert isinstance(rare, FreshSpans) and not torch.equal(usual.chances, rare.chances)


@pytest.mark.parametrize(
    "share", ["splice_share", "swap_share", "rare_share", "reword_share", "practice_share"]
)
def test_fresh_spans_go_on_after_a_stop(share: str, passages: Path, tmp_path: Path, local: list[str]) -> None:
    config = CONFIG.override(pairs="fresh", decay="constant", causal=True, **{share: 0.5})
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
