"""Texts in which the model has written some words anew, without being told the vector.

A word that fits its neighbours as well as the first one did cannot be guessed from them: which of the two
it is must be read from the vector. Knows ids and a model; must not know where texts come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.diffusion import chosen_places

REWORDED = 0.3  # of the words of one token, in rows that are reworded


@torch.no_grad()
def reword(
    model: Any,
    ids: Tensor,
    *,
    share: float,
    opens: Tensor,
    generator: torch.Generator,
    compile: bool = False,
) -> Tensor:
    """Let the model write some words of a share of the rows ids (B, T) anew, drawn as it thinks likely.

    Only words of one token, which others that open a word (V,) take the place of: texts keep their lengths,
    and stay spelt as a tokenizer spells them.
    """
    c, count = model.config, round(share * len(ids))
    if not count:
        return ids
    rows = torch.rand(len(ids), generator=generator, device=ids.device).argsort()[:count]
    some = ids[rows]
    text = (some != c.end_id) & (some != c.pad_id)
    begins = opens[some] | ~text
    alone = text & begins & F.pad(begins[:, 1:], (0, 1), value=True)
    chance = torch.rand(some.shape, generator=generator, device=ids.device)
    masked = alone & (chance < REWORDED)
    # A bound that is hardly ever met, so that shapes are fixed and no one waits for a GPU.
    places = chosen_places(masked, math.ceil(REWORDED * some.numel() + 3 * some.numel() ** 0.5))
    noise = torch.rand((len(places), c.vocab_size), generator=generator, device=ids.device)
    draw = compiled(drawn_words) if compile else drawn_words
    drawn = draw(model, some.masked_fill(masked, c.mask_id), places, opens, noise)
    flat = some.flatten()
    written = torch.where(masked.flatten()[places], drawn, flat[places])
    return ids.index_copy(0, rows, flat.index_copy(0, places, written).view_as(some))


def drawn_words(model: Any, xt: Tensor, places: Tensor, opens: Tensor, noise: Tensor) -> Tensor:
    """Draw words (N,) at places (N,) of rows xt (B, T) as the model thinks likely, by uniforms (N, V)."""
    nothing = torch.zeros((len(xt), model.config.embedding_size), device=xt.device)
    every = torch.ones(len(xt), dtype=torch.bool, device=xt.device)
    h = model.hidden(xt, nothing, t=every * REWORDED, drop=every)
    return drawn(model.head(h.flatten(0, 1)[places]).masked_fill(~opens, -torch.inf), noise)


def drawn(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw a token (N,) of each row of logits (N, V), by uniforms (N, V): Gumbel's trick."""
    return (logits.float() - (-noise.clamp_min(1e-20).log()).clamp_min(1e-20).log()).argmax(1)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile once."""
    return torch.compile(function)
