"""Shortlists: a text's likeliest words by its vector alone, and beams that look at these and no others."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from reading import END, MASK, Attentive, E, T, V, causal_model
from torch import Tensor

from unembed import beam, choice, shortlist, writer
from unembed.beam import Beams, beam_search
from unembed.engine import HalfModel, Int8Model
from unembed.model import Denoiser
from unembed.shortlist import shortlists
from unembed.trunk import Model


def hearing(**changes: Any) -> Denoiser:
    model = causal_model(hidden=32, layers=2, **changes).requires_grad_(False)
    model.hears = True
    return model


def vectors(rows: int, seed: int = 1) -> Tensor:
    return torch.randn((rows, E), generator=torch.Generator().manual_seed(seed))


def found(model: Model, e: Tensor, **options: Any) -> Beams:
    *_, last = beam_search(model, e, **options)
    return last


def text(beams: Beams, row: int) -> Beams:
    return Beams(*(getattr(beams, f.name)[row : row + 1] for f in dataclasses.fields(Beams)))


def assert_same(one: Beams, other: Beams) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.passes, other.passes)
    torch.testing.assert_close(one.confidence, other.confidence, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.score, other.score, atol=1e-4, rtol=0)


@pytest.fixture
def by_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the likeliest text win, whatever else speaks for others."""
    monkeypatch.setattr(choice, "rescore", lambda ids, score, **_: score)


# The head


@pytest.mark.parametrize(("wrap", "exact"), [(lambda m: m, False), (HalfModel, False), (Int8Model, True)])
def test_a_head_for_some_words_gives_what_the_whole_gives_at_them(wrap: Any, exact: bool) -> None:
    model = wrap(hearing())
    states = torch.randn((7, 32), generator=torch.Generator().manual_seed(0))
    states = states.to(torch.bfloat16 if isinstance(model, HalfModel) else torch.float32)
    for words in (
        torch.tensor([END, 5, 17, 39]),
        torch.tensor([9]),
        torch.tensor([MASK, 3]),
        torch.arange(V),
    ):
        whole, some = model.head(states)[:, words], model.head_for(words)(states)
        assert some.dtype == whole.dtype and some.shape == (7, len(words))
        torch.testing.assert_close(some, whole)
        assert torch.equal(some, whole) or not exact
    assert model.head_for(words)(states[:0]).shape == (0, V)


def test_what_was_rounded_is_not_rounded_again() -> None:
    model, words = Int8Model(hearing()), torch.tensor([END, 7, 30])
    head: Any = model.head_for(words)
    assert torch.equal(head.keywords["weight"], model.vocabulary.weight[words])
    assert head.keywords["weight"].dtype == torch.int8


# The list


@pytest.mark.parametrize("wrap", [lambda m: m, HalfModel, Int8Model])
@pytest.mark.parametrize("count", [1, 2, 12, V - 1])
@torch.inference_mode()
def test_a_list_has_the_likeliest_words_and_the_end(
    wrap: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "WORDS", count)
    model, e = wrap(hearing()), vectors(20)
    lists = shortlists(model, e, blind=False)
    assert lists is not None and len(lists) == 20
    told, rare = model.head(model.gist(e)).float()[:, :V], 0
    for some, heard in zip(lists, told, strict=True):
        words = some.words.tolist()
        assert words == sorted(set(words)) and len(words) == count
        assert END in words and MASK not in words
        rare += END not in heard.topk(count).indices
        others = [word for word in range(V) if word not in words]
        least = min((float(heard[word]) for word in words if word != END), default=float("inf"))
        assert all(float(heard[word]) <= least for word in others)
    assert rare or count > 12  # the end has a place even where it is not heard
    assert len({tuple(some.words.tolist()) for some in lists}) > 1 or count in (1, V - 1)


def test_where_the_whole_vocabulary_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, e = hearing(), vectors(3)
    assert shortlists(model, e, blind=False) is None  # there are few words
    monkeypatch.setattr(shortlist, "WORDS", V)
    assert shortlists(model, e, blind=False) is None
    monkeypatch.setattr(shortlist, "WORDS", 12)
    assert shortlists(model, e, blind=False) is not None
    assert shortlists(model, e, blind=True) is None
    assert shortlists(Attentive(model), e, blind=False) is None  # it says nothing of what it hears
    model.hears = False
    assert shortlists(model, e, blind=False) is None


# Beams


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("wrap", [lambda m: m, Int8Model])
def test_beams_of_all_words_but_the_mask_are_those_of_the_vocabulary(
    wrap: Any, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, e = wrap(hearing()), vectors(9)
    whole = found(model, e, beams=4, guidance=guidance)
    monkeypatch.setattr(shortlist, "WORDS", V - 1)
    asked = noted_heads(model, monkeypatch)
    assert_same(found(model, e, beams=4, guidance=guidance), whole)
    assert asked == [V - 1] * 9


def noted_heads(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the heads that are asked for from now on."""
    asked, head_for = list[int](), model.head_for

    def noting(words: Tensor) -> Any:
        asked.append(len(words))
        return head_for(words)

    monkeypatch.setattr(model, "head_for", noting)
    return asked


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.usefixtures("by_likelihood")
def test_beams_of_some_words_are_those_of_a_model_that_knows_no_others(
    guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "WORDS", 9)
    model, e = hearing(), vectors(8)
    lists = shortlists(model, e, blind=False)
    assert lists is not None
    last = found(model, e, beams=5, guidance=guidance)
    for row, some in enumerate(lists):
        narrow = copy.deepcopy(model)
        narrow.hears = False
        others = torch.ones(V, dtype=torch.bool).index_fill(0, some.words, False)
        narrow.bias[others] = float("-inf")
        assert_same(text(last, row), found(narrow, e[row : row + 1], beams=5, guidance=guidance))
    model.hears = False
    assert not torch.equal(found(model, e, beams=5, guidance=guidance).ids, last.ids)


@pytest.mark.parametrize("wrap", [lambda m: m, Int8Model])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_with_shortlists_a_text_does_not_depend_on_those_beside_it(
    wrap: Any, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "WORDS", 9)
    model, e = wrap(hearing()), vectors(9)
    whole = found(model, e, beams=4, guidance=guidance)
    assert len((whole.ids == END).any(2).sum(1).unique()) > 1  # some end while others are read
    for row in range(len(e)):
        assert_same(found(model, e[row : row + 1], beams=4, guidance=guidance), text(whole, row))
    for rows in (8, 20):
        monkeypatch.setattr(beam, "ROWS", {"cpu": rows})
        assert_same(found(model, e, beams=4, guidance=guidance), whole)


def test_fewer_words_than_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "WORDS", 3)
    last = found(hearing(), vectors(4), beams=6)
    assert last.score.isfinite().all() and not (last.ids == MASK).any()


def test_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "WORDS", 9)
    assert found(hearing(), vectors(0), beams=4).ids.shape == (0, 4, T)


@pytest.mark.parametrize("case", ["blind", "deaf", "gpu"])
def test_beams_that_look_at_the_whole_vocabulary(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, e, guidance = hearing(), vectors(6), 0.0 if case == "blind" else 1.0
    model.hears = case != "deaf"
    if case == "gpu":
        for module in (choice, writer):
            monkeypatch.setattr(module, "is_gpu", lambda e: True)
    whole = found(model, e, beams=4, guidance=guidance)
    monkeypatch.setattr(shortlist, "WORDS", 9)
    asked = noted_heads(model, monkeypatch)
    assert_same(found(model, e, beams=4, guidance=guidance), whole)
    assert not asked
