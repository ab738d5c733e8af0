"""Where beginnings lead: each is written out to an end, greedily, and the vector of that text guessed.

What a model finds likely errs far more often than its guesses of whole texts' vectors do, but of a beginning
there is no guess. Knows tensors only, no text, nor what becomes of the beginnings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from unembed.choice import LENGTH_POWER, recognise
from unembed.writer import Beginnings, Writer

# How much the likeness of a text counts for what it began with: half of what it counts between whole texts,
# since another text may come of it.
PROMISE = 50.0


@dataclass(frozen=True)
class Seen:
    """Whole texts that beginnings have led to, N of each vector, and what is guessed of them."""

    texts: Beginnings  # (B, N, ...)
    likeness: Tensor  # (B, N)

    def beside(self, other: Seen) -> Seen:
        """Join what was seen of the same vectors."""
        pairs = {
            f.name: (getattr(self.texts, f.name), getattr(other.texts, f.name)) for f in fields(Beginnings)
        }
        joined = {name: a + b if name == "passes" else torch.cat((a, b), 1) for name, (a, b) in pairs.items()}
        return Seen(Beginnings(**joined), torch.cat((self.likeness, other.likeness), 1))

    def begun_by(self, ids: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Which of beginnings ids (B, K, T) of so many tokens led to a text here, and to which, (B, K) each.

        Written on greedily, the same beginning leads to the same text.
        """
        same = (self.texts.ids[:, None, :, :place] == ids[:, :, None, :place]).all(3)
        return same.any(2), same.int().argmax(2)

    def recall(self, other: Beginnings, known: Tensor, which: Tensor) -> Seen:
        """Put texts in the place of others that are `known` (B, K); of the rest the likeness is NaN."""

        def pick(ours: Tensor, others: Tensor) -> Tensor:
            if ours.dim() == 2:
                return torch.where(known, ours.gather(1, which), others)
            places = which[..., None].expand(-1, -1, ours.shape[2])
            return torch.where(known[..., None], ours.gather(1, places), others)

        names = ("ids", "confidence", "likelihood", "tokens")
        texts = replace(
            other, **{name: pick(getattr(self.texts, name), getattr(other, name)) for name in names}
        )
        return Seen(texts, pick(self.likeness, torch.full_like(other.likelihood, torch.nan)))


def look(writer: Writer, e: Tensor, place: int, seen: Seen | None) -> Seen:
    """Write all beginnings of so many tokens out to an end, but for those whose end was seen before."""
    model, now = writer.trunk.model, writer.now
    rows, recalled = torch.arange(len(writer.rows), device=e.device), None
    if seen is not None:
        recalled = known, _ = seen.begun_by(now.ids, place)
        now = replace(now, done=now.done | known)
        rows = (~known).flatten()[writer.rows].nonzero()[:, 0]
    alone = writer.alone(now, rows)
    for ahead in range(place, model.config.max_tokens):
        if len(alone.rows):
            alone = alone.step(ahead)
    texts = alone.now.together(len(e))
    if seen is None or recalled is None:
        return guess(model, e, texts)
    whole = seen.recall(texts, *recalled)
    return guess(model, e, whole.texts, whole.likeness)


def guess(model: Any, e: Tensor, texts: Beginnings, known: Tensor | None = None) -> Seen:
    """Guess the likeness of whole texts to the vectors e (B, E), a pass each, but where it is `known`."""
    likeness = recognise(model, e, texts.ids, known=known)
    assert likeness is not None
    new = torch.ones_like(texts.done) if known is None else known.isnan()
    return Seen(replace(texts, passes=texts.passes + new.sum(1)), likeness)


def promise(seen: Seen) -> Tensor:
    """What the texts that they led to speak for beginnings, (B, K).

    The likelihood of whole texts is divided by their length: here it is not yet.
    """
    length = seen.texts.tokens.float().mean(1, keepdim=True) ** LENGTH_POWER
    return PROMISE * length * seen.likeness
