"""Several texts of each vector, or beginnings of texts, and what is known of them.

Knows tensors only, no text, nor how they were found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unembed.choice import LENGTH_POWER
from unembed.writer import Beginnings

OF_TEXTS = ("ids", "confidence", "score", "likeness")  # what a text has of its own


@dataclass(frozen=True)
class Candidates:
    """K texts of each vector, sorted: the best first."""

    ids: Tensor  # (B, K, T), masked where nothing is decided
    confidence: Tensor  # (B, K, T), probability of each token; 0 where masked or behind the end
    score: Tensor  # (B, K), what they are sorted by, at last by `choice`; -inf if there are no more texts
    passes: Tensor  # (B,) rows read so far
    likeness: Tensor  # (B, K), of whole texts, as `choice` guesses it; NaN before that, or where it does not

    @staticmethod
    def of(texts: Beginnings, likeness: Tensor | None = None) -> Candidates:
        """Sort what was written by likelihood and length."""
        score = texts.likelihood / texts.tokens.clamp_min(1) ** LENGTH_POWER
        likeness = torch.full_like(score, torch.nan) if likeness is None else likeness
        return Candidates(texts.ids, texts.confidence, score, texts.passes, likeness).sorted_by(score)

    def sorted_by(self, score: Tensor) -> Candidates:
        """Put the best by that score (B, K) first, and keep it."""
        score, order = score.sort(dim=1, descending=True, stable=True)
        return replace(self.take(order), score=score)

    def take(self, which: Tensor) -> Candidates:
        """Return some of each vector's texts, (B, N) of them."""
        where = which[..., None].expand(-1, -1, self.ids.shape[2])
        return Candidates(
            self.ids.gather(1, where),
            self.confidence.gather(1, where),
            self.score.gather(1, which),
            self.passes,
            self.likeness.gather(1, which),
        )

    def first(self, count: int) -> Candidates:
        """Return the first so many of each vector."""
        kept = {name: getattr(self, name)[:, :count] for name in OF_TEXTS}
        return replace(self, **kept)

    def beside(self, other: Candidates) -> Candidates:
        """Join texts of the same vectors, unsorted."""
        both = {name: torch.cat((getattr(self, name), getattr(other, name)), 1) for name in OF_TEXTS}
        return Candidates(**both, passes=self.passes + other.passes)

    def once(self) -> Candidates:
        """Let a text count once: there are no more where one stands before."""
        return replace(self, score=self.score.masked_fill(repeats(self.ids), -torch.inf))


def repeats(ids: Tensor) -> Tensor:
    """Which of the texts ids (B, K, T) stand before among them, (B, K)."""
    same = torch.stack([(ids == ids[:, k, None]).all(2) for k in range(ids.shape[1])], 1)
    return same.tril(-1).any(2)
