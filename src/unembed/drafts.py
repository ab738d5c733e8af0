"""Which of several drafts of a text is the answer: chosen as a beam's texts are, by likelihood and `choice`.

Knows tensors only, no text. A model that reads left to right reads all drafts in one pass, each token given
those before it; of another there is nothing but how sure it was of each token when it revealed it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unembed.choice import LENGTH_POWER, judge
from unembed.config import ModelConfig
from unembed.diffusion import chosen_places
from unembed.trunk import Count, Trunk, logit_parts

_TINY = 1e-30  # stands for a probability that is too small for float32


def choose(
    trunk: Trunk, e: Tensor, ids: Tensor, confidence: Tensor, *, guidance: float, reads: bool
) -> tuple[Tensor, Tensor]:
    """Number (B,) of the draft that is the answer, of K whole ones ids (B, K, T) of each vector e (B, E).

    With it comes its likeness (B,) to the vector; NaN if none was guessed. The trunk is that of all B * K.
    Unless it `reads` them, what counts is the confidence (B, K, T) recorded when tokens were revealed, which
    is their likelihood if they were written left to right.
    """
    config = trunk.model.config
    content = content_places(ids, config)
    # What stands behind an end was revealed before it, and is no part of the text.
    texts = ids.masked_fill(~content, config.pad_id)
    if reads and len(e):
        flat, where = texts.flatten(0, 1), content.flatten(0, 1)
        found = token_likelihood(replace(trunk, causal=True), flat, where, guidance=guidance).view_as(content)
    else:
        found = confidence.clamp_min(_TINY).log()
    power = LENGTH_POWER if config.causal else 1.0
    score = found.masked_fill(~content, 0.0).sum(2) / content.sum(2) ** power
    score, likeness = judge(trunk.model, e, texts, score, blind=not guidance)
    row = torch.arange(len(e), device=e.device)
    # The first of those that say the same, between which nothing but rounding would choose.
    best = (texts == texts[row, score.argmax(1)][:, None]).all(2).int().argmax(1)
    return best, likeness[row, best]


def content_places(ids: Tensor, config: ModelConfig) -> Tensor:
    """Places (..., T) of a text's own tokens, the end included."""
    ends = (ids == config.end_id).long()
    return ends.cumsum(-1) - ends == 0


def token_likelihood(trunk: Trunk, ids: Tensor, where: Tensor, *, guidance: float) -> Tensor:
    """Log-likelihood (B, T) of the tokens at some places of whole texts, each given those before it; else 0.

    The trunk must be causal: one pass reads all tokens of a text.
    """
    asked = Count(where)
    hidden = trunk.hidden(ids, torch.ones(len(ids), device=ids.device))
    # The trunk is queued; while it runs the number arrives, and the head is queued behind it.
    places = chosen_places(where, asked.read())
    tokens, found = ids.flatten()[places, None], []
    for part, logits in logit_parts(trunk.model, [h[places] for h in hidden], guidance=guidance):
        chosen = logits.gather(1, tokens[part]).squeeze(1)
        found.append(chosen.float() - logits.float().logsumexp(1))
    nothing = torch.zeros(ids.numel(), device=ids.device)
    return nothing.index_copy(0, places, torch.cat(found)).view_as(ids)
