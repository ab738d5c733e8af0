"""Models that revise, and what they are taught by: for tests of lessons and of runs with them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from reading import END, PAD, E, T, V, causal_model
from syllables import CONFIG, FakeEncoder, syllable_tokenizer
from torch import Tensor

from unembed.backbone import build
from unembed.corpus import PreparedData
from unembed.lessons import Lesson
from unembed.model import Denoiser
from unembed.pairs import FreshSpans
from unembed.train import fit_to_data

REVISES: dict[str, Any] = {"causal": True, "embeds": True, "revises": True, "pairs": "fresh"}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def revising_model() -> Denoiser:
    """A random model that revises, and is told the time."""
    return causal_model(embeds=True, revises=True, time_conditioning=True)


def some_texts(rows: int, seed: int = 0) -> Tensor:
    """Random texts of all lengths, the longest without an end."""
    ids = torch.randint(3, V, (rows, T), generator=seeded(seed))
    length = torch.randint(1, T + 1, (rows, 1), generator=seeded(seed + 1))
    places = torch.arange(T)
    return ids.masked_fill(places == length, END).masked_fill(places > length, PAD)


def some_vectors(rows: int, seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(rows, E, generator=seeded(seed))


def told(model: Denoiser, e: Tensor, draft: Tensor | None) -> dict[str, Any]:
    """All that one row that is read from left to right is told beside its ids."""
    one = torch.ones(len(e), dtype=torch.bool)
    known: dict[str, Any] = {"t": one.float(), "causal": one}
    if draft is None:
        return {**known, "condition": model.condition(e)}
    review = model.review(draft, e)
    condition = model.condition(e, miss=F.normalize(e, dim=1) - review.vectors)
    return {**known, "condition": condition, "review": review}


def spans_of(prepared: PreparedData, **changes: Any) -> FreshSpans:
    """Open the passages as a run's batches, which are of another size than its lessons."""
    values = {"encoder": FakeEncoder(), "batch_size": 9, "validation": 8, "seed": 5, "device": "cpu"}
    return FreshSpans(prepared, **{**values, **changes})


def writer_for(prepared: PreparedData, seed: int = 0) -> Any:
    """A random model of the data that revises; it writes no padding, as one that has learnt something."""
    torch.manual_seed(0)
    model: Any = build(fit_to_data(CONFIG.override(**REVISES), prepared).model).eval()
    perturb(model, seed)
    with torch.no_grad():
        model.bias[syllable_tokenizer().pad_id] = -1000.0
    return model


@torch.no_grad()
def perturb(model: Any, seed: int = 0) -> None:
    """Move all weights: what only revising needs is at zero at first, and does nothing."""
    draw = seeded(seed)
    for p in model.parameters():
        p.add_(0.3 * torch.randn(p.shape, generator=draw))


def content(ids: Tensor) -> Tensor:
    """Content tokens of each row, checked to be followed by one end and then padding."""
    length = (ids > 1).sum(1)
    places = torch.arange(ids.shape[1])
    assert torch.equal(ids == 1, places == length[:, None])
    assert torch.equal(ids == 0, places > length[:, None])
    return length


def same(one: Lesson, other: Lesson) -> bool:
    """Tell whether two lessons are bit for bit the same."""
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Lesson))
