"""A training run and the processes that share it: weights, average, optimisers, and their saved state.

Knows how a step is applied and how a run is written down and taken up again. It must not know of data,
losses or when to stop for what.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unembed.backbone import build
from unembed.checkpoint import find_checkpoint, load_checkpoint, load_into
from unembed.config import Config, ModelConfig
from unembed.optimizers import build_optimizers, rate_at
from unembed.whole import whole_folder


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

    def __init__(
        self,
        config: Config,
        *,
        group: Group,
        start_from: str | Path | None = None,
        network: Callable[[ModelConfig], nn.Module] | None = None,
        data: str | None = None,
    ) -> None:
        """Build everything fresh, or from the weights of an earlier model; `data` is the hash of its data."""
        self.config, self.group, self.data = config, group, data
        torch.manual_seed(config.train.seed)
        model = network(config.model) if network else build(config.model, pretrained=start_from is None)
        if start_from is not None:
            _begin_with(start_from, model, config)
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

    @torch.no_grad()  # else the average would remember every step
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

    def is_finite(self) -> bool:
        """Whether every weight is a number still."""
        return all(bool(weights.isfinite().all()) for weights in self.model.parameters())

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
            progress = {
                "step": self.step,
                "seconds": self.seconds,
                "waited": self.waited,
                "best": None if self.best == float("inf") else self.best,
                "data": self.data,
                "config": asdict(self.config),
            }
            (draft / "progress.json").write_text(json.dumps(progress))

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


def _begin_with(start_from: str | Path, model: nn.Module, config: Config) -> None:
    """Copy an earlier model's weights; where it reads another encoder, what reads the vector stays fresh."""
    start = load_checkpoint(find_checkpoint(start_from))
    weights = dict(start.weights)
    if config.model.causal:  # weights that have never read left to right may learn it
        weights.setdefault("shifted", torch.zeros(config.model.hidden))
    own = model.state_dict()
    weights = _grown(weights, own)
    sizes = start.config.model.embedding_size, config.model.embedding_size
    # What reads vectors and what guesses them is of no use for another encoder.
    other = start.config.encoder != config.encoder or sizes[0] != sizes[1]
    news = other or start.config.model.embeds != config.model.embeds
    fresh = ("projection.w1.",) * other + ("vector.", "whole") * news
    weights = {name: known for name, known in weights.items() if not name.startswith(fresh)}
    weights |= {name: own[name] for name in own if name.startswith(fresh)}
    if news and config.model.embeds:  # what the model does without a vector is where guessing one begins
        weights["whole"] = weights["projection.null"].clone()
    load_into(model, weights, source=str(start_from))


def _grown(weights: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for AdaLN maps of a higher rank or with a diagonal: what is new does nothing at first."""
    grown = dict(weights)
    for name, fresh in own.items():
        known = weights.get(name)
        if name.endswith("modulation.diagonal") and known is None:
            grown[name] = torch.zeros_like(fresh)
        elif name.endswith("modulation.down.weight") and known is not None:
            grown[name] = torch.cat((known, fresh[len(known) :]))
        elif name.endswith("modulation.up.weight") and known is not None:
            grown[name] = F.pad(known, (0, max(0, fresh.shape[1] - known.shape[1])))
    return grown


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: on the CPU, contiguous, sharing no memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    """Read one safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}
