"""A training run: one readable loop, in one process or under torchrun.

Knows a run's folder and data, when to measure, save and stop, and how to go on after a kill. It must not
know how a step is taken or a model measured, nor of command lines.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unembed.backbone import build
from unembed.checkpoint import Checkpoint, find_checkpoint, save_checkpoint
from unembed.config import Config
from unembed.corpus import PreparedData
from unembed.curves import draw_curves
from unembed.errors import UnembedError
from unembed.frames import SAMPLES
from unembed.logbook import MetricsLog, Report, alone, progress_bar
from unembed.pairs import CachedPairs, FreshSpans, Pairs
from unembed.run import Group, Run, joined_group
from unembed.step import masked_loss, train_step
from unembed.tokens import TextTokenizer
from unembed.validation import validate
from unembed.whole import mend_folder

if TYPE_CHECKING:
    from unembed.encoders import Encoder

MODEL, STATE, METRICS, CURVES = "model", "state", "metrics.jsonl", "curves.png"


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    model: Path
    steps: int
    validation_loss: float | None
    seconds: float
    interrupted: bool = False


def train(
    config: Config,
    *,
    data: str | Path,
    out: str | Path,
    resume: bool = False,
    start_from: str | Path | None = None,
    trust_remote_code: bool = False,
    show_progress: bool = False,
) -> TrainResult:
    """Train an inverter on prepared data.

    Args:
        config: What to train and how; sizes that the data fixes are taken from the data.
        data: A folder that `prepare` wrote.
        out: The run's folder: `model/` (the best weights), `state/`, metrics and curves.
        resume: Go on where the run in `out` stopped.
        start_from: A model whose weights to begin with; if it is for another encoder, all but the layer
            that reads the vector, which begins fresh. A run that is resumed has begun, and needs it no more.
        trust_remote_code: Run the code an encoder brings, to embed spans while training.
        show_progress: Show a bar on stderr.

    Returns:
        Where the model is and how the run went; on Ctrl-C the state is saved and
        `interrupted` is set.
    """
    out = Path(out)
    start_from = None if resume else start_from
    prepared = PreparedData.open(Path(data))
    config = fit_to_data(config, prepared)
    if start_from is not None and not TextTokenizer.load(find_checkpoint(start_from)).names_as(
        prepared.tokenizer
    ):
        raise UnembedError(
            f"{start_from} has another vocabulary than {data}, so its weights mean other words; prepare the "
            "data with its encoder's tokenizer, or leave out --start-from."
        )
    # Denormals are flushed before anything starts torch's threads.
    with flushed_denormals(), joined_group() as group, claimed_folder(out, group, resume=resume):
        network = partial(build, pretrained=False) if resume else None  # the state brings the weights
        run = Run(config, group=group, start_from=start_from, network=network, data=prepared.digest)
        if resume:
            resume_run(run, out / STATE)
        pairs = open_pairs(config, prepared, group, trust_remote_code=trust_remote_code)
        held_out = pairs.validation() if config.train.validation else None
        loss_function = torch.compile(masked_loss) if config.train.compile else masked_loss
        work = Work(
            step=lambda: train_step(run, pairs, loss_function),
            measure=None if held_out is None else partial(validate, run, held_out),
            save=lambda: _save_model(run, prepared, out / MODEL),
        )
        result = carry_out(run, work, out, show_progress=show_progress)
        if group.leads:
            draw_curves(MetricsLog(out / METRICS, last_step=run.step, write=True).rows(), out / CURVES)
        return result


@contextmanager
def claimed_folder(out: Path, group: Group, *, resume: bool) -> Iterator[None]:
    """Keep other runs out; refuse to begin a run where there is one, or to go on where there is none."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with alone(out) if group.leads else nullcontext():
            if resume:
                if group.leads:
                    mend_folder(out / STATE)
                    mend_folder(out / MODEL)
                group.any(False)  # the others wait for it, else they might find no run
            if (out / STATE).exists() and not resume:
                raise UnembedError(
                    f"{out} holds a run already; add --resume to go on, or choose another folder."
                )
            if resume and not (out / STATE).exists():
                raise UnembedError(f"{out} holds no run to resume; leave out --resume to start one.")
            yield
    finally:
        for folder in made:  # a run that was refused leaves nothing behind; what holds something stays
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True)
class Work:
    """What a run does: how it steps, how it is measured, if at all, and how its model is written down."""

    step: Callable[[], Tensor]
    measure: Callable[[], dict[str, float]] | None
    save: Callable[[], None]


