"""Beam searches of random models: how they are run and compared, and what is told of a text by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import MASK, E, causal_model
from torch import Tensor

from unembed import beam, choice, writer
from unembed.beam import Beams, beam_search
from unembed.model import Denoiser
from unembed.trunk import Model, guided_logits

Text = tuple[tuple[int, ...], float]  # tokens, and the logarithm of their likelihood


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> None:
    """Decode as on a GPU, or as on a CPU."""
    for module in (beam, choice, writer):
        monkeypatch.setattr(module, "is_gpu", lambda e: gpu)


def vectors(rows: int, seed: int = 1) -> Tensor:
    return torch.randn((rows, E), generator=torch.Generator().manual_seed(seed))


def found(model: Model, e: Tensor, **options: Any) -> Beams:
    *_, last = beam_search(model, e, **options)
    return last


def parts(beams: Beams) -> list[Tensor]:
    return [getattr(beams, f.name) for f in dataclasses.fields(Beams)]


def assert_same(one: Beams, other: Beams) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.passes, other.passes)
    torch.testing.assert_close(one.confidence, other.confidence, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        one.score, other.score, atol=2e-5, rtol=2e-6
    )  # a likeness counts a hundred times
    torch.testing.assert_close(one.likeness, other.likeness, equal_nan=True)


@torch.inference_mode()
def next_tokens(model: Denoiser, e: Tensor, text: tuple[int, ...], guidance: float) -> list[float]:
    """Log-probabilities of the token after a beginning, by a pass through the whole row."""
    size = model.config.max_tokens
    ids = torch.tensor([[*text, *[MASK] * (size - len(text))]])
    one = torch.ones(1, dtype=torch.bool)
    hidden = [
        model.hidden(ids, e, t=one.float(), causal=one, drop=torch.tensor([drop]))[:, len(text)]
        for drop in [True] * (guidance != 1) + [False] * (guidance != 0)
    ]
    chances: list[float] = guided_logits(model, hidden, guidance=guidance)[0].log_softmax(0).tolist()
    return chances


def guessing(**changes: Any) -> Denoiser:
    """A random model that guesses the vectors of texts, too."""
    model = causal_model(embeds=True, **changes)
    model.embeds = True
    return model


@torch.inference_mode()
def cosines(model: Denoiser, e: Tensor, ids: Tensor) -> Tensor:
    """Cosines (B, K) of each vector with what is guessed of its texts, one text after the other."""
    guesses = torch.cat([model.embed(text[None]) for text in ids.flatten(0, 1)]).unflatten(0, ids.shape[:2])
    return F.cosine_similarity(guesses, e[:, None], dim=2)
