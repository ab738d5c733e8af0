"""Masked diffusion: schedules, corruption, loss. Pure functions on tensors.

Knows nothing of models, vectors or text. `t` runs from 0 (clean) to 1 (all masked); a token
survives to time t with probability alpha_t, else it is [MASK] (equation 2 of the paper).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig
from unembed.errors import UnembedError

# Below this t the weights 1/t and -alpha'/(1-alpha) are held, lest one token own a batch.
T_MIN = 1e-4


def alpha(t: Tensor, config: DiffusionConfig) -> Tensor:
    """Probability that a token is still itself at time t.

    >>> alpha(torch.tensor([0.0, 0.25, 1.0]), DiffusionConfig(schedule="linear"))
    tensor([1.0000, 0.7500, 0.0000])
    """
    match config.schedule:
        case "linear":
            return 1 - t
        case "exponential":
            return torch.exp(-config.rate * t)
        case "cosine":
            return torch.cos(t * math.pi / 2)
        case "fixed":
            return torch.full_like(t, 1 - config.mask_ratio)


def alpha_derivative(t: Tensor, config: DiffusionConfig) -> Tensor:
    """Derivative of alpha with respect to t."""
    match config.schedule:
        case "linear":
            return torch.full_like(t, -1.0)
        case "exponential":
            return -config.rate * torch.exp(-config.rate * t)
        case "cosine":
            return -math.pi / 2 * torch.sin(t * math.pi / 2)
        case "fixed":
            return torch.zeros_like(t)


def time_at(masked: Tensor, config: DiffusionConfig) -> Tensor:
    """Time at which that share of the tokens is masked: the inverse of 1 - alpha, at most 1.

    >>> time_at(torch.tensor([0.5]), DiffusionConfig(schedule="exponential", rate=5.0))
    tensor([0.1386])
    """
    match config.schedule:
        case "linear" | "fixed":  # a fixed ratio has no time of its own
            return masked
        case "exponential":
            return (-torch.log1p(-masked) / config.rate).clamp_max(1.0)
        case "cosine":
            return torch.acos(1 - masked) * 2 / math.pi


def elbo_weight(t: Tensor, config: DiffusionConfig) -> Tensor:
    """Weight -alpha'/(1 - alpha) that makes the masked cross entropy a bound on the likelihood.

    Written in forms that stay exact where alpha is near 1.

    >>> elbo_weight(torch.tensor([0.25, 1.0]), DiffusionConfig(schedule="linear"))
    tensor([4., 1.])
    """
    t = t.clamp_min(T_MIN)
    match config.schedule:
        case "linear":
            return 1 / t
        case "exponential":
            return config.rate / torch.expm1(config.rate * t)
        case "cosine":
            return math.pi / 2 / torch.tan(t * math.pi / 4)
        case "fixed":
            raise UnembedError("a fixed mask ratio has no ELBO weight; use --weight mean or inverse-t.")


def sample_t(rows: int, config: DiffusionConfig, *, generator: torch.Generator) -> Tensor:
    """Draw one t in (lowest, 1] a row: independent, or one from each of `rows` equal strata."""
    u = torch.rand(rows, generator=generator, device=generator.device)
    if config.stratified:
        u = (torch.arange(rows, device=u.device) + u) / rows
    return 1 - (1 - config.lowest_t) * u


def draw_masks(t: Tensor, length: int, config: DiffusionConfig, *, generator: torch.Generator) -> Tensor:
    """Choose what is masked (B, T): each place with probability 1 - alpha_t.

    A share of the rows (`suffix_share`) has its last places masked instead, about as many, which
    is what left-to-right decoding meets.
    """
    B, device = len(t), generator.device
    u = torch.rand((B, length), generator=generator, device=device)
    suffix = torch.rand((B, 1), generator=generator, device=device) < config.suffix_share
    places = torch.arange(length, device=device)
    survival = alpha(t, config)[:, None]
    # One draw a row decides where the suffix starts: place i survives iff (i + u) / T < alpha.
    return torch.where(suffix, (places + u[:, :1]) / length >= survival, u >= survival)


def causal_rows(rows: int, config: DiffusionConfig, *, device: torch.device | str) -> Tensor:
    """Which rows of a batch are trained left to right (B,): evenly spread, since t goes with the row.

    >>> causal_rows(4, DiffusionConfig(causal_share=0.5), device="cpu")
    tensor([False,  True, False,  True])
    """
    shares = torch.arange(rows + 1, device=device) * config.causal_share
    return shares.floor().diff() > 0


def embedded_rows(rows: int, config: DiffusionConfig, *, device: torch.device | str) -> Tensor:
    """Which rows of a batch teach what vector a text has (B,): evenly spread among those not `causal_rows`.

    >>> embedded_rows(8, DiffusionConfig(causal_share=0.5, embed_share=0.25), device="cpu").sum()
    tensor(2)
    """
    others = ~causal_rows(rows, config, device=device)
    shares = others.cumsum(0) * (config.embed_share / max(1 - config.causal_share, config.embed_share, 1e-9))
    return F.pad(shares, (1, 0)).floor().diff() > 0


def corrupt(
    x0: Tensor, t: Tensor, config: DiffusionConfig, *, mask_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mask tokens of x0 (B, T) for times t (B,); return xt and what was masked."""
    masked = draw_masks(t, x0.shape[1], config, generator=generator)
    return x0.masked_fill(masked, mask_id), masked


def token_weights(masked: Tensor, t: Tensor, config: DiffusionConfig) -> Tensor:
    """Weight (B, T) of each token's cross entropy, up to the normaliser `weight_total`."""
    match config.weight:
        case "mean":
            return masked.float()
        case "elbo":
            return masked * elbo_weight(t, config)[:, None]
        case "inverse-t":
            return masked / t.clamp_min(T_MIN)[:, None]


def weight_total(masked: Tensor, config: DiffusionConfig) -> Tensor:
    """What the weighted sum is divided by: masked tokens for `mean`, all tokens else."""
    if config.weight == "mean":
        return masked.sum().float().clamp_min(1.0)  # a tiny batch may have nothing masked
    return torch.full((), float(masked.numel()), device=masked.device)


@lru_cache
def capacity(rows: int, length: int, config: DiffusionConfig) -> int:
    """Bound the masked tokens of a batch, so that logits have a fixed shape.

    Five standard deviations above the mean: exceeded about once in a million batches, whose
    surplus then goes without loss. Fixed shapes mean no wait for the device and one compilation.
    """
    t = 1 - (1 - config.lowest_t) * torch.linspace(0.0005, 0.9995, 1000)
    share = 1 - alpha(t, config)
    # A row's masked count varies with the draws given its t (a suffix row's less) and, unless
    # stratified, with t itself.
    within = (share * (1 - share)).mean() * length
    between = torch.zeros(()) if config.stratified else share.var() * length**2
    spread = math.sqrt(rows * float(within + between)) + (length if config.stratified else 0)
    return min(rows * length, math.ceil(rows * length * float(share.mean()) + 5 * spread))


def chosen_places(masked: Tensor, count: int) -> Tensor:
    """Flat indices of `count` places, the masked ones first, in order and without a host sync."""
    order = torch.argsort(masked.flatten().to(torch.uint8), descending=True, stable=True)
    return order[:count]
