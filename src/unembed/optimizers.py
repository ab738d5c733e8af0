"""Optimisers: AdamW for everything, or Muon for the matrices inside the blocks.

Knows parameters and their names; nothing of data or losses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unembed.config import TrainConfig


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al., 2024), scaled to AdamW's size.

    Matrices of one shape are stacked and orthogonalised together: a dozen layers cost the
    launches of one. Those of `params` that are in `fused` are q, k and v in one: three matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float,
        fused: Iterable[Tensor] = (),
    ) -> None:
        """Take 2-D parameters only."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._fused = {id(p) for p in fused}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            stacks: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])  # Nesterov
                pieces = 3 if id(p) in self._fused else 1
                for part, piece in zip(p.chunk(pieces), update.chunk(pieces), strict=True):
                    stacks[part.shape].append((part, piece))
            for shape, pairs in stacks.items():
                updates = orthogonalise(torch.stack([update for _, update in pairs]))
                rate = group["lr"]
                scale = 0.2 * max(shape) ** 0.5  # the RMS of an AdamW update is about 0.2
                parts = [part for part, _ in pairs]
                torch._foreach_mul_(parts, 1 - rate * group["weight_decay"])
                torch._foreach_add_(
                    parts, [u.to(p.dtype) for u, p in zip(updates, parts, strict=True)], alpha=-rate * scale
                )


def orthogonalise(stack: Tensor, *, iterations: int = 5) -> Tensor:
    """Bring the singular values of each matrix of a stack (N, m, n) near 1, by Newton-Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    # bf16 is enough for directions, and fast where matrix units are; CPUs keep fp32.
    x = stack.to(torch.bfloat16) if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Split the trainable parameters: Muon takes block matrices if asked, AdamW the rest.

    Weight decay touches matrices only. Each group keeps its peak rate as `peak`.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    use_muon = config.optimizer == "muon"
    block = [p for name, p in named if use_muon and p.dim() == 2 and _is_block_matrix(name)]
    taken = {id(p) for p in block}
    decayed = [p for _, p in named if p.dim() >= 2 and id(p) not in taken]
    plain = [p for _, p in named if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = any(p.is_cuda for _, p in named)
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-8, fused=fused
    )
    found: list[torch.optim.Optimizer] = [adamw]
    if block:
        # By name, not by shape: mmBERT's feed-forward matrix is three times as tall as wide, too.
        qkv = [p for name, p in named if name.lower().endswith("qkv.weight")]
        found.append(Muon(block, lr=config.muon_rate, weight_decay=config.weight_decay, fused=qkv))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def _is_block_matrix(name: str) -> bool:
    """Tell the attention and feed-forward matrices of the blocks from all other weights."""
    return "blocks." in name and "modulation" not in name


def rate_at(step: int, progress: float, config: TrainConfig) -> float:
    """Share of the peak rate at a step; `progress` is the share of the run that is done.

    >>> rate_at(0, 0.0, TrainConfig(warmup=10)), rate_at(100, 0.75, TrainConfig(warmup=0, decay="linear"))
    (0.1, 0.5)
    """
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    left = 1 - max(0.0, progress - config.decay_start) / max(1 - config.decay_start, 1e-9)
    match config.decay:
        case "constant":
            return warm
        case "linear":
            return warm * max(left, 0.0)
        case "cosine":
            return warm * 0.5 * (1 - math.cos(math.pi * max(left, 0.0)))
