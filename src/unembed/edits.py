"""Texts near a text: rows of ids with a few tokens replaced, deleted, inserted or swapped.

Pure functions on tensors, all rows at once. Knows nothing of encoders or of what the copies are for;
unlike the moves of the search, no model fills anything in.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 6  # edits a copy
LONGEST_CHUNK = 3  # tokens on each side of a swap


def edited(
    ids: Tensor, lengths: Tensor, *, end_id: int, pad_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Edit each row 1 to MOST times, as often as each number; return the rows and their lengths.

    Args:
        ids: Rows (B, T) of content, end and padding.
        lengths: Tokens of content (B,), at least one in each.
        end_id: What stands behind a text that is shorter than its row.
        pad_id: What stands behind the end.
        generator: Of all draws, on the device of the rows.
    """
    (B, T), device = ids.shape, ids.device
    # How often, and for each edit: which kind, where, how long each chunk, whose token.
    count = 1 + (torch.rand(B, generator=generator, device=device) * MOST).long()
    draws = torch.rand((MOST, 6, B), generator=generator, device=device)
    original, first_lengths = ids, lengths
    for number, u in enumerate(draws):
        # Tokens come from other rows' texts, so that frequent ones are frequent.
        donor = (u[4] * B).long().clamp_max(B - 1)
        place = (u[5] * first_lengths[donor]).long()
        token = original[donor, place]
        ids, lengths = _edit_once(ids, lengths, count > number, kind=u[0], where=u[1:4], token=token)
    places = torch.arange(T, device=device)
    ids = torch.where(places < lengths[:, None], ids, pad_id)
    return torch.where(places == lengths[:, None], end_id, ids), lengths


def _edit_once(
    ids: Tensor, lengths: Tensor, active: Tensor, *, kind: Tensor, where: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Make one edit in each active row: a half replace, the others delete, insert or swap."""
    T = ids.shape[1]
    places = torch.arange(T, device=ids.device)
    n = lengths[:, None]
    deletes = active & (kind >= 0.5) & (kind < 0.67) & (lengths > 1)
    inserts = active & (kind >= 0.67) & (kind < 0.84) & (lengths < T)
    swaps = active & (kind >= 0.84) & (lengths > 1)
    puts = active & ~deletes & ~swaps & ((kind < 0.5) | inserts)
    # A text may be inserted into behind its last token, too.
    at = (where[0] * (lengths + inserts)).long()[:, None].minimum(n - 1 + inserts[:, None])
    # The chunks of a swap, of a and b tokens, lie one behind the other inside the text.
    at = torch.where(swaps[:, None], at.clamp_max(n - 2).clamp_min(0), at)
    a = 1 + (where[1] * LONGEST_CHUNK).long()[:, None].minimum(n - at - 2).clamp_min(0)
    b = 1 + (where[2] * LONGEST_CHUNK).long()[:, None].minimum(n - at - a - 1).clamp_min(0)
    source = places.expand_as(ids)
    source = source + (deletes[:, None] & (places >= at))
    source = source - (inserts[:, None] & (places > at)).long()
    moved = torch.where((places >= at) & (places < at + b), places + a, source)
    moved = torch.where((places >= at + b) & (places < at + a + b), places - b, moved)
    source = torch.where(swaps[:, None], moved, source)
    out = ids.gather(1, source.clamp(0, T - 1))
    out = torch.where(puts[:, None] & (places == at), token[:, None], out)
    return out, lengths + inserts.long() - deletes.long()
