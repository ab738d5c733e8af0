"""practice: texts drawn as the model reads, each token worth what comes of it, better texts made likelier."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unembed.backbone import build
from unembed.config import ModelConfig
from unembed.practice import PRICE, RUNS, TRIES, advantages, gains, next_tokens, practice_loss, write

T, SIZE, V = 6, 16, 19
PAD, END, MASK = 0, 1, 2
CONFIG = ModelConfig(
    layers=2, hidden=32, heads=2, ffn=64, adaln_rank=0, vocab_size=V, max_tokens=T, embedding_size=SIZE,
    mask_id=MASK, end_id=END, pad_id=PAD, causal=True,
)  # fmt: skip
WORDS = st.lists(st.integers(3, 6), min_size=1, max_size=T)


def row(words: list[int]) -> list[int]:
    """Ids of a text: its words, an end if there is room, padding."""
    return [*words, END, *[PAD] * T][:T]


def fresh_model(*, rough: float = 0.0) -> Any:
    """Build a small denoiser with random weights; what the vector decides is nothing if it is not `rough`."""
    torch.manual_seed(0)
    model: Any = build(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rough * torch.randn_like(p))
    return model


def vectors(count: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, SIZE, generator=seeded(1)), dim=1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- what a token is worth ------------------------------------------------------------------------


def plain_gains(words: list[int], truth: list[int]) -> list[float]:
    """Say in plain Python what `gains` says."""
    found = []
    for place in range(len(words)):
        right = 0
        for n in range(1, RUNS + 1):
            if place + 1 < n:
                continue
            runs = Counter(tuple(words[k - n + 1 : k + 1]) for k in range(n - 1, place + 1))
            known = Counter(tuple(truth[k - n + 1 : k + 1]) for k in range(n - 1, len(truth)))
            run = tuple(words[place - n + 1 : place + 1])
            right += known[run] >= runs[run]
        found.append((right / RUNS - PRICE) / len(truth))
    return found + [0.0] * (T - len(words))


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=3), WORDS)
def test_gains_are_those_of_plain_python(texts: list[list[int]], truth: list[int]) -> None:
    written = torch.tensor([[row(words) for words in texts]])
    found = gains(written, torch.tensor([row(truth)]), CONFIG)
    expected = torch.tensor([[plain_gains(words, truth) for words in texts]])
    torch.testing.assert_close(found, expected)


def test_the_true_text_gains_most() -> None:
    truth = [3, 4, 5, 3]
    others = [[3, 4, 5], [3, 4, 5, 3, 3], [4, 3, 5, 3], [3, 4, 5, 6], [6]]
    written = torch.tensor([[row(words) for words in (truth, *others)]])
    total = gains(written, torch.tensor([row(truth)]), CONFIG).sum(2)[0]
    # A first word ends no run of two.
    assert float(total[0]) == pytest.approx(1 - PRICE - (RUNS - 1) / RUNS / len(truth))
    assert (total[1:] < total[0]).all()


def test_a_token_is_told_what_comes_of_it_and_not_what_was_before() -> None:
    gained = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]])
    expected = torch.tensor([[[2.25, 1.5, 1.75], [-2.25, -1.5, -1.25], [0.0, 0.0, -0.5]]])
    torch.testing.assert_close(advantages(gained), expected)
    # Texts that are equally good have nothing to teach.
    assert not advantages(torch.ones(2, 4, 5)).any()


# --- what is written ------------------------------------------------------------------------------


def test_texts_end_once_and_padding_stands_behind() -> None:
    ids = write(fresh_model(), vectors(40), generator=seeded())
    assert ids.shape == (40, TRIES, T)
    assert not (ids == MASK).any()
    lengths = 0
    for text in ids.flatten(0, 1).tolist():
        words = [token for token in text if token not in (END, PAD)]
        # A model that was taught nothing may draw padding for an end.
        assert text[: len(words)] == words and text[len(words) + 1 :] == [PAD] * (T - len(words) - 1)
        lengths += len(words)
    assert 2 < lengths / (40 * TRIES) < T


def test_each_token_goes_on_from_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chance has no say, the likeliest is written: as one pass over the whole text says, too."""
    model, e = fresh_model(rough=0.3), vectors(30)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 0.5))
    ids = write(model, e, generator=seeded())
    assert torch.equal(ids, ids[:, :1].expand_as(ids))  # the tries of a vector differ by chance alone
    ids = ids[:, 0]
    rows = torch.ones(len(ids), dtype=torch.bool)
    with torch.no_grad():
        likeliest = model.head(model.hidden(ids, e, t=rows.float(), causal=rows)).argmax(-1)
    written = (ids != PAD) & (likeliest != PAD)
    assert torch.equal(ids[written], likeliest[written])
    assert written.sum() > 60 and len(set(ids[written].tolist())) > 3


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    model, count = fresh_model(rough=0.1), 20_000
    condition = tuple(part.expand(count, -1) for part in model.condition(vectors(1)))
    ids, where = torch.full((count, T), MASK), torch.zeros((count, 1), dtype=torch.long)
    with torch.no_grad():
        noise = torch.rand((count, V), generator=seeded())
        found = next_tokens(model, ids, where, condition, model.cache(condition), noise).bincount(minlength=V)
        one = torch.ones(1, dtype=torch.bool)
        h = model.hidden(ids[:1], vectors(1), t=one.float(), causal=one)
        chances = model.head(h[:, 0]).softmax(-1)[0]
    assert found[MASK] == 0
    torch.testing.assert_close(found / count, chances, atol=0.015, rtol=0.0)


def test_draws_follow_the_generator() -> None:
    model, e = fresh_model(rough=0.3), vectors(4)
    one, again, other = (write(model, e, generator=seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


# --- what it does ---------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_by_worth() -> None:
    model, e = fresh_model(), vectors(3)
    ids = torch.tensor([row([3, 4]), row([5, 6, 7, 8]), row([9])])
    worth = torch.randn(3, T, generator=seeded())
    rows = torch.ones(3, dtype=torch.bool)
    with torch.no_grad():
        log_p = model.head(model.hidden(ids, e, t=rows.float(), causal=rows)).log_softmax(-1)
        expected = -(log_p.gather(2, ids[..., None])[..., 0] * worth).sum()
        found = practice_loss(model, ids, e, worth, torch.arange(3 * T))
    torch.testing.assert_close(found, expected)


def test_practice_makes_better_texts_likelier() -> None:
    """What a model half knows, it learns from its own texts alone: it is no longer told the true ones."""
    model, e = fresh_model(), vectors(6)
    truth = torch.tensor([row(words) for words in ([3, 4, 5], [6, 7], [8, 9, 10, 11], [12], [13, 3], [4, 4])])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    known = (truth != PAD).flatten().nonzero()[:, 0]

    def learn(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(14):
        learn(practice_loss(model, truth, e, torch.ones_like(truth, dtype=torch.float), known) / len(known))
    found = []
    for step in range(80):
        ids = write(model, e, generator=seeded(step))
        gained = gains(ids, truth, CONFIG)
        found.append(float(gained.sum(2).mean()))
        ids, worth = ids.flatten(0, 1), advantages(gained).flatten(0, 1)
        places = (ids != PAD).flatten().nonzero()[:, 0]
        learn(practice_loss(model, ids, e.repeat_interleave(TRIES, 0), worth, places) / len(places))
    first, last = sum(found[:5]) / 5, sum(found[-5:]) / 5
    assert first < 0.15 and last > 0.35, (first, last)
