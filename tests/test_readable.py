"""Drafts and standings as people read them: cut at the end, masks shown, numbers rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from recovering import make_tokenizer

from unembed.config import ModelConfig
from unembed.decode import Draft
from unembed.moves import MOVES
from unembed.readable import content_lengths, read_draft, read_round, read_standing, read_step
from unembed.results import MoveCount
from unembed.search import Standing

T = 8
TOKENIZER = make_tokenizer()
SHAPE: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "config": ModelConfig(max_tokens=T, mask_id=TOKENIZER.mask_id, end_id=TOKENIZER.end_id),
}


def rows_of(*texts: str) -> torch.Tensor:
    return torch.from_numpy(TOKENIZER.encode(texts, max_tokens=T, allow_empty=True).ids)


def standing_of(pool: list[str], cosine: list[float]) -> Standing:
    """Where the search for one text stands: its pool, and a free place for each cosine of -inf."""
    ids, cosines = rows_of(*pool)[None], torch.tensor([cosine])
    confidence = torch.full(ids.shape, 0.5)
    tries, entered, improved = (torch.full((1, len(MOVES)), count) for count in (3, 2, 1))
    calls, passes = torch.tensor([7]), torch.tensor([5])
    vectors = torch.zeros(*cosines.shape, 4)
    return Standing(ids, confidence, vectors, cosines, cosines, calls, passes, tries, entered, improved)


def test_lengths_end_at_the_first_end() -> None:
    rows = np.array([[5, 2, 7, 2], [5, 6, 7, 8], [2, 2, 2, 2]])
    assert content_lengths(rows, end_id=2).tolist() == [1, 4, 0]


def test_a_finished_draft_is_cut_at_its_ends() -> None:
    ids = rows_of("the old cat", "a small red dog sat on the mat", "")
    confidence = torch.full(ids.shape, 1 / 3)
    likeness = torch.tensor([0.12345678, torch.nan, torch.nan])
    draft = Draft(ids, confidence, torch.tensor([4, 5, 6]), likeness)
    found = read_draft(draft, strategy="confidence", **SHAPE)
    assert [one.text for one in found] == ["the old cat", "a small red dog sat on the mat", ""]
    assert [one.ids for one in found] == [ids[0, :3].tolist(), ids[1].tolist(), []]
    assert [len(one.confidences) for one in found] == [3, T, 0]
    assert found[0].confidences == pytest.approx([0.333333] * 3)
    assert [(one.strategy, one.forward_passes) for one in found] == [("confidence", n) for n in (4, 5, 6)]
    assert [one.likeness for one in found] == [0.123457, None, None]


def test_a_frame_shows_what_is_masked() -> None:
    ids = torch.full((1, T), TOKENIZER.mask_id)
    ids[0, 0] = rows_of("cat")[0, 0]
    confidence = torch.zeros(1, T)
    confidence[0, 0] = 0.5
    draft = Draft(ids, confidence, torch.tensor([1]), torch.tensor([torch.nan]))
    first = read_step(draft, index=1, total=T, **SHAPE)
    assert (first.index, first.total, first.likeness) == (1, T, None)
    assert first.pieces == ["cat"] + ["_"] * (T - 1)
    assert first.ids == ids[0].tolist()
    assert first.confidences == [0.5] + [0.0] * (T - 1)
    assert first.text == "cat"


@pytest.mark.parametrize("known", [True, False])
def test_only_the_encoder_itself_knows_that_a_text_is_found(known: bool) -> None:
    standing = standing_of(["the old cat", "a dog"], [1.0, 0.25])
    (found,) = read_standing(standing, strategy="beam", ranked_by="fake", known=known, **SHAPE)
    assert (found.text, found.cosine, found.likeness) == ("the old cat", 1.0, None)
    assert (found.strategy, found.ranked_by) == ("beam", "fake")
    assert (found.encoder_calls, found.forward_passes) == (7, 5)
    assert found.exact is (True if known else None)
    assert read_round(standing, index=1, total=4, known=known, tokenizer=TOKENIZER).exact is known


def test_where_every_candidate_was_blank_so_is_the_answer() -> None:
    standing = standing_of(["the", "the"], [-torch.inf, -torch.inf])
    (found,) = read_standing(standing, strategy="beam", ranked_by="fake", known=True, **SHAPE)
    assert (found.text, found.ids, found.cosine, found.exact) == ("", [], 0.0, False)


def test_a_round_shows_its_pool_without_the_free_places() -> None:
    standing = standing_of(["the old cat", "a dog", "the"], [0.75, 0.12345678, -torch.inf])
    found = read_round(standing, index=2, total=4, known=True, tokenizer=TOKENIZER)
    assert (found.index, found.total, found.text, found.cosine) == (2, 4, "the old cat", 0.75)
    assert found.pool == [("the old cat", 0.75), ("a dog", 0.123457)]
    assert (found.encoder_calls, found.exact) == (7, False)
    assert found.moves == {name: MoveCount(tries=3, entered=2, improved=1) for name in MOVES}
