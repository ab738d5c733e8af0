"""Lessons in revising: texts, and drafts of them that earlier weights of the same run have written.

What vectors the drafts have is asked of the encoder, so that the model may learn to tell, too.

A block of steps' drafts is written at once, and is a pure function of the teacher's weights, the seed and
the block's first step, so that a run which was killed goes on with the very lessons it would have had. It
must not know of losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.decode import fill_after_end
from unembed.edits import edited
from unembed.engine import HalfModel
from unembed.model import Review
from unembed.pairs import FreshSpans, step_generator
from unembed.rewording import compiled
from unembed.trunk import missed

REFRESH = 2_000  # steps after which the teacher learns what the run has learnt
# Rows that are written at once: a GPU takes hardly longer for many.
_ROWS = {"cpu": 64, "cuda": 8192}
# Of the drafts, those that are the text itself, to be left as it is, those that are but for some edits, and
# those that were revised once already.
_RIGHT, _EDITED, _AGAIN = 0.05, 0.2, 0.25
# Half of what is written is drawn; at 1 too much of it would be wrong to learn from.
_HEAT = 0.7
_STREAM = 2**20  # streams of draws from here on are those of lessons


@dataclass(frozen=True)
class Lesson:
    """Some texts, their vectors, and drafts that are to be revised."""

    x0: Tensor  # (B, T)
    e: Tensor  # (B, E)
    draft: Tensor  # (B, T)
    vectors: Tensor  # (B, E) of the drafts, of length one


class Teacher:
    """Writes the drafts of a run's lessons, by weights that stay as they are for a while."""

    def __init__(
        self,
        model: Any,
        pairs: FreshSpans,
        *,
        rows: int,
        share: Callable[[int], slice],
        compile: bool = False,
    ) -> None:
        """Take weights, and pairs to draw so many rows a step from, of which this process has a share."""
        self.device = next(model.parameters()).device
        self.steps = max(1, _ROWS.get(self.device.type, _ROWS["cpu"]) // rows)
        self.compile = compile
        # As many as a step has from each process, for every step of a block.
        each = share(rows)
        self.part = slice(each.start * self.steps, each.stop * self.steps)
        self.pairs = pairs.others(batch_size=rows * self.steps, seed=pairs.seed + 1)
        self.learn(model)

    def learn(self, model: Any) -> None:
        """Take over a model's weights as they are now."""
        # Half precision is enough for drafts.
        self.model = HalfModel(model) if self.device.type == "cuda" else copy.deepcopy(model)
        self._block: tuple[int, list[Lesson]] = (-1, [])

    def lesson(self, step: int) -> Lesson:
        """This process's share of the lesson of that step."""
        first = step - step % REFRESH % self.steps  # blocks begin anew with what the teacher has learnt
        if self._block[0] != first:
            self._block = (first, self._write(first))
        return self._block[1][step - first]

    @torch.no_grad()
    def _write(self, first: int) -> list[Lesson]:
        """Write the drafts of a block."""
        c = self.model.config
        x0, e = self.pairs.batch(first, self.part)
        generator = step_generator(
            self.pairs.seed, first, stream=_STREAM + self.part.start, device=self.device
        )
        u = torch.rand((2, len(x0)), generator=generator, device=self.device)
        length = ((x0 != c.end_id) & (x0 != c.pad_id)).sum(1)
        draft, _ = edited(x0, length, end_id=c.end_id, pad_id=c.pad_id, generator=generator)
        order = u[0].argsort()
        right, changed, twice = (round(share * len(x0)) for share in (_RIGHT, _EDITED, _AGAIN))
        draft = draft.index_copy(0, order[:right], x0[order[:right]])
        written = order[right + changed :]
        heat = torch.where(u[1] < 0.5, 0.0, _HEAT)
        own = self._draft(e[written], heat[written], generator)
        draft = draft.index_copy(0, written, own)
        if len(again := written[:twice]):
            own = self._draft(e[again], heat[again], generator, draft[again])
            draft = draft.index_copy(0, again, own)
        length = ((draft != c.end_id) & (draft != c.pad_id)).sum(1)
        vectors = F.normalize(self.pairs.encoder.encode_ids(draft, length).float(), dim=1)
        parts = zip(*(each.chunk(self.steps) for each in (x0, e, draft, vectors)), strict=True)
        return [Lesson(*part) for part in parts]

    def _draft(
        self, e: Tensor, heat: Tensor, generator: torch.Generator, draft: Tensor | None = None
    ) -> Tensor:
        """Write texts, anew if there are drafts."""
        choose = compiled(drawn) if self.compile else drawn
        return write(self.model, e, heat=heat, generator=generator, draft=draft, choose=choose)


def write(
    model: Any,
    e: Tensor,
    *,
    heat: Tensor | None = None,
    generator: torch.Generator | None = None,
    draft: Tensor | None = None,
    choose: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Write texts (B, T) of vectors e (B, E) from left to right, all rows to their ends.

    Greedily, but for rows with some heat, whose tokens are drawn at that temperature. With a `draft` (B, T)
    of each it is revised.
    """
    config, B = model.config, len(e)
    review: Review | None = None
    if draft is None:
        condition = model.condition(e)
    else:
        review = model.review(draft, e)
        condition = model.condition(e, miss=missed(e, review.vectors))
    cache = model.cache(condition, review)
    known = {} if review is None else {"hidden": review.hidden}
    ids = torch.full((B, config.max_tokens), config.mask_id, device=e.device)
    t = torch.ones(B, device=e.device)
    for place in range(config.max_tokens):
        where = torch.full((B, 1), place, device=e.device)
        h = model.read(ids, where, t=t, condition=condition, cache=cache, **known)[:, 0]
        logits = model.head(h)
        if heat is None:
            ids[:, place] = logits.argmax(1)
        else:
            noise = torch.rand(logits.shape, generator=generator, device=e.device)
            ids[:, place] = (choose or drawn)(logits, noise, heat)
    # What follows an end was written to no purpose.
    ended = (ids == config.end_id).cumsum(1)
    ids = ids.masked_fill(ended - (ids == config.end_id).long() > 0, config.mask_id)
    return fill_after_end(ids, config)


def drawn(logits: Tensor, noise: Tensor, heat: Tensor) -> Tensor:
    """Draw a token for each row of logits (B, V) at temperatures heat (B,), by uniforms (B, V)."""
    gumbel = -(-noise.clamp_min(1e-20).log()).clamp_min(1e-20).log()
    return (logits.float() + heat[:, None] * gumbel).argmax(1)