def carry_out(run: Run, work: Work, out: Path, *, show_progress: bool) -> TrainResult:
    """Take a run to its end, or to where it is asked to stop; either way it can be gone on with."""
    leads = run.group.leads
    bar = progress_bar(steps=run.config.train.steps, done=run.step, show=show_progress and leads)
    with stop_requests() as stopped:
        log = MetricsLog(out / METRICS, last_step=run.step, write=leads)
        with bar as report:
            _loop(run, work, out, log=log, report=report, stopped=stopped)
        _save_state(run, out)
        if leads and (not (out / MODEL).exists() or work.measure is None):
            work.save()
        best = None if run.best == float("inf") else run.best
        return TrainResult(out / MODEL, run.step, best, run.seconds, interrupted=bool(stopped))


def _loop(run: Run, work: Work, out: Path, *, log: MetricsLog, report: Report, stopped: list[int]) -> None:
    """Step until the run is finished or asked to stop, measuring and saving on the way."""
    c = run.config.train
    clock, before, begun = time.monotonic(), run.seconds, run.step
    running: Tensor | None = None
    while not run.finished():
        share = run.set_rate()
        loss = work.step()
        run.step += 1
        if run.step == begun + 1 and c.compile:  # compiling is not training: start the clock after it
            _synchronise(run.group.device)
            clock = time.monotonic()
        run.seconds = before + time.monotonic() - clock
        if c.minutes:
            run.seconds = run.group.agreed(run.seconds)
        running = loss if running is None else running.lerp(loss, 0.05)
        if run.step % 20 == 0:  # reading the loss waits for the device
            loss = run.group.total(running)  # each process has its rows' share of it
            row = {"step": run.step, "loss": float(loss), "rate": share, "seconds": round(run.seconds, 2)}
            _check_sound(run, out, math.isfinite(row["loss"]))
            log.write(row)
            report(row)
        # A run that is asked to stop goes on later: a validation more would count against its patience.
        asked = run.group.any(bool(stopped))
        if work.measure is not None and (run.step % c.evaluate_every == 0 or run.finished()):
            figures = work.measure()
            _check_sound(run, out, run.is_finite() and all(map(math.isfinite, figures.values())))
            log.write({"step": run.step, "seconds": round(run.seconds, 2), **figures})
            report({"step": run.step, **figures})
            if figures["validation_loss"] < run.best:
                run.best, run.waited = figures["validation_loss"], 0
                if run.group.leads:
                    work.save()
            else:
                run.waited += 1
        if asked:
            return
        if run.step % c.save_every == 0:
            _save_state(run, out)


def _save_state(run: Run, out: Path) -> None:
    """Write down all that resuming needs, unless the run has diverged."""
    _check_sound(run, out, run.is_finite())
    if run.group.leads:
        run.save_state(out / STATE)


def _check_sound(run: Run, out: Path, sound: bool) -> None:
    """Stop a run that has diverged, before anything of it is said or kept."""
    if sound:
        return
    saved = (out / STATE).exists() or (out / MODEL).exists()
    kept = f"what was saved before in {out} is kept" if saved else "nothing was saved yet"
    raise UnembedError(
        f"the run has diverged: at step {run.step} its loss or weights are no longer finite numbers; {kept}; "
        "start another run with a lower learning_rate (and muon_rate)."
    )


def _save_model(run: Run, prepared: PreparedData, folder: Path) -> None:
    """Write the averaged weights as a model people can load."""
    weights = run.average.state_dict()
    save_checkpoint(folder, Checkpoint(run.config, weights, prepared.tokenizer, run_facts(run, prepared)))


def run_facts(run: Run, prepared: PreparedData) -> dict[str, Any]:
    """What a card says of a run and its data."""
    c = run.config.train
    training = {
        "steps": run.step,
        "passages": run.step * c.batch_size,
        "minutes": round(run.seconds / 60, 1),
        "device": torch.cuda.get_device_name() if run.group.device.type == "cuda" else "cpu",
        "optimizer": c.optimizer,
    }
    return {"training": training, "data": [_described(source) for source in prepared.manifest["sources"]]}


