"""Texts that a model in training writes itself, judged by how much of the true text is in them.

Taught true texts alone, a model learns what may stand behind a true beginning, never how to go on from a
beginning of its own. So here it draws several texts of a vector, and each token of them becomes likelier, the
more comes of it than of the other texts at that place (REINFORCE, with the mean of the others as a baseline).
Knows ids and a model; must not know of steps, nor of where texts come from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import ModelConfig
from unembed.rewording import compiled, drawn

TRIES = 8  # texts of a vector
RUNS = 2  # tokens of the longest runs that count
# What a token costs, against 1 for one that is right in every way: else a text would go on and on. By token
# F1 a token is worth its place if it is right in half as many cases as the F1 of the text.
PRICE = 0.3


@torch.no_grad()
def write(model: Any, e: Tensor, *, generator: torch.Generator, compile: bool = False) -> Tensor:
    """Draw texts (B, TRIES, T) of vectors e (B, E), left to right; padding stands behind their ends."""
    c, rows = model.config, len(e) * TRIES
    step = compiled(next_tokens) if compile else next_tokens
    condition = tuple(part.repeat_interleave(TRIES, 0) for part in model.condition(e))
    cache = model.cache(condition)
    ids = torch.full((rows, c.max_tokens), c.mask_id, device=e.device)
    done = torch.zeros(rows, dtype=torch.bool, device=e.device)
    for place in range(c.max_tokens):
        where = torch.full((rows, 1), place, device=e.device)
        noise = torch.rand((rows, c.vocab_size), generator=generator, device=e.device)
        token = step(model, ids, where, condition, cache, noise)
        ids[:, place] = torch.where(done, c.pad_id, token)
        done |= (token == c.end_id) | (token == c.pad_id)
    return ids.view(len(e), TRIES, -1)


def next_tokens(
    model: Any,
    ids: Tensor,
    where: Tensor,
    condition: tuple[Tensor, ...],
    cache: tuple[Tensor, ...],
    noise: Tensor,
) -> Tensor:
    """Draw the tokens (N,) at places (N, 1) of rows ids (N, T), by uniforms (N, V)."""
    t = torch.ones(len(ids), device=ids.device)
    h = model.read(ids, where, condition=condition, cache=cache, t=t)
    return drawn(model.head(h[:, 0]), noise)


def gains(written: Tensor, truth: Tensor, config: ModelConfig) -> Tensor:
    """What each token of texts (B, G, T) adds to what is right in them; the true ones are (B, T).

    That is the share of the runs ending with it, of 1 to RUNS tokens, that the true text has, as often as the
    text has had them by then; less the PRICE of a token; all as a share of the true text's length. Ends and
    padding add nothing.
    """
    text, true_text = ((ids != config.end_id) & (ids != config.pad_id) for ids in (written, truth))
    same = (written[..., None] == truth[:, None, None]) & text[..., None] & true_text[:, None, None]
    again = (written[..., None] == written[..., None, :]) & text[..., None] & text[..., None, :]
    same_run, again_run = same, again.tril()
    right = torch.zeros(written.shape, device=written.device)
    for n in range(RUNS):
        if n:  # a run is one that is shorter by its last token, and that
            same_run = F.pad(same_run[..., :-1, :-1], (1, 0, 1, 0)) & same
            again_run = F.pad(again_run[..., :-1, :-1], (1, 0, 1, 0)) & again
        right += same_run.any(-1) & (same_run.sum(-1) >= again_run.sum(-1))
    return (right / RUNS - PRICE) * text / true_text.sum(1).clamp_min(1)[:, None, None]


def advantages(gained: Tensor) -> Tensor:
    """How much more comes from each place (B, G, T) on than comes there of the other texts of its vector."""
    ahead = gained.flip(-1).cumsum(-1).flip(-1)
    others = (ahead.sum(1, keepdim=True) - ahead) / max(1, gained.shape[1] - 1)
    return ahead - others


def practice_loss(model: Any, ids: Tensor, e: Tensor, worth: Tensor, places: Tensor) -> Tensor:
    """Sum of the cross entropy of texts ids (N, T) at flat places, each token's times its worth (N, T)."""
    rows = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    h = model.hidden(ids, e, t=rows.float(), causal=rows)
    logits = model.head(h.flatten(0, 1)[places])
    entropy = F.cross_entropy(logits.float(), ids.flatten()[places], reduction="none")
    return (entropy * worth.flatten()[places]).sum()
