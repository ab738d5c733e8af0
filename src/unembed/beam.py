"""Beam search from left to right: several beginnings of each text are kept, and at last one is chosen.

A few times on the way every beginning is written out to an end, greedily, and the model guesses the vector of
what became of it: beginnings that lead to the vector given are kept before those that are merely likely, and
the texts that were written so may be chosen, too.

Knows tensors only, no text. Nothing is drawn, so the answer depends on the vector alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from unembed.choice import LENGTH_POWER, checks, judge
from unembed.crew import last_step
from unembed.looks import Seen, guess, look, promise
from unembed.trunk import Model, is_gpu
from unembed.writer import Beginnings, Writer

BEAMS, MOST_BEAMS = 32, 128
# How often they are written out, at even distances.
LOOKS, MOST_LOOKS = 4, 8
# Rows read at once: what they keep of what they have read is what takes the memory.
ROWS = {"cpu": 512, "cuda": 8192}
_OWN = 8  # rows whose keys and values take about the room that a text's own head does

Found = TypeVar("Found", bound=Any)  # tensors of some texts: a dataclass


@dataclass(frozen=True)
class Beams:
    """The beginnings kept of each text after a step, the best first; at last, whole texts."""

    ids: Tensor  # (B, K, T), masked where nothing is decided
    confidence: Tensor  # (B, K, T), probability of each token; 0 where masked or behind the end
    score: Tensor  # (B, K), what they are sorted by, at last by `choice`; -inf if there are no more texts
    passes: Tensor  # (B,) rows read so far
    likeness: Tensor  # (B, K), of whole texts, as `choice` guesses it; NaN before that, or where it does not

    def sorted_by(self, score: Tensor) -> Beams:
        """Put the best by that score (B, K) first."""
        score, order = score.sort(dim=1, descending=True, stable=True)
        where = order[..., None].expand_as(self.ids)
        return Beams(
            self.ids.gather(1, where),
            self.confidence.gather(1, where),
            score,
            self.passes,
            self.likeness.gather(1, order),
        )

    def first(self, count: int) -> Beams:
        """Return the first so many of each text."""
        kept = {name: getattr(self, name)[:, :count] for name in OF_TEXTS}
        return replace(self, **kept)


OF_TEXTS = ("ids", "confidence", "score", "likeness")  # what a text has of its own


@torch.inference_mode()
def beam_search(
    model: Model, e: Tensor, *, beams: int, looks: int = 0, guidance: float = 1.0
) -> Iterator[Beams]:
    """Yield the beams after each of T steps, the last ones complete.

    Where there are too many texts for the memory, all but the last part are complete from the first step.
    Probabilities are those among the words that are looked at: all, or those of a text's shortlist. `looks`
    are of models that guess vectors; others look at nothing.
    """
    looks = looks if checks(model, blind=not guidance) else 0
    each = max(search_rows(beams, looks), _OWN)
    yield from one_by_one(
        [
            _search(model, e[part], beams=beams, looks=looks, guidance=guidance)
            for part in split_texts(e, each=each)
        ]
    )


def search_rows(beams: int, looks: int) -> int:
    """How many rows a text takes: its beams, and as many again while these are written out.

    >>> search_rows(32, 4)
    64
    """
    return beams * (1 + (looks > 0))


def look_places(looks: int, length: int) -> list[int]:
    """After how many tokens beginnings are written out, of texts of up to so many.

    >>> look_places(4, 32)
    [6, 13, 19, 26]
    """
    return [place for place in (round(length * i / (looks + 1)) for i in range(1, looks + 1)) if place]


def split_texts(e: Tensor, *, each: int) -> list[slice]:
    """Part the texts of vectors e, each so many rows, so that no part has more rows than are read at once."""
    most = max(1, ROWS.get(e.device.type, ROWS["cpu"]) // each)
    return [slice(first, first + most) for first in range(0, max(1, len(e)), most)]


def one_by_one(parts: Sequence[Iterator[Found]]) -> Iterator[Found]:
    """Run all parts but the last to their ends, then yield its steps, each with what the others found."""
    done = [last_step(part) for part in parts[:-1]]
    for found in parts[-1]:
        every = [*done, found]
        yield (
            type(found)(*(torch.cat([getattr(x, f.name) for x in every]) for f in fields(found)))
            if done
            else found
        )


def _search(model: Model, e: Tensor, *, beams: int, looks: int, guidance: float) -> Iterator[Beams]:
    """Search for texts that are few enough to be read at once."""
    T = model.config.max_tokens
    writer = Writer.of(model, e, each=beams, guidance=guidance)
    places, seen = look_places(looks, T), None
    for place in range(T):
        if len(writer.rows) and place in places:
            # A GPU is not asked what it has seen: it sooner looks again than its host waits.
            ends = look(writer, e, place, None if is_gpu(e) else seen)
            passes = writer.now.passes + ends.texts.passes
            writer = replace(writer, now=replace(writer.now, promise=promise(ends), passes=passes))
            seen = ends if seen is None else seen.beside(ends)
        if len(writer.rows):
            writer = writer.step(place)
        if place + 1 < T:
            yield _as_beams(writer.now)
    yield _choose(model, e, writer.now, seen, blind=not guidance)


def _as_beams(texts: Beginnings, likeness: Tensor | None = None) -> Beams:
    """Sort beginnings by likelihood and length."""
    score = texts.likelihood / texts.tokens.clamp_min(1) ** LENGTH_POWER
    likeness = torch.full_like(score, torch.nan) if likeness is None else likeness
    return Beams(texts.ids, texts.confidence, score, texts.passes, likeness).sorted_by(score)


def _choose(model: Model, e: Tensor, now: Beginnings, seen: Seen | None, *, blind: bool) -> Beams:
    """Choose between the texts that were found and those that were seen on the way: the best of all."""
    guesses = checks(model, blind=blind) and len(e) > 0
    found = _guessed(model, e, now, seen) if guesses else _as_beams(now)
    known = found.likeness if guesses else None
    score, likeness = judge(model, e, found.ids, found.score, blind=blind, likeness=known)
    return replace(found, likeness=likeness).sorted_by(score).first(now.done.shape[1])


def _guessed(model: Model, e: Tensor, now: Beginnings, seen: Seen | None) -> Beams:
    """Join what was found and what was seen, each text once, with guesses of all."""
    known = None
    if seen is not None and not is_gpu(e):
        known = seen.recall(now, *seen.begun_by(now.ids, model.config.max_tokens)).likeness
    last = guess(model, e, now, known)
    every = last if seen is None else last.beside(seen)
    found = _as_beams(every.texts, every.likeness)
    once = found.score.masked_fill(_repeats(found.ids), -torch.inf)
    return replace(found, passes=last.texts.passes, score=once)


def _repeats(ids: Tensor) -> Tensor:
    """Which of the texts ids (B, K, T) stand before among them, (B, K)."""
    same = torch.stack([(ids == ids[:, k, None]).all(2) for k in range(ids.shape[1])], 1)
    return same.tril(-1).any(2)