def _described(source: dict[str, Any]) -> str:
    """Name a source of text for the card, with the hash that tells it from others of the name."""
    return f"{source['name']} (sha256 {source['sha256'][:12]})" if "sha256" in source else str(source["name"])


def fit_to_data(config: Config, data: PreparedData) -> Config:
    """Take the encoder, vocabulary, length and vector size from the data."""
    t = data.tokenizer
    sizes: dict[str, Any] = {
        "embedding_size": data.embedding_size or None, "max_tokens": data.max_tokens, "vocab_size": t.size,
        "mask_id": t.mask_id, "end_id": t.end_id, "pad_id": t.pad_id,
    }  # fmt: skip
    if config.model.backbone and t.size != config.model.vocab_size:
        raise UnembedError(
            f"the data has a vocabulary of {t.size} tokens, the backbone {config.model.backbone} one of "
            f"{config.model.vocab_size}; prepare the data with the backbone's tokenizer."
        )
    return config.override(encoder=data.encoder_name, **sizes)


def open_pairs(config: Config, data: PreparedData, group: Group, *, trust_remote_code: bool = False) -> Pairs:
    """Choose where batches come from."""
    c = config.train
    common: dict[str, Any] = {
        "batch_size": c.batch_size, "validation": c.validation, "seed": c.seed, "device": group.device,
    }  # fmt: skip
    if c.pairs == "cached":
        return CachedPairs(data, **common)
    from unembed.encoders import IdEncoder

    encoder = open_span_encoder(config.encoder, group.device, trust_remote_code=trust_remote_code)
    if not isinstance(encoder, IdEncoder):
        raise UnembedError(f"{config.encoder} is not local; prepare pairs and train with --pairs cached.")
    if encoder.size != config.model.embedding_size:  # passages may be prepared by an encoder's name alone
        raise UnembedError(
            f"{config.encoder} gives vectors of {encoder.size} numbers, but embedding_size is "
            f"{config.model.embedding_size}; train with --embedding-size {encoder.size}."
        )
    common |= {
        "splice_share": c.splice_share, "swap_share": c.swap_share, "rare_share": c.rare_share,
        "compile": c.compile,
    }  # fmt: skip
    return FreshSpans(data, encoder=encoder, **common)


def open_span_encoder(name: str, device: torch.device, *, trust_remote_code: bool = False) -> Encoder:
    """Load the encoder that embeds spans while training, on a GPU in half precision.

    That is bfloat16 where float16 overflows, as in Gemma's encoder, whose vectors would not be numbers.
    """
    from unembed.encoders import load_encoder

    options: dict[str, Any] = {"device": str(device), "trust_remote_code": trust_remote_code or None}
    if device.type != "cuda":
        return load_encoder(name, **options)
    encoder = load_encoder(name, dtype="float16", **options)
    # A table of vectors is added up in single precision, and may have no word of these.
    if not hasattr(encoder, "id_function") or np.isfinite(encoder.encode(SAMPLES)).all():
        return encoder
    return load_encoder(name, dtype="bfloat16", **options)


def resume_run(run: Run, state: Path) -> None:
    """Take a run up where it was saved, refusing data or settings that would make it another run."""
    progress = json.loads((state / "progress.json").read_text())
    if progress.get("data") not in (None, run.data):  # older states do not say
        raise UnembedError(
            "the run was started on other data; resume with the same data, or start another run."
        )
    saved = progress["config"]
    now, usual = asdict(run.config), asdict(Config())  # a setting that the run did not know was as usual
    free = {"steps", "minutes", "patience", "save_every", "evaluate_every", "compile"}
    for section, values in now.items():
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            before = saved[section].get(name, usual[section][name])
            if name not in free and before != value:
                raise UnembedError(
                    f"the run was started with {name} = {before}, not {value}; "
                    "resume with the same settings, or start another run."
                )
    run.load_state(state)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Take numbers that are too small for full precision as zero: with them a CPU is several times slower.

    When a text is learnt by heart, all other words of the vocabulary have chances as small as that.
    """
    before = float(torch.full((), 1e-40) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a step is never torn; a second one stops at once."""
    received: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals stay with whoever has them
        yield received
        return
    try:
        yield received
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def _synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
