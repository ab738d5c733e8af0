"""Beam search from left to right: several beginnings of each text are kept, and at last one is chosen.

A few times on the way every beginning is written out to an end, greedily, and the model guesses the vector of
what became of it: beginnings that lead to the vector given are kept before those that are merely likely, and
the texts that were written so may be chosen, too.

Knows tensors only, no text. Nothing is drawn, so the answer depends on the vector alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from unembed.candidates import Candidates
from unembed.choice import checks, judge
from unembed.crew import last_step
from unembed.looks import Seen, guess, look, promise
from unembed.revision import revise, revised_rows
from unembed.trunk import Model, is_gpu
from unembed.writer import Beginnings, Writer

BEAMS, MOST_BEAMS = 32, 128
# How often they are written out, at even distances.
LOOKS, MOST_LOOKS = 4, 8
# Rows read at once: what they keep of what they have read is what takes the memory.
ROWS = {"cpu": 512, "cuda": 8192}
_OWN = 8  # rows whose keys and values take about the room that a text's own head does

Found = TypeVar("Found", bound=Any)  # tensors of some texts: a dataclass


@torch.inference_mode()
def beam_search(
    model: Model, e: Tensor, *, beams: int, looks: int = 0, revisions: int = 0, guidance: float = 1.0
) -> Iterator[Candidates]:
    """Yield the beams after each of T steps, the last ones complete.

    Where there are too many texts for the memory, all but the last part are complete from the first step.
    Probabilities are those among the words that are looked at: all, or those of a text's shortlist. `looks`
    are of models that guess vectors, and `revisions` of those that revise; others look at nothing, and leave
    texts as they are.
    """
    looks = looks if checks(model, blind=not guidance) else 0
    revisions = revisions if getattr(model, "revises", False) and guidance == 1 else 0
    each = max(search_rows(beams, looks, revisions), _OWN)
    yield from one_by_one(
        [
            _search(model, e[part], beams=beams, looks=looks, revisions=revisions, guidance=guidance)
            for part in split_texts(e, each=each)
        ]
    )


def search_rows(beams: int, looks: int, revisions: int = 0) -> int:
    """How many rows a text takes: its beams, and as many again while these are written out.

    >>> search_rows(32, 4)
    64
    """
    return max(beams * (1 + (looks > 0)), revised_rows(revisions))


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


def _search(
    model: Model, e: Tensor, *, beams: int, looks: int, revisions: int, guidance: float
) -> Iterator[Candidates]:
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
            yield Candidates.of(writer.now)
    blind = not guidance
    found = _whole(model, e, writer.now, seen, blind=blind)
    if revisions and len(e):
        found = revise(model, e, found, rounds=revisions)
    known = found.likeness if checks(model, blind=blind) else None
    score, likeness = judge(model, e, found.ids, found.score, blind=blind, likeness=known)
    yield replace(found, likeness=likeness).sorted_by(score).first(beams)


def _whole(model: Model, e: Tensor, now: Beginnings, seen: Seen | None, *, blind: bool) -> Candidates:
    """All texts that may be chosen: those that were found, and those that were seen on the way."""
    if not (checks(model, blind=blind) and len(e)):
        return Candidates.of(now)
    if seen is None:
        last = guess(model, e, now)
        return Candidates.of(last.texts, last.likeness)
    whole = None if is_gpu(e) else seen.recall(now, *seen.begun_by(now.ids, model.config.max_tokens))
    last = guess(model, e, now, None if whole is None else whole.likeness)
    every = last.beside(seen)
    return replace(Candidates.of(every.texts, every.likeness), passes=last.texts.passes).once()
