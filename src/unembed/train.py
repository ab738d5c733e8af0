"""Training: one readable loop, in one process or under torchrun.

Every random draw is a function of (seed, step), so a run that is killed and resumed ends in the
same bits, and processes agree on a batch without a word. It must not know of command lines.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unembed.backbone import build
from unembed.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_into,
    mend_folder,
    read_weights,
    save_checkpoint,
    whole_folder,
)
from unembed.config import Config, DiffusionConfig
from unembed.corpus import PreparedData
from unembed.curves import draw_curves
from unembed.decode import DecodeOptions, decode, draw_uniforms
from unembed.diffusion import capacity, chosen_places, corrupt, draw_masks, sample_t, token_weights, weight_total
from unembed.errors import UnembedError
from unembed.metrics import token_f1
from unembed.optimizers import build_optimizers, rate_at
from unembed.pairs import Batch, CachedPairs, FreshSpans, Pairs, step_generator

MODEL, STATE, METRICS, CURVES = "model", "state", "metrics.jsonl", "curves.png"
_DECODED = 128  # validation texts that are decoded in full
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    model: Path
    steps: int
    validation_loss: float | None
    seconds: float
    interrupted: bool = False


@dataclass(frozen=True)
class Group:
    """The processes that train together; alone, a group of one."""

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """This process's share of a batch."""
        return slice(batch_size * self.rank // self.world, batch_size * (self.rank + 1) // self.world)

    def add_up(self, gradients: list[Tensor]) -> None:
        """Sum gradients over the group, in place, in one message."""
        if self.world == 1:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])

    def total(self, value: Tensor) -> Tensor:
        """Sum of a value over the group."""
        if self.world == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        if self.world == 1:
            return flag
        return bool(self.total(torch.tensor(float(flag), device=self.device)) > 0)

    def agreed(self, value: float) -> float:
        """The first process's value: clocks differ, and what hangs on one must be the same in all."""
        if self.world == 1:
            return value
        box = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(box, src=0)
        return float(box)


