"""Which of several whole texts is the answer: what the model can tell of each, besides its likelihood.

Knows ids and numbers, no text. The weights were chosen on passages kept aside from
training, the terms by what they did for other text as well (docs/log.md). Only `likeness` needs a pass more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import ModelConfig
from unembed.trunk import is_gpu

# A text's log-likelihood falls with every token, so that by it alone short texts win; divided by the number
# of tokens, long ones do. Between the two lies what recovers most.
LENGTH_POWER = 0.8
# A model that was taught to tell a text's words from the vector alone, in any order, knows more than it uses
# when it reads from left to right: their mean log-probability by that, and how much of it all they make up.
HEARING, COVERAGE = 0.2, 1.0
# Texts that say a word again are less often right: their share of such words counts against them.
REPEATS = 1.0
# What the other texts say, too, is likelier than what one says alone: the mean token F1 with them, each
# counted by how far its own score, in this unit, is below the best.
AGREEMENT, UNIT = 3.0, 0.1
# A model that guesses what vector a text has knows how far it is from the one that was asked for: the cosine.
LIKENESS = 100.0
_TOGETHER = 16  # texts whose vectors a CPU guesses at once


def judge(
    model: Any, e: Tensor, ids: Tensor, score: Tensor, *, blind: bool, likeness: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Score whole texts ids (B, K, T), of which likelihood says this (B, K), by all that the model can tell.

    If it was `blind` to the vectors e (B, E), they must not speak for a text, either. With the scores (B, K)
    come the texts' likenesses (B, K) to the vectors; NaN if the model does not guess, or must not. Those that
    are known need not be guessed again.
    """
    heard = None if blind else listen(model, e)
    if likeness is None and not blind:
        likeness = recognise(model, e, ids)
    judged = rescore(ids, score, heard=heard, likeness=likeness, config=model.config)
    return judged, torch.full_like(score, torch.nan) if likeness is None else likeness


def checks(model: Any, *, blind: bool) -> bool:
    """Whether every text takes one more pass to be judged, in which its vector is guessed."""
    return getattr(model, "embeds", False) and not blind


def listen(model: Any, e: Tensor) -> Tensor | None:
    """Log-probabilities (B, V) of a text's words in any order, by the vector alone, if the model can tell."""
    return model.head(model.gist(e)).float().log_softmax(-1) if getattr(model, "hears", False) else None


def recognise(model: Any, e: Tensor, ids: Tensor, known: Tensor | None = None) -> Tensor | None:
    """Cosines (B, K) of vectors e (B, E) with what the model guesses of texts ids (B, K, T), if it does.

    A CPU does not guess anew those that are `known` (B, K), and no NaN.
    """
    if not (getattr(model, "embeds", False) and len(e)):
        return None
    e = F.normalize(e.float(), dim=-1)
    if is_gpu(e):
        guesses = model.embed(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])
        return (guesses * e[:, None]).sum(2)
    found = torch.full(ids.shape[:2], torch.nan) if known is None else known.clone()
    for each, texts, vector in zip(found, ids, e, strict=True):  # no answer depends on the vectors beside it
        if len(new := each.isnan().nonzero()[:, 0]):
            each[new] = (_guess(model, texts[new]) * vector).sum(1)
    return found


def _guess(model: Any, ids: Tensor) -> Tensor:
    """Guess the vectors (K, E) of texts ids (K, T), a few of about the same length at a time.

    The padding behind them is not read, and what few texts make of themselves a CPU's caches hold.
    """
    places = torch.arange(1, ids.shape[1] + 1)
    sizes, order = ((ids != model.config.pad_id) * places).amax(1).clamp_min(1).sort()
    parts = zip(order.split(_TOGETHER), sizes.split(_TOGETHER), strict=True)
    guesses = torch.cat([model.embed(ids[rows, : int(lengths[-1])]) for rows, lengths in parts])
    return torch.empty_like(guesses).index_copy_(0, order, guesses)


def rescore(
    ids: Tensor, score: Tensor, *, heard: Tensor | None, likeness: Tensor | None = None, config: ModelConfig
) -> Tensor:
    """Score whole texts ids (B, K, T) by all of the above, given what their likelihood says of them (B, K).

    `heard` (B, V) are log-probabilities of a text's words in any order, `likeness` (B, K) cosines of guesses
    of the texts' vectors with the one asked for, of models that can tell.
    """
    words = (ids != config.mask_id) & (ids != config.end_id) & (ids != config.pad_id)
    count = words.sum(2).clamp_min(1)
    earlier = _earlier(ids)
    first = words & (earlier == 0)
    if heard is not None:
        told = heard.gather(1, ids.flatten(1)).view_as(words)
        mean = told.masked_fill(~words, 0.0).sum(2) / count
        score = score + HEARING * mean + COVERAGE * told.exp().masked_fill(~first, 0.0).sum(2)
    score = score - REPEATS * (words & ~first).sum(2) / count
    score = score + AGREEMENT * _agreement(_shared(ids, words, earlier), words.sum(2), score)
    return score if likeness is None else score + LIKENESS * likeness


def _earlier(ids: Tensor) -> Tensor:
    """How often the token at each place stands before it, (B, K, T)."""
    before = torch.ones(ids.shape[-1:] * 2, dtype=torch.bool, device=ids.device).tril(-1)
    return ((ids[..., None] == ids[..., None, :]) & before).sum(-1)


def _shared(ids: Tensor, words: Tensor, earlier: Tensor) -> Tensor:
    """How many words two texts have in common, (B, K, K); the second `the` is another than the first."""
    T = ids.shape[2]
    # What is no word equals nothing, not even what is no word in the other text.
    ours = (ids * T + earlier).masked_fill(~words, -1)
    theirs = ours.masked_fill(~words, -2)
    rows = [(ours[:, k, None, :, None] == theirs[:, :, None, :]).sum((2, 3)) for k in range(ids.shape[1])]
    return torch.stack(rows, dim=1)


def _agreement(shared: Tensor, count: Tensor, score: Tensor) -> Tensor:
    """Mean F1 of each text with the others, (B, K), weighted by their scores; 0 if there are none."""
    f1 = 2 * shared / (count[:, :, None] + count[:, None]).clamp_min(1)
    weight = ((score - score.amax(1, keepdim=True)) / UNIT).exp()
    others = weight[:, None] * ~torch.eye(score.shape[1], dtype=torch.bool, device=score.device)
    return (f1 * others).sum(2) / others.sum(2).clamp_min(1e-30)
