"""Uniform numbers that are hashes: of a seed, a text's number, a moment and a counter, and of nothing else.

So a text's draws do not depend on the texts beside it, and are the same on CPUs and GPUs. Knows whole-number
arithmetic alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unembed.errors import check_seed


def stream_keys(seed: int, numbers: Tensor, moment: int) -> Tensor:
    """Make the key of each text's draws at a moment, (A,), of nothing but seed, number and moment."""
    check_seed(seed)
    seed = int(seed)  # numpy's own know no 2**64
    key = torch.zeros_like(numbers)
    for word in (seed % 2**64, seed >> 64, moment % 2**64):
        key = _mix(key + (word - 2**64 if word >= 2**63 else word))
    return _mix(key + numbers)


def draw(keys: Tensor, first: int, count: int) -> Tensor:
    """Draw uniforms (A, count) in [0, 1), those from number `first` on of each key's stream.

    Whole-number arithmetic, so that CPUs and GPUs draw the same, and where the numbers are needed.
    """
    numbers = torch.arange(first, first + count, device=keys.device)
    bits = _mix(keys[:, None] + numbers * _GOLDEN)
    return ((bits >> 40) & (2**24 - 1)).float() / 2**24


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit numbers (the finaliser of splitmix64); products wrap."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))
