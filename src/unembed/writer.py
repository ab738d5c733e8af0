"""Beginnings of texts, several of each, written on from left to right, a token at a time.

Knows tensors only, no text, nor what the beginnings are for. As in `decode` the host does not wait for a
GPU: how many rows are left it reads a step late. On a CPU a text is made of the words of its `shortlist`, if
the model can make one: rows stand there text by text, each text's with a head of its own. On a GPU they do
not, and the whole vocabulary takes little of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from unembed.config import ModelConfig
from unembed.diffusion import chosen_places
from unembed.shortlist import Shortlist, shortlists
from unembed.trunk import Count, Model, Trunk, guided_logits, is_gpu, logit_parts, next_batch

_BLOCK = 8  # places by which the room for what is read grows: the fewer, the less is copied to no avail


@dataclass(frozen=True)
class Beginnings:
    """Several beginnings of each text, some of them whole: the most promising first."""

    ids: Tensor  # (B, K, T)
    confidence: Tensor  # (B, K, T)
    likelihood: Tensor  # (B, K), logarithm
    tokens: Tensor  # (B, K), with the end
    done: Tensor  # (B, K)
    promise: Tensor  # (B, K), what speaks for it besides its likelihood
    passes: Tensor  # (B,)

    @staticmethod
    def of(rows: int, beams: int, config: ModelConfig, *, device: torch.device) -> Beginnings:
        """Begin with one empty text each; the others are impossible, and as such done."""
        shape = rows, beams
        others = torch.arange(beams, device=device).expand(shape) > 0
        return Beginnings(
            torch.full((*shape, config.max_tokens), config.mask_id, device=device),
            torch.zeros((*shape, config.max_tokens), device=device),
            torch.zeros(shape, device=device).masked_fill(others, float("-inf")),
            torch.zeros(shape, dtype=torch.long, device=device),
            others,
            torch.zeros(shape, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
        )

    def alone(self) -> Beginnings:
        """Each as the only one of a text of its own, whose passes are none so far."""
        shaped = {f.name: getattr(self, f.name).flatten(0, 1)[:, None] for f in fields(self)[:-1]}
        return Beginnings(**shaped, passes=torch.zeros_like(self.tokens).flatten())

    def together(self, texts: int) -> Beginnings:
        """Undo `alone`: those of so many texts, and the passes that all of a text's took."""
        shaped = {f.name: getattr(self, f.name)[:, 0].unflatten(0, (texts, -1)) for f in fields(self)[:-1]}
        return Beginnings(**shaped, passes=self.passes.view(texts, -1).sum(1))


