"""edits: what comes out is near what went in, and is still a text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unembed.edits import MOST, edited

END, PAD = 1, 0
SIZE = 1000


def rows_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Rows in which no token comes twice, with an end and padding."""
    ids = torch.arange(2, 2 + len(lengths) * width).view(len(lengths), width)
    places, n = torch.arange(width), torch.tensor(lengths)
    ids = torch.where(places < n[:, None], ids, PAD)
    return torch.where(places == n[:, None], END, ids), n


def edit(ids: Tensor, lengths: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Edit rows with a seed."""
    return edited(ids, lengths, end_id=END, pad_id=PAD, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 1000))
def test_an_edited_text_is_a_text(lengths: list[int], seed: int) -> None:
    ids, n = rows_of(lengths, 9)
    before = ids.clone()
    out, m = edit(ids, n, seed)
    assert torch.equal(ids, before)  # what went in is left alone
    assert (m >= 1).all() and (m <= 9).all() and ((m - n).abs() <= MOST).all()
    places = torch.arange(9)
    assert torch.equal((out == END).sum(1), (m < 9).long())
    assert torch.equal(out == PAD, places > m[:, None])
    # Every token is the row's own, or one of another's.
    assert torch.isin(out[places < m[:, None]], ids[ids > END]).all()


def test_it_edits_in_every_way_and_seldom_in_none() -> None:
    ids, n = rows_of([8] * 300, 12)
    out, m = edit(ids, n, 0)
    same = (out == ids).all(1)
    assert same.float().mean() < 0.05  # an edit may undo another, or put a token where it stands
    kept = torch.tensor([torch.isin(row[row > END], own).sum() for row, own in zip(out, ids, strict=True)])
    assert (m > 8).any() and (m < 8).any()
    assert ((m == 8) & (kept == 7)).any()  # one replaced
    swapped = (m == 8) & (kept == 8) & ~same
    assert swapped.any()
    # The numbers of edits are spread: some rows are hardly changed, some thoroughly.
    changed = 8 - kept
    assert (changed <= 1).float().mean() > 0.2 and (changed >= 3).float().mean() > 0.1


def test_a_swap_keeps_every_token_and_exchanges_neighbours() -> None:
    ids, n = rows_of([8] * 2000, 8)
    out, m = edit(ids, n, 1)
    for row, own in zip(out.tolist(), ids.tolist(), strict=True):
        moved = [i for i, (a, b) in enumerate(zip(row, own, strict=True)) if a != b]
        if sorted(row) == sorted(own) and 0 < len(moved) <= 3:  # one swap of a chunk of at most three
            part, was = row[moved[0] : moved[-1] + 1], own[moved[0] : moved[-1] + 1]
            assert any(part == was[k:] + was[:k] for k in range(1, len(was)))
            return
    pytest.fail("no row was changed by a single swap")


def test_the_seed_decides() -> None:
    ids, n = rows_of([5, 3, 8, 1], 8)
    assert torch.equal(edit(ids, n, 3)[0], edit(ids, n, 3)[0])
    assert not torch.equal(edit(ids, n, 3)[0], edit(ids, n, 4)[0])
