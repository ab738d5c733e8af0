"""Small models that read left to right, what they may go on from, and what watches how they are asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unembed.config import ModelConfig
from unembed.decode import Draft
from unembed.model import Denoiser
from unembed.trunk import Count

T, V, E = 10, 40, 4
PAD, END, MASK = 0, 1, 2
CONFIG = ModelConfig(
    layers=1, hidden=16, heads=2, ffn=32, max_tokens=T, vocab_size=V, mask_id=MASK, end_id=END, pad_id=PAD,
    embedding_size=E, adaln_rank=0,
)  # fmt: skip


class NoQuestions(TorchDispatchMode):
    """Refuse what would make the host wait for a device: numbers, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if masks or name in ("nonzero", "masked_select", "_local_scalar_dense", "lift_fresh", "unique"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class Told(Count):
    """A count that may be read all the same."""

    def read(self) -> int:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().read()


def causal_model(**changes: Any) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(dataclasses.replace(CONFIG, causal=True, **changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        model.bias[END] += 2.0  # else no text of a random model ends
    return model


class Forgetful:
    """A model that keeps nothing of what it has read, and counts places and rows that go through it."""

    def __init__(self, model: Denoiser) -> None:
        self.config, self.head, self.model, self.places = model.config, model.head, model, 0
        self.embed, self.embeds = model.embed, model.embeds
        self.rows = list[int]()  # of each pass

    def hidden(self, xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        self.places += xt.numel()
        self.rows.append(len(xt))
        return self.model.hidden(xt, e, **known)


class Attentive(Forgetful):
    """The same, but one that reads a place at a time."""

    def __init__(self, model: Denoiser) -> None:
        super().__init__(model)
        self.condition, self.cache = model.condition, model.cache

    def read(self, xt: Tensor, where: Tensor, **known: Any) -> Tensor:
        self.places += where.numel()
        self.rows.append(len(xt))
        return self.model.read(xt, where, **known)


def beginnings(rows: int, lengths: list[int]) -> Draft:
    """Begin rows with so many random words, in turn; masks behind."""
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(3, V, (rows, T), generator=draw)
    known = torch.arange(T) < torch.tensor(lengths).repeat(rows)[:rows, None]
    sure = torch.rand((rows, T), generator=draw)
    return Draft(
        torch.where(known, words, MASK),
        torch.where(known, sure, 0.0),
        torch.arange(rows),
        torch.full((rows,), torch.nan),
    )
