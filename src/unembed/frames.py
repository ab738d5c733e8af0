"""What an encoder puts around a text's own ids: prompt, special tokens, padding.

Knows ids and masks alone, so that ids can be embedded without going through text. Must not know how a
model is loaded or run, nor how text becomes ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Texts that begin and end in different ways: what surrounds all of them surrounds any.
SAMPLES = ("hello world", "The year 1999", "a", "“Ça va?”", "Москва 東京", "7 days (or so)")


def surroundings(contents: list[list[int]], wholes: list[list[int]]) -> tuple[list[int], list[int]] | None:
    """Find the prefix and suffix that make every whole of its content, if there are such.

    >>> surroundings([[5], [6, 7]], [[1, 5, 2], [1, 6, 7, 2]])
    ([1], [2])
    """
    extra = len(wholes[0]) - len(contents[0])
    for before in range(extra + 1):
        prefix, suffix = wholes[0][:before], wholes[0][before + len(contents[0]) :]
        if all(prefix + c + suffix == w for c, w in zip(contents, wholes, strict=True)):
            return prefix, suffix
    return None


@dataclass(frozen=True)
class Frame:
    """The constant surroundings of a text, and how the rows of a batch are padded."""

    constants: Tensor  # (1, before + after + 1): prefix, suffix, padding
    before: int
    after: int
    leading: str  # put in front of a text to get the tokens it has behind the prompt
    max_tokens: int  # of content; more is cut
    pads_left: bool
    has_types: bool
    extras: dict[str, Any]  # what else the modules are told, such as the prompt's length

    def features(self, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Build a model's input from content ids (B, T), `lengths` (B,) of them in each row."""
        ids, lengths = ids[:, : self.max_tokens], lengths.clamp(max=self.max_tokens).unsqueeze(1)
        T, before, after = ids.shape[1], self.before, self.after
        place = torch.arange(before + T + after, device=ids.device).unsqueeze(0)
        if self.pads_left:
            place = place - (T - lengths)  # (B, W): where a column stands in its row, padding below 0
        behind = place - before - lengths  # from 0 on in the suffix
        real = (place >= 0) & (behind < after)
        # One gather from [content, prefix, suffix, padding]: no loop over rows, nothing read back.
        index = torch.where(place < before, T + place, place - before)
        index = torch.where(behind >= 0, T + before + behind, index)
        index = torch.where(real, index, T + before + after)
        row = torch.cat([ids, self.constants.expand(len(ids), -1)], dim=1).gather(1, index)  # (B, W)
        types = {"token_type_ids": torch.zeros_like(row)} if self.has_types else {}
        return {**self.extras, "input_ids": row, "attention_mask": real.long(), **types}
