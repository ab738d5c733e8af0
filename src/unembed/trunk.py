"""A model's trunk as decoding asks it: for some rows, in the passes that guidance wants, a place at a time.

Knows tensors and what a GPU must not be made to wait for. It must not know of strategies or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import ModelConfig

# Logits held at once: on a CPU about what its caches hold, on a GPU what bounds the memory.
_HEAD_ROOM = {"cpu": 2**23, "cuda": 2**28}
_PICK_ROOM = {"cpu": 2**20, "cuda": 2**28}


class Model(Protocol):
    """What decoding needs of a model.

    One that also has `condition(e, drop=...)` is asked once for all that depends on the vectors
    alone, a tuple of tensors (B, ...), and given it back as `hidden(..., condition=...)`. One that also
    has `cache` and `read` is asked, left to right, for a place at a time: see `model.Denoiser`. One that
    `hears` tells a text's words, in any order, from the vectors alone: `head(gist(e))`; if it also has
    `head_for(words)`, a head for some words alone, beams on a CPU look at a text's likeliest words only. One
    that `embeds` guesses the vectors of whole texts: `embed(ids)`.
    """

    config: ModelConfig

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        """Final hidden states."""
        ...

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states."""
        ...


class Speaks(Protocol):
    """What makes logits of hidden states: a model, or a head for some of its words."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Logits of hidden states."""
        ...


@dataclass(frozen=True)
class Trunk:
    """A model's trunk and the vectors of some rows, one condition for each pass of a step."""

    model: Model
    e: Tensor
    drops: tuple[Tensor, ...]  # (B,) each: who does not see the vector in that pass
    conditions: tuple[tuple[Tensor, ...], ...]  # one a pass, if the model can work it out beforehand
    causal: bool = False
    caches: tuple[list[Tensor], ...] = ()  # one a pass, a tensor a layer, if rows are read a place at a time

    @staticmethod
    def of(model: Model, e: Tensor, *, guidance: float, causal: bool = False) -> Trunk:
        """Prepare the passes that guidance asks for: the null condition's first, if it is among them."""
        blind = [True] * (guidance != 1) + [False] * (guidance != 0)
        drops = tuple(torch.full((len(e),), dropped, device=e.device) for dropped in blind)
        condition = getattr(model, "condition", None)
        conditions = () if condition is None else tuple(condition(e, drop=drop) for drop in drops)
        return Trunk(model, e, drops, conditions, causal)

    def take(self, rows: Tensor) -> Trunk:
        """Return the trunk of some of the rows. It takes over what this one keeps: ask this one no more."""
        self._change_kept(lambda kept: kept.index_select(0, rows))
        return replace(self._without_caches(rows), caches=self.caches)

    def copy(self, rows: Tensor) -> Trunk:
        """Return the trunk of some of the rows, which keeps for itself what this one has kept so far."""
        caches = tuple([kept.index_select(0, rows) for kept in cache] for cache in self.caches)
        return replace(self._without_caches(rows), caches=caches)

    def _without_caches(self, rows: Tensor) -> Trunk:
        """Return the trunk of some of the rows, which keeps nothing."""
        conditions = tuple(tuple(part.index_select(0, rows) for part in parts) for parts in self.conditions)
        drops = tuple(drop[rows] for drop in self.drops)
        return Trunk(self.model, self.e[rows], drops, conditions, self.causal)

    def hidden(self, ids: Tensor, t: Tensor) -> list[Tensor]:
        """Final hidden states (B * T, D) of each pass."""
        known: list[dict[str, Any]] = [{"condition": c} for c in self.conditions] or [{}] * len(self.drops)
        more = {"causal": torch.ones_like(self.drops[0])} if self.causal else {}
        passes = zip(self.drops, known, strict=True)
        return [self.model.hidden(ids, self.e, t=t, drop=d, **k, **more).flatten(0, 1) for d, k in passes]

    def begin(self, ids: Tensor, t: Tensor) -> Trunk:
        """Return the trunk with what stands in front of the masks read, if it is to be read but once.

        It is not where the model keeps nothing, or where something behind a mask is known: that would have
        to be read again.
        """
        if not self.causal or not self.conditions or getattr(self.model, "read", None) is None:
            return self
        model: Any = self.model
        masked = ids == model.config.mask_id
        behind = masked.cumsum(1) > 0
        known, before = Count(behind & ~masked), Count(~behind & masked.any(1, keepdim=True))
        if known.read():
            return self
        trunk = replace(self, caches=tuple(list(model.cache(condition)) for condition in self.conditions))
        if before.read():
            # Whole rows: were they cut after the longest beginning, its length would change last bits.
            trunk.read(ids, t, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        return trunk

    def room(self, places: int) -> Trunk:
        """Return the trunk with room for so many places, if it keeps what it reads; the rest is lost."""
        more = [places - kept.shape[2] for caches in self.caches for kept in caches[:1]]
        if any(more):
            self._change_kept(lambda kept: F.pad(kept, (0, 0, 0, more[0])))
        return self

    def _change_kept(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what is kept a layer at a time: all of the old beside all of the new is twice the memory."""
        for cache in self.caches:
            for layer, kept in enumerate(cache):
                cache[layer] = change(kept)

    def read(self, ids: Tensor, t: Tensor, where: Tensor) -> list[Tensor]:
        """Final hidden states (B * N, D) of each pass at places (B, N); all before them have been read."""
        model: Any = self.model
        passes = zip(self.conditions, self.caches, strict=True)
        return [model.read(ids, where, t=t, condition=c, cache=k).flatten(0, 1) for c, k in passes]


class Count:
    """How many are true, which a GPU may still be working out; `read` waits for that and no more."""

    def __init__(self, true: Tensor) -> None:
        """Start counting."""
        self._value = true.sum().to("cpu", non_blocking=True)  # into pinned memory, without a wait
        self._done = torch.cuda.Event() if true.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> int:
        """Return the number."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._value)


def is_gpu(e: Tensor) -> bool:
    """Whether the host runs ahead of the device."""
    return e.is_cuda


def next_batch(left: int, have: int, *, gpu: bool) -> int:
    """How many rows to go on with when `left` of those at hand are not done.

    A CPU drops each row that is done. A GPU hardly minds them, and few sizes mean few shapes: it
    halves the batch when it can.
    """
    if not gpu or not left:
        return left
    while left <= have // 2:
        have //= 2
    return have


def logit_parts(model: Model, hidden: list[Tensor], *, guidance: float) -> Iterator[tuple[slice, Tensor]]:
    """Logits (n, V) of hidden states (N, D), some rows at a time: which rows, and theirs; once if N is 0."""
    device, V = hidden[0].device.type, model.config.vocab_size
    head_rows, pick_rows = (max(1, room.get(device, 2**23) // V) for room in (_HEAD_ROOM, _PICK_ROOM))
    for first in range(0, max(1, len(hidden[0])), head_rows):
        logits = guided_logits(model, [h[first : first + head_rows] for h in hidden], guidance=guidance)
        for some in logits.split(pick_rows):
            yield slice(first, first + len(some)), some
            first += len(some)


def guided_logits(model: Speaks, hidden: list[Tensor], *, guidance: float) -> Tensor:
    """Logits (N, V) of hidden states, moved away from the null condition's, which come first, by guidance."""
    if len(hidden) == 1:
        return model.head(hidden[0])
    free, given = (model.head(h).float() for h in hidden)
    # Where both are -inf, at [MASK] for one, their difference is no number.
    return (free + guidance * (given - free)).nan_to_num_(
        nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")
    )
