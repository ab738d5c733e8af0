"""Beam search from left to right: several beginnings of each text are kept, and at last one is chosen.

Knows tensors only, no text. Nothing is drawn, so the answer depends on the vector alone. As in `decode`
the host does not wait for a GPU: how many rows are left it reads a step late. On a CPU a text is made of the
words of its `shortlist`, if the model can make one: rows stand there text by text, each text's with a head of
its own. On a GPU they do not, and the whole vocabulary takes little of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from unembed.choice import checks, judge
from unembed.config import ModelConfig
from unembed.crew import last_step
from unembed.diffusion import chosen_places
from unembed.shortlist import Shortlist, shortlists
from unembed.trunk import Count, Model, Trunk, guided_logits, is_gpu, logit_parts, next_batch

# A text's log-likelihood falls with every token, so that by it alone short texts win; divided by the number
# of tokens, long ones do. Between the two lies what recovers most.
LENGTH_POWER = 0.8
BEAMS, MOST_BEAMS = 64, 128
# Rows read at once: what they keep of what they have read is what takes the memory.
ROWS = {"cpu": 512, "cuda": 8192}
_OWN = 8  # rows whose keys and values take about the room that a text's own head does
_BLOCK = 8  # places by which the room for it grows: the fewer, the less is copied to no avail

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


@torch.inference_mode()
def beam_search(model: Model, e: Tensor, *, beams: int, guidance: float = 1.0) -> Iterator[Beams]:
    """Yield the beams after each of T steps, the last ones complete.

    Where there are too many texts for the memory, all but the last part are complete from the first step.
    Probabilities are those among the words that are looked at: all, or those of a text's shortlist.
    """
    parts = split_texts(e, each=max(beams, _OWN))
    yield from one_by_one([_search(model, e[part], beams=beams, guidance=guidance) for part in parts])


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


@dataclass(frozen=True)
class _State:
    """The beams of some texts, in no order of lengths: the likeliest first."""

    ids: Tensor  # (B, K, T)
    confidence: Tensor  # (B, K, T)
    likelihood: Tensor  # (B, K), logarithm
    tokens: Tensor  # (B, K), with the end
    done: Tensor  # (B, K)
    passes: Tensor  # (B,)

    @staticmethod
    def of(rows: int, beams: int, config: ModelConfig, *, device: torch.device) -> _State:
        """Begin with one empty text each; the other beams are impossible, and as such done."""
        shape = rows, beams
        others = torch.arange(beams, device=device).expand(shape) > 0
        return _State(
            torch.full((*shape, config.max_tokens), config.mask_id, device=device),
            torch.zeros((*shape, config.max_tokens), device=device),
            torch.zeros(shape, device=device).masked_fill(others, float("-inf")),
            torch.zeros(shape, dtype=torch.long, device=device),
            others,
            torch.zeros(rows, dtype=torch.long, device=device),
        )

    def ranked(self) -> Beams:
        """Sort the beams by likelihood and length."""
        score = self.likelihood / self.tokens.clamp_min(1) ** LENGTH_POWER
        unknown = torch.full_like(score, torch.nan)
        return Beams(self.ids, self.confidence, score, self.passes, unknown).sorted_by(score)


def _search(model: Model, e: Tensor, *, beams: int, guidance: float) -> Iterator[Beams]:
    """Search for texts that are few enough to be read at once."""
    T, gpu = model.config.max_tokens, is_gpu(e)
    now = _State.of(len(e), beams, model.config, device=e.device)
    trunk = Trunk.of(model, e, guidance=guidance, causal=True)
    trunk = trunk.begin(now.ids[:, 0], torch.ones_like(e[:, 0])).room(min(_BLOCK, T))
    lists = None if gpu else shortlists(model, e, blind=not guidance)
    rows = torch.arange(len(e), device=e.device) * beams  # which of all texts' beams the trunk's rows are
    counts: list[Count] = []
    found = now.ranked()
    for place in range(T):
        if len(rows):
            gains, tokens = _likeliest(trunk, now, rows, place, lists, guidance=guidance)
            now, parents = _extend(now, gains, tokens, place, config=model.config, each=len(trunk.drops))
            found = now.ranked()
            # A CPU goes on with the beams that have not ended. A GPU's number is a step old and must not
            # have grown since: an ended beam may give way to one that goes on, but not in a text all of
            # whose beams have ended.
            ended = now.done.all(1, keepdim=True).expand_as(now.done) if gpu else now.done
            counts.append(Count(~ended))
        if place + 1 == T:
            score, likeness = judge(model, e, found.ids, found.score, blind=not guidance)
            passes = found.passes + beams * checks(model, blind=not guidance)
            found = replace(found, passes=passes, likeness=likeness).sorted_by(score)
        yield found
        if len(rows) and place + 1 < T:
            have = len(rows) if place else ended.numel()
            left = have if gpu and not place else counts[-2 if gpu else -1].read()
            stay = chosen_places(~ended, next_batch(left, have, gpu=gpu))
            row_of = torch.zeros_like(parents).scatter(0, rows, torch.arange(len(rows), device=e.device))
            # Room for as many places as are read, or a few more, else most of what is copied is empty.
            trunk = trunk.take(row_of[parents[stay]]).room(min(T, (place + 1) // _BLOCK * _BLOCK + _BLOCK))
            rows = stay


def _likeliest(
    trunk: Trunk, now: _State, rows: Tensor, place: int, lists: list[Shortlist] | None, *, guidance: float
) -> tuple[Tensor, Tensor]:
    """The K likeliest tokens at a place, (B * K, K), and their log-probabilities; -inf but for some rows."""
    ids = now.ids.flatten(0, 1)[rows]
    beams, t = now.done.shape[1], torch.ones(len(rows), device=ids.device)
    if trunk.caches:
        hidden = trunk.read(ids, t, torch.full_like(ids[:, :1], place))
    else:
        hidden = [h.unflatten(0, ids.shape)[:, place] for h in trunk.hidden(ids, t)]
    best = []
    if lists is None:
        for _, logits in logit_parts(trunk.model, hidden, guidance=guidance):
            best.append(_top(logits, beams))
    else:
        counts = torch.bincount(rows // beams, minlength=len(lists)).tolist()
        for some, *states in zip(lists, *(h.split(counts) for h in hidden), strict=True):
            gains, which = _top(guided_logits(some, states, guidance=guidance), beams)
            best.append((gains, some.words[which]))
    gains, tokens = map(torch.cat, zip(*best, strict=True))
    shape = now.done.numel(), gains.shape[1]
    return (
        torch.full(shape, float("-inf"), device=ids.device).index_copy(0, rows, gains),
        torch.zeros(shape, dtype=torch.long, device=ids.device).index_copy(0, rows, tokens),
    )


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the likeliest of each row of logits (n, V), and which they are, (n, count)."""
    top, which = logits.topk(min(count, logits.shape[1]), dim=1)
    return top.float() - logits.float().logsumexp(1, keepdim=True), which


