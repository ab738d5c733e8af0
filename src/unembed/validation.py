"""How good a run's model is on the pairs kept aside: its loss, and texts that it decodes.

Knows the averaged weights and one batch, which is the same every time. It must not know of training steps,
nor of what becomes of the figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig
from unembed.decode import DecodeOptions, decode, draw_uniforms
from unembed.diffusion import corrupt, sample_t, token_weights, weight_total
from unembed.metrics import token_f1
from unembed.pairs import Batch, step_generator
from unembed.run import Run

_DECODED = 128  # validation texts that are decoded in full


@torch.inference_mode()
def validate(run: Run, held_out: Batch) -> dict[str, float]:
    """Measure the averaged weights on the pairs kept aside, with the same masks every time.

    The loss is the run's own at its own schedule, over all t. `token_accuracy` is that of words when all is
    masked, `token_f1` that of texts decoded in 8 passes; a model that reads left to right is measured
    so, too.
    """
    c, device = run.config, run.group.device
    x0, e = held_out
    generator = step_generator(c.train.seed, 0, stream=2, device=device)
    fixed = replace(c.diffusion, stratified=True, lowest_t=0.0)
    t = sample_t(len(x0), fixed, generator=generator)
    xt, masked = corrupt(x0, t, fixed, mask_id=c.model.mask_id, generator=generator)
    weights = token_weights(masked, t, fixed)
    word = (x0 != c.model.pad_id) & (x0 != c.model.end_id)
    loss = correct = 0.0
    blank = torch.full_like(x0, c.model.mask_id)
    model: Any = run.average
    with run.half():
        for part in torch.arange(len(x0), device=device).split(256):
            logits = model(xt[part], e[part], t=t[part], where=masked[part]).float()
            entropy = F.cross_entropy(logits, x0[part][masked[part]], reduction="none")
            loss += float((entropy * weights[part][masked[part]]).sum())
            ones = torch.ones(len(part), device=device)
            guess = model(blank[part], e[part], t=ones, where=word[part]).argmax(-1)
            correct += float((guess == x0[part][word[part]]).sum())
        few = x0[:_DECODED], e[:_DECODED]
        figures = {
            "validation_loss": loss / float(weight_total(masked, fixed)),
            "token_accuracy": correct / float(word.sum()),
            "token_f1": _decoded_f1(model, *few, fixed, "confidence"),
        }
        if c.diffusion.causal_share:
            figures["causal_loss"] = causal_loss(model, x0, e)
            figures["causal_f1"] = _decoded_f1(model, *few, fixed, "causal")
        if c.diffusion.embed_share:
            parts = zip(x0.split(256), e.split(256), strict=True)
            likeness = [F.cosine_similarity(model.embed(ids), vectors) for ids, vectors in parts]
            figures["embed_cosine"] = float(torch.cat(likeness).mean())
    return figures


def causal_loss(model: Any, x0: Tensor, e: Tensor) -> float:
    """Mean cross entropy of the tokens and the end of texts read from left to right."""
    total = 0.0
    wanted = x0 != model.config.pad_id
    for part in torch.arange(len(x0), device=x0.device).split(256):
        rows = torch.ones(len(part), dtype=torch.bool, device=x0.device)
        h = model.hidden(x0[part], e[part], t=rows.float(), causal=rows)[wanted[part]]
        total += float(F.cross_entropy(model.head(h).float(), x0[part][wanted[part]], reduction="sum"))
    return total / float(wanted.sum())


def _decoded_f1(model: Any, x0: Tensor, e: Tensor, diffusion: DiffusionConfig, strategy: str) -> float:
    """Mean token F1 of texts as decoded by a strategy."""
    options = DecodeOptions(strategy).fit(model.config)
    uniforms = draw_uniforms(0, len(x0), steps=options.steps, length=x0.shape[1], seed=0).to(x0.device)
    for draft in decode(model, e, options=options, diffusion=diffusion, uniforms=uniforms):
        last = draft.ids
    end = model.config.end_id
    rows = zip(_words(x0, end), _words(last, end), strict=True)
    return sum(token_f1(reference, found) for reference, found in rows) / len(x0)


def _words(ids: Tensor, end_id: int) -> list[list[int]]:
    """Ids of each row before its end."""
    return [row[: row.index(end_id)] if end_id in row else row for row in ids.tolist()]
