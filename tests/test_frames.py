"""frames: rows of content get their prefix, suffix and padding, on either side."""

from __future__ import annotations

from typing import Any

import torch

from unembed.frames import Frame, surroundings

IDS = torch.tensor([[11, 12, 13], [21, 99, 99]])  # 99 lies behind the row's end
LENGTHS = torch.tensor([3, 1])


def frame(**changes: Any) -> Frame:
    """Two ids in front, one behind, padding 0."""
    settings: dict[str, Any] = {
        "constants": torch.tensor([[1, 2, 3, 0]]), "before": 2, "after": 1, "leading": "",
        "max_tokens": 8, "pads_left": False, "has_types": False, "extras": {},
    }  # fmt: skip
    return Frame(**(settings | changes))


def test_padding_on_either_side() -> None:
    right = frame().features(IDS, LENGTHS)
    assert right["input_ids"].tolist() == [[1, 2, 11, 12, 13, 3], [1, 2, 21, 3, 0, 0]]
    assert right["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    left = frame(pads_left=True).features(IDS, LENGTHS)
    assert left["input_ids"].tolist() == [[1, 2, 11, 12, 13, 3], [0, 0, 1, 2, 21, 3]]
    assert left["attention_mask"].tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]


def test_content_is_cut_where_the_model_ends() -> None:
    assert frame(max_tokens=2).features(IDS, LENGTHS)["input_ids"].tolist() == [
        [1, 2, 11, 12, 3],
        [1, 2, 21, 3, 0],
    ]


def test_what_else_the_model_is_told() -> None:
    features = frame(has_types=True, extras={"prompt_length": 2}).features(IDS, LENGTHS)
    assert features["prompt_length"] == 2
    assert features["token_type_ids"].shape == (2, 6) and not features["token_type_ids"].any()


def test_surroundings() -> None:
    assert surroundings([[5], [6, 7]], [[5], [6, 7]]) == ([], [])
    assert surroundings([[5, 5], [5]], [[5, 5, 5], [5, 5]]) == ([], [5])
    assert surroundings([[5], [6, 7]], [[1, 5, 2], [1, 67, 2]]) is None