@contextmanager
def joined_group() -> Iterator[Group]:
    """Join the processes torchrun started, if it did; a group the caller has joined stays joined."""
    cuda = torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield Group(0, 1, torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    joins = not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Group(dist.get_rank(), world, device)
    finally:
        if joins:
            dist.destroy_process_group()


class Run:
    """A model in training: weights, their average, optimisers, and how far it has come."""

    def __init__(self, config: Config, *, group: Group, start_from: str | Path | None = None) -> None:
        """Build everything fresh, or from the weights of an earlier model."""
        self.config, self.group = config, group
        torch.manual_seed(config.train.seed)
        model = build(config.model)
        if start_from is not None:
            load_into(model, read_weights(find_checkpoint(start_from)), source=str(start_from))
        self.model = model.to(group.device)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizers = build_optimizers(self.model, config.train)
        self.step = 0
        self.seconds = 0.0
        self.best = float("inf")
        self.waited = 0  # validations since the best

    def half(self) -> AbstractContextManager[Any]:
        """Run matrix products in bf16 if the settings say so."""
        precision = self.config.train.precision
        bf16 = precision == "bf16" or (precision == "auto" and self.group.device.type == "cuda")
        return torch.autocast(self.group.device.type, torch.bfloat16) if bf16 else nullcontext()

    def set_rate(self) -> float:
        """Set every optimiser's learning rate for this step; return its share of the peak."""
        c = self.config.train
        progress = self.step / c.steps
        if c.minutes:
            progress = max(progress, self.seconds / 60 / c.minutes)
        share = rate_at(self.step, progress, c)
        for optimizer in self.optimizers:
            for g in optimizer.param_groups:
                g["lr"] = g["peak"] * share
        return share

    def apply_gradients(self) -> None:
        """Clip, step every optimiser, and move the average along."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.group.add_up([p.grad for p in parameters])  # type: ignore[misc]
        if self.config.train.clip:
            nn.utils.clip_grad_norm_(parameters, self.config.train.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Warmed up: early on the average must not cling to the first weights.
        decay = min(self.config.train.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)

    def finished(self) -> bool:
        """Whether the run has had all its steps, its minutes, or its patience."""
        c = self.config.train
        late = bool(c.minutes) and self.seconds >= c.minutes * 60
        return self.step >= c.steps or late or bool(c.patience and self.waited >= c.patience)

    def save_state(self, folder: Path) -> None:
        """Write all that resuming needs, as safetensors and JSON, whole or not at all."""
        with whole_folder(folder) as draft:
            save_file(_contiguous(self.model.state_dict()), draft / "model.safetensors")
            save_file(_contiguous(self.average.state_dict()), draft / "average.safetensors")
            tensors = {
                f"{i}/{p}/{key}": torch.as_tensor(value)
                for i, optimizer in enumerate(self.optimizers)
                for p, state in optimizer.state_dict()["state"].items()
                for key, value in state.items()
            }
            save_file(_contiguous(tensors), draft / "optimizers.safetensors")
            progress = {"step": self.step, "seconds": self.seconds, "waited": self.waited}
            progress["best"] = None if self.best == float("inf") else self.best  # type: ignore[assignment]
            (draft / "progress.json").write_text(json.dumps({**progress, "config": asdict(self.config)}))

    def load_state(self, folder: Path) -> None:
        """Continue from what `save_state` wrote."""
        progress = json.loads((folder / "progress.json").read_text())
        self.model.load_state_dict(_read(folder / "model.safetensors"))
        self.average.load_state_dict(_read(folder / "average.safetensors"))
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        for name, tensor in _read(folder / "optimizers.safetensors").items():
            i, p, key = name.split("/")
            states[int(i)].setdefault(int(p), {})[key] = tensor
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self.step, self.seconds, self.waited = (progress[k] for k in ("step", "seconds", "waited"))
        self.best = float("inf") if progress["best"] is None else progress["best"]


def masked_loss(
    model: nn.Module, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, *, config: Config, count: int
) -> Tensor:
    """Weighted sum of the cross entropy at the masked places; logits are computed only there."""
    xt = x0.masked_fill(masked, config.model.mask_id)
    h = model.hidden(xt, e, t=t, drop=drop)  # type: ignore[operator]
    places = chosen_places(masked, count)
    logits = model.head(h.flatten(0, 1)[places])  # type: ignore[operator]
    entropy = F.cross_entropy(logits.float(), x0.flatten()[places], reduction="none")
    loss = (entropy * token_weights(masked, t, config.diffusion).flatten()[places]).sum()
    if config.train.bag_weight:
        log_p = F.log_softmax(model.bag(e).float(), dim=-1).gather(1, x0)  # type: ignore[operator]
        # Weighed as one more masked token for each token of the text.
        loss = loss - config.train.bag_weight * (log_p * (x0 != config.model.pad_id)).sum()
    return loss


def train_step(run: Run, pairs: Pairs, loss_function: Callable[..., Tensor]) -> Tensor:
    """Take one optimisation step; return the loss over this process's rows."""
    c, group = run.config, run.group
    B, T = c.train.batch_size, c.model.max_tokens
    rows = group.rows(B)
    x0, e = pairs.batch(run.step, rows)
    generator = step_generator(c.train.seed, run.step, device=group.device)
    t = sample_t(B, c.diffusion, generator=generator)
    masked = draw_masks(t, T, c.diffusion, generator=generator)
    drop = torch.rand(B, generator=generator, device=group.device) < c.diffusion.condition_dropout
    total = weight_total(masked, c.diffusion)  # of the whole batch, which every process has drawn
    with run.half():
        count = capacity(rows.stop - rows.start, T, c.diffusion)
        if group.device.type == "cpu" and not c.train.compile:
            count = int(masked[rows].sum())  # no device to wait for: not a logit too many
        elif group.world > 1:  # a share of a stratified batch is not stratified itself
            count = (rows.stop - rows.start) * T
        loss = loss_function(run.model, x0, e, t[rows], masked[rows], drop[rows], config=c, count=count) / total
    loss.backward()
    run.apply_gradients()
    return loss.detach()


@torch.inference_mode()
def validate(run: Run, held_out: Batch) -> dict[str, float]:
    """Measure the averaged weights on the pairs kept aside, with the same masks every time.

    The loss is the run's own at its own schedule. `token_accuracy` is that of words when all is
    masked, `token_f1` that of texts decoded in 8 passes.
    """
    c, device = run.config, run.group.device
    x0, e = held_out
    generator = step_generator(c.train.seed, 0, stream=2, device=device)
    fixed = replace(c.diffusion, stratified=True)
    t = sample_t(len(x0), fixed, generator=generator)
    xt, masked = corrupt(x0, t, fixed, mask_id=c.model.mask_id, generator=generator)
    weights = token_weights(masked, t, fixed)
    word = (x0 != c.model.pad_id) & (x0 != c.model.end_id)
    loss = correct = 0.0
    blank = torch.full_like(x0, c.model.mask_id)
    model: Any = run.average
    with run.half():
        for part in torch.arange(len(x0), device=device).split(256):
            logits = model(xt[part], e[part], t=t[part], where=masked[part]).float()
            entropy = F.cross_entropy(logits, x0[part][masked[part]], reduction="none")
            loss += float((entropy * weights[part][masked[part]]).sum())
            ones = torch.ones(len(part), device=device)
            guess = model(blank[part], e[part], t=ones, where=word[part]).argmax(-1)
            correct += float((guess == x0[part][word[part]]).sum())
        f1 = _decoded_f1(model, x0[:_DECODED], e[:_DECODED], fixed)
    return {
        "validation_loss": loss / float(weight_total(masked, fixed)),
        "token_accuracy": correct / float(word.sum()),
        "token_f1": f1,
    }


def _decoded_f1(model: Any, x0: Tensor, e: Tensor, diffusion: DiffusionConfig) -> float:
    """Mean token F1 of texts decoded by `confidence` in 8 passes."""
    T, steps = x0.shape[1], min(8, x0.shape[1])
    uniforms = draw_uniforms(0, len(x0), steps=steps, length=T, seed=0).to(x0.device)
    options = DecodeOptions(steps=steps)
    for draft in decode(model, e, options=options, diffusion=diffusion, uniforms=uniforms):
        last = draft.ids
    end = model.config.end_id
    rows = zip(_words(x0, end), _words(last, end), strict=True)
    return sum(token_f1(reference, found) for reference, found in rows) / len(x0)


def _words(ids: Tensor, end_id: int) -> list[list[int]]:
    """Ids of each row before its end."""
    return [row[: row.index(end_id)] if end_id in row else row for row in ids.tolist()]


def train(
    config: Config,
    *,
    data: str | Path,
    out: str | Path,
    resume: bool = False,
    start_from: str | Path | None = None,
    show_progress: bool = False,
) -> TrainResult:
    """Train an inverter on prepared data.

    Args:
        config: What to train and how; sizes that the data fixes are taken from the data.
        data: A folder that `prepare` wrote.
        out: The run's folder: `model/` (the best weights), `state/`, metrics and curves.
        resume: Go on where the run in `out` stopped.
        start_from: A model whose weights to begin with.
        show_progress: Show a bar on stderr.

    Returns:
        Where the model is and how the run went; on Ctrl-C the state is saved and
        `interrupted` is set.
    """
    out = Path(out)
    if resume and os.environ.get("RANK", "0") == "0":
        mend_folder(out / STATE)
        mend_folder(out / MODEL)
    if (out / STATE).exists() and not resume:
        raise UnembedError(f"{out} holds a run already; add --resume to go on, or choose another folder.")
    if resume and not (out / STATE).exists():
        raise UnembedError(f"{out} holds no run to resume; leave out --resume to start one.")
    prepared = PreparedData.open(Path(data))
    config = fit_to_data(config, prepared)
    with joined_group() as group, stop_requests() as stopped:
        run = Run(config, group=group, start_from=start_from)
        if resume:
            _check_same_run(config, out / STATE)
            run.load_state(out / STATE)
        pairs = open_pairs(config, prepared, group)
        log = MetricsLog(out / METRICS, last_step=run.step, write=group.leads)
        with progress_bar(run, show=show_progress and group.leads) as report:
            _loop(run, pairs, prepared, out, log=log, report=report, stopped=stopped)
        if group.leads:
            run.save_state(out / STATE)
            if not (out / MODEL).exists() or not config.train.validation:
                _save_model(run, prepared, out / MODEL)
            draw_curves(log.rows(), out / CURVES)
        best = None if run.best == float("inf") else run.best
        return TrainResult(out / MODEL, run.step, best, run.seconds, interrupted=bool(stopped))


def _loop(
    run: Run, pairs: Pairs, prepared: PreparedData, out: Path, *, log: MetricsLog, report: Report, stopped: list[int]
) -> None:
    """Step until the run is finished or asked to stop, measuring and saving on the way."""
    c = run.config.train
    held_out = pairs.validation() if c.validation else None
    loss_function = torch.compile(masked_loss) if c.compile else masked_loss
    clock, before = time.monotonic(), run.seconds
    running: Tensor | None = None
    while not run.finished():
        share = run.set_rate()
        loss = train_step(run, pairs, loss_function)
        run.step += 1
        if run.step == 1 and c.compile:  # compiling is not training: start the clock after it
            _synchronise(run.group.device)
            clock = time.monotonic()
        run.seconds = before + time.monotonic() - clock
        if c.minutes:
            run.seconds = run.group.agreed(run.seconds)
        running = loss if running is None else running.lerp(loss, 0.05)
        if run.step % 20 == 0:  # reading the loss waits for the device
            loss = run.group.total(running)  # each process has its rows' share of it
            row = {"step": run.step, "loss": float(loss), "rate": share, "seconds": round(run.seconds, 2)}
            log.write(row)
            report(row)
        # A run that is asked to stop goes on later: a validation more would count against its patience.
        asked = run.group.any(bool(stopped))
        if held_out is not None and (run.step % c.evaluate_every == 0 or run.finished()):
            figures = validate(run, held_out)
            log.write({"step": run.step, "seconds": round(run.seconds, 2), **figures})
            report(figures)
            if figures["validation_loss"] < run.best:
                run.best, run.waited = figures["validation_loss"], 0
                if run.group.leads:
                    _save_model(run, prepared, out / MODEL)
            else:
                run.waited += 1
        if asked:
            return
        if run.group.leads and run.step % c.save_every == 0:
            run.save_state(out / STATE)


def _save_model(run: Run, prepared: PreparedData, folder: Path) -> None:
    """Write the averaged weights as a model people can load."""
    c = run.config.train
    training = {
        "steps": run.step,
        "passages": run.step * c.batch_size,
        "minutes": round(run.seconds / 60, 1),
        "device": torch.cuda.get_device_name() if run.group.device.type == "cuda" else "cpu",
        "optimizer": c.optimizer,
    }
    facts = {"training": training, "data": prepared.manifest.get("sources", [])}
    weights = run.average.state_dict()
    save_checkpoint(folder, Checkpoint(run.config, weights, prepared.tokenizer, facts))


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


def open_pairs(config: Config, data: PreparedData, group: Group) -> Pairs:
    """Choose where batches come from."""
    c = config.train
    common: dict[str, Any] = {
        "batch_size": c.batch_size, "validation": c.validation, "seed": c.seed, "device": group.device,
    }  # fmt: skip
    if c.pairs == "cached":
        return CachedPairs(data, **common)
    from unembed.encoders import LocalEncoder, load_encoder

    dtype = {"dtype": "float16"} if group.device.type == "cuda" else {}
    encoder = load_encoder(config.encoder, device=str(group.device), **dtype)
    if not isinstance(encoder, LocalEncoder):
        raise UnembedError(f"{config.encoder} is not local; prepare pairs and train with --pairs cached.")
    if encoder.size != config.model.embedding_size:  # passages may be prepared by an encoder's name alone
        raise UnembedError(
            f"{config.encoder} gives vectors of {encoder.size} numbers, but embedding_size is "
            f"{config.model.embedding_size}; train with --embedding-size {encoder.size}."
        )
    return FreshSpans(data, encoder=encoder, **common)


def _check_same_run(config: Config, state: Path) -> None:
    """Refuse to resume with settings that would make it another run."""
    saved = json.loads((state / "progress.json").read_text())["config"]
    now = asdict(config)
    free = {"steps", "minutes", "patience", "save_every", "evaluate_every", "compile"}
    for section, values in now.items():
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            if name not in free and saved[section].get(name) != value:
                raise UnembedError(
                    f"the run was started with {name} = {saved[section].get(name)}, not {value}; "
                    "resume with the same settings, or start another run."
                )


class MetricsLog:
    """Lines of JSON, one a measurement; lines after the step resumed from are dropped."""

    def __init__(self, path: Path, *, last_step: int, write: bool) -> None:
        """Open the log, keeping what it says of steps up to `last_step`."""
        self.path, self.enabled = path, write
        kept = [row for row in self.rows() if row["step"] <= last_step] if path.exists() else []
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".tmp")
            draft.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(draft, path)

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        if self.enabled:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Read all lines; one that a kill cut short is dropped."""
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found


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


@contextmanager
def progress_bar(run: Run, *, show: bool) -> Iterator[Report]:
    """Give a function that shows the latest figures; without `show`, one that does nothing."""
    if not show:
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    shown: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=run.config.train.steps, completed=run.step, figures="")

        def report(row: dict[str, Any]) -> None:
            shown.update(row)
            names = [k for k in ("loss", "validation_loss", "token_f1") if k in shown]
            figures = "  ".join(f"{name.replace('_', ' ')} {shown[name]:.3f}" for name in names)
            bar.update(task, completed=run.step, figures=figures)

        yield report


def _synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: on the CPU, contiguous, sharing no memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    """Read one safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}
