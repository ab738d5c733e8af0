"""From left to right, a token a pass: what is read, and what is gone on with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from reading import CONFIG, END, MASK, Attentive, E, Forgetful, T, beginnings, causal_model
from torch import Tensor

from unembed.config import DiffusionConfig
from unembed.decode import DecodeOptions, Draft, blank, decode, draw_uniforms
from unembed.errors import UnembedError
from unembed.model import Denoiser
from unembed.trunk import Model


def left_to_right(
    model: Model, e: Tensor, start: Draft | None = None, avoid: Tensor | None = None, **options: Any
) -> list[Draft]:
    uniforms, plan = draw_uniforms(0, len(e), steps=T, length=T, seed=0), DecodeOptions("causal", **options)
    return list(
        decode(
            model, e, options=plan, diffusion=DiffusionConfig(), uniforms=uniforms, start=start, avoid=avoid
        )
    )


def decoded(model: Denoiser, e: Tensor, **options: Any) -> Draft:
    return left_to_right(model, e, **options)[-1]


def assert_same_drafts(found: list[Draft], wanted: list[Draft]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.passes, other.passes)
        torch.testing.assert_close(one.confidence, other.confidence, atol=1e-5, rtol=0)
        assert one.likeness.isnan().all()  # a single draft is not compared with others


def test_causal_takes_each_token_from_those_before_it() -> None:
    model, e = causal_model(), torch.randn((24, E), generator=torch.Generator().manual_seed(1))
    found = decoded(model, e, steps=3)  # whatever is asked for, a pass a token
    again = model.head(model.hidden(found.ids, e, causal=torch.ones(len(e), dtype=torch.bool))).argmax(-1)
    ends = found.ids == END
    content = ends.cumsum(1) - ends.long() == 0  # with the end itself
    assert torch.equal(again[content], found.ids[content])
    assert torch.equal(found.passes, content.sum(1))
    assert 1 < len(set(found.passes.tolist()))  # texts that end leave the batch


def test_causal_does_not_depend_on_the_batch() -> None:
    model, e = causal_model(), torch.randn((9, E), generator=torch.Generator().manual_seed(2))
    every = decoded(model, e)
    for row in (0, 8):
        assert torch.equal(decoded(model, e[row : row + 1]).ids[0], every.ids[row])


def test_a_model_that_does_not_read_left_to_right_says_so() -> None:
    with pytest.raises(UnembedError, match="does not read left to right"):
        decoded(Denoiser(CONFIG), torch.ones(1, E))


@pytest.mark.parametrize("gpu", [False, True])  # where rows that are done stay a while
@pytest.mark.parametrize("lengths", [None, [0, 5, 1, T - 1, T, 4]])
@pytest.mark.parametrize(
    "options",
    [{}, {"guidance": 2.5}, {"guidance": 0.0}, {"guidance": 0.4, "temperature": 1.5}],
)
def test_reading_a_place_at_a_time_changes_nothing(
    options: dict[str, Any], lengths: list[int] | None, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{decode.__module__}.is_gpu", lambda e: gpu)
    e = torch.randn((20, E), generator=torch.Generator().manual_seed(4))
    start = blank(20, CONFIG, device=e.device) if lengths is None else beginnings(20, lengths)
    known, spent = start.ids != MASK, set()
    for changes in ({"layers": 3}, {"positions": "learned", "adaln_rank": 4, "time_conditioning": True}):
        model = causal_model(**changes)
        avoid, plain = torch.full((20, T), MASK), Forgetful(model)
        for _ in range(2):  # without and with tokens to avoid
            found = left_to_right(model, e, start, avoid, **options)
            assert_same_drafts(found, left_to_right(plain, e, start, avoid, **options))
            last = found[-1]
            assert len(found) == T and not (last.ids == MASK).any()
            assert torch.equal(last.ids[known], start.ids[known])
            spent |= set((last.passes - start.passes).tolist())
            avoid[::2] = last.ids[::2]
    assert len(spent) > 2 or options.get("guidance") == 0  # rows left one after the other


def test_each_place_is_read_once() -> None:
    model, e = causal_model(), torch.randn((20, E), generator=torch.Generator().manual_seed(4))
    attentive, forgetful = Attentive(model), Forgetful(model)
    assert_same_drafts(left_to_right(attentive, e), left_to_right(forgetful, e))
    tokens = int(left_to_right(model, e)[-1].passes.sum())
    assert attentive.places == tokens and forgetful.places == T * tokens
    attentive.places, start = 0, beginnings(20, [0, 5, 1])
    last = left_to_right(attentive, e, start)[-1]
    assert attentive.places == 20 * T + int((last.passes - start.passes).sum())  # what was known, all at once


def test_known_words_behind_a_mask_are_read_again() -> None:
    model, e = causal_model(), torch.randn((12, E), generator=torch.Generator().manual_seed(5))
    start = beginnings(12, [T])
    gaps = torch.rand((12, T), generator=torch.Generator().manual_seed(6)) < 0.4
    start = dataclasses.replace(
        start, ids=start.ids.masked_fill(gaps, MASK), confidence=start.confidence.masked_fill(gaps, 0.0)
    )
    attentive, forgetful = Attentive(model), Forgetful(model)
    assert_same_drafts(left_to_right(attentive, e, start), left_to_right(forgetful, e, start))
    assert attentive.places == forgetful.places > 0


@pytest.mark.parametrize("lengths", [[0], [2, 0, 7, 4]])
def test_a_text_gone_on_with_does_not_depend_on_the_batch(lengths: list[int]) -> None:
    model, e = causal_model(), torch.randn((8, E), generator=torch.Generator().manual_seed(2))
    start = beginnings(8, lengths)
    every = decoded(model, e, start=start)
    for n in range(8):
        alone = decoded(model, e[n : n + 1], start=start.take(slice(n, n + 1)))
        assert torch.equal(alone.ids[0], every.ids[n]) and alone.passes[0] == every.passes[n]
        torch.testing.assert_close(alone.confidence[0], every.confidence[n], atol=1e-5, rtol=0)


def test_left_to_right_the_model_is_told_that_nothing_is_known() -> None:
    told: list[Tensor] = []

    class Noting(Forgetful):
        def hidden(self, xt: Tensor, e: Tensor, **known: Any) -> Tensor:
            told.append(known["t"])
            return super().hidden(xt, e, **known)

    left_to_right(Noting(causal_model()), torch.ones(2, E), beginnings(2, [3, 1]))
    assert told and all((t == 1).all() for t in told)  # as in training