def _extend(
    now: _State, gains: Tensor, tokens: Tensor, place: int, *, config: ModelConfig, each: int
) -> tuple[_State, Tensor]:
    """Keep the K likeliest of all beams with all their tokens; and which beam each comes from, (B * K,).

    An ended beam stands beside them as it is, followed by padding that costs nothing.
    """
    B, K = now.done.shape
    count = gains.shape[1]
    free = torch.zeros(count, device=gains.device).masked_fill(
        torch.arange(count, device=gains.device) > 0, float("-inf")
    )
    gains = torch.where(now.done[..., None], free, gains.view(B, K, count))
    tokens = tokens.view(B, K, count).masked_fill(now.done[..., None], config.pad_id)
    likelihood, chosen = (now.likelihood[..., None] + gains).flatten(1).topk(K, dim=1)
    parent = chosen // count
    ended = now.done.gather(1, parent)
    token = tokens.flatten(1).gather(1, chosen)
    token = token.masked_fill(likelihood.isneginf(), config.end_id)  # fewer texts than beams: these are none
    where = parent[..., None].expand_as(now.ids)
    ids, confidence = now.ids.gather(1, where), now.confidence.gather(1, where)
    ids[..., place] = token
    confidence[..., place] = gains.flatten(1).gather(1, chosen).exp().masked_fill(ended, 0.0)
    done = ended | (token == config.end_id)
    behind = torch.arange(ids.shape[2], device=ids.device) > place
    state = _State(
        ids.masked_fill_(done[..., None] & behind, config.pad_id),
        confidence,
        likelihood,
        now.tokens.gather(1, parent) + ~ended,
        done,
        now.passes + each * (~now.done).sum(1),
    )
    return state, (parent + torch.arange(0, B * K, K, device=parent.device)[:, None]).flatten()
