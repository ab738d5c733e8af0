"""Moves: whatever the rows and the draws, rows stay in form and something changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unembed.config import ModelConfig
from unembed.errors import UnembedError
from unembed.moves import KNOBS, MOVES, Parents, find_move, make, row_lengths, settle

T, WORDS = 8, 20
CONFIG = ModelConfig(max_tokens=T, vocab_size=WORDS + 3, mask_id=WORDS, end_id=WORDS + 1, pad_id=WORDS + 2)
every_move = pytest.mark.parametrize("name", list(MOVES))


def rows_of(*texts: list[int]) -> Tensor:
    """Rows in form."""
    rows = torch.full((len(texts), T), CONFIG.pad_id)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
        row[len(text) : len(text) + 1] = CONFIG.end_id
    return rows


def parents_of(ids: Tensor, mates: Tensor, *, seed: int = 0) -> Parents:
    draw = torch.Generator().manual_seed(seed)
    return Parents(
        ids=ids,
        confidence=torch.rand(ids.shape, generator=draw),
        lengths=row_lengths(ids, CONFIG),
        mates=mates,
        mate_confidence=torch.rand(ids.shape, generator=draw),
        mate_lengths=row_lengths(mates, CONFIG),
        uniforms=torch.rand(ids.shape, generator=draw),
        knobs=torch.rand((len(ids), KNOBS), generator=draw),
    )


def follow(name: str, text: list[int], *knobs: float, mate: list[int] | None = None) -> list[str]:
    """Make one move with given knobs; show the content, a mask as '_'."""
    ids, mates = rows_of(text), rows_of(mate or text)
    parents = parents_of(ids, mates)
    parents.knobs[0, : len(knobs)] = torch.tensor(knobs)
    moved = make(parents, torch.tensor([list(MOVES).index(name)]), CONFIG)
    length = int(row_lengths(moved.ids, CONFIG))
    return ["_" if i == CONFIG.mask_id else str(i) for i in moved.ids[0, :length].tolist()]


texts = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=T)


@every_move
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_a_move_keeps_rows_in_form(name: str, pairs: list[tuple[list[int], list[int]]], seed: int) -> None:
    ids, mates = rows_of(*(a for a, _ in pairs)), rows_of(*(b for _, b in pairs))
    parents = parents_of(ids, mates, seed=seed)
    moved = make(parents, torch.full((len(ids),), list(MOVES).index(name)), CONFIG)
    lengths = row_lengths(moved.ids, CONFIG)
    places = torch.arange(T)
    assert moved.ids.shape == moved.confidence.shape == moved.avoid.shape == ids.shape
    assert (lengths >= 1).all(), "a text never becomes empty"
    assert (moved.ids != ids).any(1).all(), "a move changes something"
    expected = torch.where(places == lengths, CONFIG.end_id, CONFIG.pad_id)
    assert torch.where(places < lengths, expected, moved.ids).equal(expected), "content, end, padding"
    content = places < lengths
    assert not (content & ((moved.ids == CONFIG.end_id) | (moved.ids == CONFIG.pad_id))).any()
    masked = moved.ids == CONFIG.mask_id
    assert (moved.confidence[masked] == 0).all()
    assert (moved.confidence[content & ~masked] > 0).all(), "confidence goes where its token goes"
    named = moved.avoid != CONFIG.mask_id
    assert moved.avoid[named].equal(ids[named]) and masked[named].all()
    # What was there is copied, never made up.
    both = torch.cat((ids, mates), 1)
    assert all(set(row[keep].tolist()) <= set(known.tolist()) for row, keep, known in
               zip(moved.ids, content & ~masked, both, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "knobs", "expected"),
    [
        ("span", (0.3, 0.5), "1 2 _ _ 5"),
        ("replace", (0.5,), "1 2 _ 4 5"),
        ("insert", (0.0, 0.0), "_ 1 2 3 4 5"),
        ("insert", (0.9, 0.99), "1 2 3 4 5 _ _"),
        ("delete", (0.0, 0.0), "2 3 4 5"),
        ("delete", (0.9, 0.99), "1 2 3"),
        ("exchange", (0.0, 0.0, 0.99), "2 3 4 5 _"),
        ("exchange", (0.0, 0.99, 0.0), "_ 1 2 3 4"),
        ("resize", (0.0, 0.0, 0.99), "_ _ _ 2 3 4 5"),
        ("resize", (0.3, 0.99, 0.3), "1 2 3 _"),
        ("resize", (0.0, 0.5, 0.0), "1 2 _ _ _ 4 5"),
        ("resize", (0.99, 0.0, 0.5), "_ _ _ _ _ 5"),
        ("swap", (0.0, 0.0, 0.0), "2 1 3 4 5"),
        ("swap", (0.5, 0.0, 0.99), "1 2 5 3 4"),
        ("swap", (0.99, 0.0, 0.0), "5 1 2 3 4"),
        ("cross", (0.4, 0.5), "1 2 13 14"),
        ("cross", (0.4, 0.99), "1 2"),
        ("cross", (0.4, 0.0), "1 2 11 12 13 14"),
        ("tail", (0.3, 0.0), "1 2 3 4 _ _"),
        ("rewrite", (0.5,), "1 2 _ _ _ _ _ _"),
    ],
)
def test_what_a_move_does(name: str, knobs: tuple[float, ...], expected: str) -> None:
    assert " ".join(follow(name, [1, 2, 3, 4, 5], *knobs, mate=[11, 12, 13, 14])) == expected


def test_a_text_that_fills_its_row_may_go_on_behind_its_old_end() -> None:
    assert follow("delete", list(range(T)), 0.0, 0.0) == [*map(str, range(1, T)), "_"]
    assert follow("insert", list(range(T)), 0.0, 0.0) == ["_", *map(str, range(T - 1))]


def test_unsure_masks_what_the_model_was_unsure_of() -> None:
    parents = parents_of(rows_of([1, 2, 3, 4, 5]), rows_of([1]))
    parents.confidence[0] = torch.tensor([0.9, 0.9, 0.1, 0.9, 0.9, 0, 0, 0])
    moved = make(parents, torch.tensor([list(MOVES).index("unsure")]), CONFIG)
    assert moved.ids[0, 2] == CONFIG.mask_id


def test_differ_masks_where_the_two_differ_and_redraft_keeps_a_little() -> None:
    parents = parents_of(rows_of([1, 2, 3, 4, 5]), rows_of([1, 9, 3, 4]))
    parents.knobs[0, 0] = 0.999
    parents.uniforms[0] = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0, 0, 0])
    differ, redraft = (
        make(parents, torch.tensor([list(MOVES).index(n)]), CONFIG) for n in ("differ", "redraft")
    )
    assert (differ.ids[0] == CONFIG.mask_id).nonzero().flatten().tolist() == [1, 4]
    assert (redraft.ids[0] == CONFIG.mask_id).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    parents.knobs[0, 0] = 0.0
    redraft = make(parents, torch.tensor([list(MOVES).index("redraft")]), CONFIG)
    assert (redraft.ids[0] == CONFIG.mask_id).nonzero().flatten().tolist() == [0, 1]


def test_what_replaces_a_token_is_another() -> None:
    parents = parents_of(rows_of([1, 2, 3]), rows_of([4]))
    moved = make(parents, torch.tensor([list(MOVES).index("replace")]), CONFIG)
    masked = moved.ids == CONFIG.mask_id
    assert masked.sum() == 1 and moved.avoid[masked].equal(parents.ids[masked])
    assert (make(parents, torch.tensor([list(MOVES).index("insert")]), CONFIG).avoid == CONFIG.mask_id).all()


def test_settle_cuts_at_the_end_and_closes_gaps() -> None:
    row = torch.tensor([[5, CONFIG.pad_id, CONFIG.mask_id, 6, CONFIG.end_id, 7, CONFIG.end_id, 8]])
    ids, order = settle(row, CONFIG)
    assert ids.equal(rows_of([5, CONFIG.mask_id, 6]))
    assert order[0, :3].tolist() == [0, 2, 3]
    assert settle(ids, CONFIG)[0].equal(ids)


def test_the_registry_names_what_it_knows() -> None:
    assert all(find_move(name).name == name for name in MOVES)
    with pytest.raises(UnembedError, match="unknown move 'swop'; did you mean 'swap'"):
        find_move("swop")