@dataclass(frozen=True)
class Writer:
    """Beginnings that are being written, and what reads them."""

    now: Beginnings
    trunk: Trunk
    rows: Tensor  # which of all texts' beginnings the trunk's rows are
    lists: list[Shortlist] | None
    guidance: float
    left: Count | None = None  # how many were to go on at the place before

    @staticmethod
    def of(model: Model, e: Tensor, *, each: int, guidance: float) -> Writer:
        """Begin, with a row for each text."""
        now = Beginnings.of(len(e), each, model.config, device=e.device)
        trunk = Trunk.of(model, e, guidance=guidance, causal=True)
        trunk = trunk.begin(now.ids[:, 0], torch.ones_like(e[:, 0])).room(
            min(_BLOCK, model.config.max_tokens)
        )
        lists = None if is_gpu(e) else shortlists(model, e, blind=not guidance)
        return Writer(now, trunk, torch.arange(len(e), device=e.device) * each, lists, guidance)

    def alone(self, now: Beginnings, rows: Tensor) -> Writer:
        """A writer who goes on with some of the rows, each by itself; this one stays as it is."""
        trunk = self.trunk.copy(rows)
        return replace(self, now=now.alone(), trunk=trunk, rows=self.rows[rows], left=Count(~now.done))

    def step(self, place: int) -> Writer:
        """Write one token more of each text."""
        config, gpu = self.trunk.model.config, is_gpu(self.trunk.e)
        gains, tokens = self._likeliest(place)
        now, parents = _extend(self.now, gains, tokens, place, config=config, each=len(self.trunk.drops))
        # A CPU goes on with what has not ended. A GPU's number is a step old and must not
        # have grown since: what has ended may give way to what goes on, but not in a text all of
        # whose beginnings have ended.
        ended = now.done.all(1, keepdim=True).expand_as(now.done) if gpu else now.done
        count = Count(~ended)
        if place + 1 == config.max_tokens:
            return replace(self, now=now, rows=self.rows[:0])
        have = len(self.rows) if place else ended.numel()
        asked = self.left if gpu else count
        stay = chosen_places(~ended, next_batch(have if asked is None else asked.read(), have, gpu=gpu))
        row_of = torch.zeros_like(parents).scatter(
            0, self.rows, torch.arange(len(self.rows), device=parents.device)
        )
        # Room for as many places as are read, or a few more, else most of what is copied is empty.
        room = min(config.max_tokens, (place + 1) // _BLOCK * _BLOCK + _BLOCK)
        trunk = self.trunk.take(row_of[parents[stay]]).room(room)
        return replace(self, now=now, trunk=trunk, rows=stay, left=count)

    def _likeliest(self, place: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B * K, K) of the likeliest tokens at a place, or -inf, and which they are."""
        trunk, rows, count = self.trunk, self.rows, self.now.done.shape[1]
        ids = self.now.ids.flatten(0, 1)[rows]
        t = torch.ones(len(rows), device=ids.device)
        if trunk.caches:
            hidden = trunk.read(ids, t, torch.full_like(ids[:, :1], place))
        else:
            hidden = [h.unflatten(0, ids.shape)[:, place] for h in trunk.hidden(ids, t)]
        best = []
        if self.lists is None:
            for _, logits in logit_parts(trunk.model, hidden, guidance=self.guidance):
                best.append(_top(logits, count))
        else:
            each = self.now.done.numel() // len(self.lists)  # of a list: its text's, together or alone
            counts = torch.bincount(rows // each, minlength=len(self.lists)).tolist()
            for some, *states in zip(self.lists, *(h.split(counts) for h in hidden), strict=True):
                gains, which = _top(guided_logits(some, states, guidance=self.guidance), count)
                best.append((gains, some.words[which]))
        gains, tokens = map(torch.cat, zip(*best, strict=True))
        shape = self.now.done.numel(), gains.shape[1]
        return (
            torch.full(shape, float("-inf"), device=ids.device).index_copy(0, rows, gains),
            torch.zeros(shape, dtype=torch.long, device=ids.device).index_copy(0, rows, tokens),
        )


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the likeliest of each row of logits (n, V), and which they are, (n, count)."""
    top, which = logits.topk(min(count, logits.shape[1]), dim=1)
    return top.float() - logits.float().logsumexp(1, keepdim=True), which


def _extend(
    now: Beginnings, gains: Tensor, tokens: Tensor, place: int, *, config: ModelConfig, each: int
) -> tuple[Beginnings, Tensor]:
    """Keep the K most promising with all their tokens; and which one each comes from, (B * K,).

    What has ended stands beside them as it is, followed by padding that costs nothing.
    """
    B, K = now.done.shape
    count = gains.shape[1]
    free = torch.zeros(count, device=gains.device).masked_fill(
        torch.arange(count, device=gains.device) > 0, float("-inf")
    )
    gains = torch.where(now.done[..., None], free, gains.view(B, K, count))
    tokens = tokens.view(B, K, count).masked_fill(now.done[..., None], config.pad_id)
    likelihood = (now.likelihood[..., None] + gains).flatten(1)
    chosen = (likelihood.unflatten(1, (K, count)) + now.promise[..., None]).flatten(1).topk(K, dim=1).indices
    likelihood, parent = likelihood.gather(1, chosen), chosen // count
    ended = now.done.gather(1, parent)
    token = tokens.flatten(1).gather(1, chosen)
    token = token.masked_fill(likelihood.isneginf(), config.end_id)  # fewer texts than beams: these are none
    where = parent[..., None].expand_as(now.ids)
    ids, confidence = now.ids.gather(1, where), now.confidence.gather(1, where)
    ids[..., place] = token
    confidence[..., place] = gains.flatten(1).gather(1, chosen).exp().masked_fill(ended, 0.0)
    done = ended | (token == config.end_id)
    behind = torch.arange(ids.shape[2], device=ids.device) > place
    state = Beginnings(
        ids.masked_fill_(done[..., None] & behind, config.pad_id),
        confidence,
        likelihood,
        now.tokens.gather(1, parent) + ~ended,
        done,
        now.promise.gather(1, parent),
        now.passes + each * (~now.done).sum(1),
    )
    return state, (parent + torch.arange(0, B * K, K, device=parent.device)[:, None]).flatten()
