"""Schedules against their closed forms, and the bound against a likelihood known exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unembed import diffusion
from unembed.config import Config, DiffusionConfig, Schedule
from unembed.errors import UnembedError

SCHEDULES: tuple[Schedule, ...] = ("linear", "exponential", "cosine", "fixed")
TIMES = st.floats(1e-3, 1.0)
RATES = st.floats(0.01, 20.0)


def double(t: float) -> Tensor:
    return torch.tensor([t], dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- schedules


@pytest.mark.parametrize(
    ("schedule", "start", "end"),
    [("linear", 1, 0), ("exponential", 1, math.exp(-3)), ("cosine", 1, 0), ("fixed", 0.6, 0.6)],
)
def test_alpha_at_both_ends(schedule: Schedule, start: float, end: float) -> None:
    config = DiffusionConfig(schedule=schedule, rate=3.0, mask_ratio=0.4)
    ends = diffusion.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64), config)
    assert ends.tolist() == pytest.approx([start, end], abs=1e-12)


@given(t=TIMES, rate=RATES)
@settings(max_examples=50, deadline=None)
def test_alpha_closed_forms(t: float, rate: float) -> None:
    values = {s: diffusion.alpha(double(t), DiffusionConfig(schedule=s, rate=rate)).item() for s in SCHEDULES}
    assert values["linear"] == pytest.approx(1 - t)
    assert values["exponential"] == pytest.approx(math.exp(-rate * t))
    assert values["cosine"] == pytest.approx(math.cos(math.pi * t / 2), abs=1e-12)
    assert values["fixed"] == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(t=st.floats(1e-2, 0.99), rate=RATES)
@settings(max_examples=50, deadline=None)
def test_derivative(schedule: Schedule, t: float, rate: float) -> None:
    config = DiffusionConfig(schedule=schedule, rate=rate)
    here = double(t).requires_grad_()
    value = diffusion.alpha(here, config)
    exact = torch.autograd.grad(value.sum(), here)[0].item() if value.requires_grad else 0.0
    derivative = diffusion.alpha_derivative(double(t), config).item()
    assert derivative == pytest.approx(exact, rel=1e-12, abs=1e-15)
    step = 1e-5
    above, below = (diffusion.alpha(double(t + d), config).item() for d in (step, -step))
    assert derivative == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("schedule", ["linear", "exponential", "cosine"])
@given(t=TIMES, rate=RATES)
@settings(max_examples=50, deadline=None)
def test_elbo_weight_is_the_closed_form(schedule: Schedule, t: float, rate: float) -> None:
    config = DiffusionConfig(schedule=schedule, rate=rate)
    survival = diffusion.alpha(double(t), config)
    expected = -diffusion.alpha_derivative(double(t), config) / (1 - survival)
    assert diffusion.elbo_weight(double(t), config).item() == pytest.approx(expected.item(), rel=1e-7)
    # In single precision too, where 1 - alpha would have lost its digits at small t.
    single = diffusion.elbo_weight(double(t).float(), config).item()
    assert single == pytest.approx(expected.item(), rel=1e-5)


def test_weights_stay_finite_at_zero() -> None:
    masked = torch.ones(1, 2, dtype=torch.bool)
    for schedule in ("linear", "exponential", "cosine"):
        for weight in ("elbo", "inverse-t"):
            config = Config().override(schedule=schedule, weight=weight).diffusion
            assert diffusion.token_weights(masked, torch.zeros(1), config).isfinite().all()


def test_a_fixed_ratio_has_no_elbo() -> None:
    config = DiffusionConfig(schedule="fixed", weight="elbo")
    with pytest.raises(UnembedError, match="no ELBO weight"):
        diffusion.elbo_weight(torch.ones(2), config)
    with pytest.raises(UnembedError, match="--weight mean or inverse-t"):
        diffusion.token_weights(torch.ones(2, 3, dtype=torch.bool), torch.ones(2), config)


# --- the bound, with a perfect model of a distribution small enough to enumerate

LENGTH, LETTERS = 3, 3
MASKS = list(itertools.product([False, True], repeat=LENGTH))


def toy_distribution() -> np.ndarray:
    """Draw a joint distribution of LENGTH letters that depend on each other."""
    joint = np.random.default_rng(7).gamma(0.5, size=(LETTERS,) * LENGTH) + 0.01
    joint /= joint.sum()
    marginals = [joint.sum(axis=tuple(j for j in range(LENGTH) if j != i)) for i in range(LENGTH)]
    apart = np.einsum("i,j,k->ijk", *marginals)
    assert np.abs(joint - apart).max() > 0.02  # independent letters would prove too little
    return joint


def perfect_losses(joint: np.ndarray, x: tuple[int, ...]) -> Tensor:
    """-log p(x_i | the visible letters) of each mask (8) and place (3); 0 where not masked."""
    out = np.zeros((len(MASKS), LENGTH))
    for row, mask in enumerate(MASKS):
        visible = joint.sum(axis=tuple(i for i in range(LENGTH) if mask[i]), keepdims=True)
        shown = visible[tuple(0 if m else x[i] for i, m in enumerate(mask))]
        for i in range(LENGTH):
            if mask[i]:
                others = tuple(j for j in range(LENGTH) if mask[j] and j != i)
                both = joint.sum(axis=others, keepdims=True)
                index = tuple(0 if j in others else x[j] for j in range(LENGTH))
                out[row, i] = -math.log(both[index] / shown)
    return torch.from_numpy(out)


def expected_loss(survival: Tensor, losses: Tensor) -> Tensor:
    """Sum over masks of their probability times the summed loss, at each survival probability."""
    count = torch.tensor(MASKS).sum(1)
    chance = (1 - survival[:, None]) ** count * survival[:, None] ** (LENGTH - count)
    return chance @ losses.sum(1)


def integrate(f: Callable[[Tensor], Tensor], low: float, high: float, *, pieces: int = 1) -> float:
    """Gauss-Legendre with 40 nodes a piece, in double precision."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(40))
    width = (high - low) / pieces
    starts = low + width * torch.arange(pieces, dtype=torch.float64)
    t = (starts[:, None] + width * (nodes + 1) / 2).flatten()
    return float((f(t).view(pieces, -1) @ weights).sum() * width / 2)


def bound(config: DiffusionConfig, losses: Tensor, *, until: float = 1.0, pieces: int = 1) -> float:
    def integrand(t: Tensor) -> Tensor:
        return diffusion.elbo_weight(t, config) * expected_loss(diffusion.alpha(t, config), losses)

    return integrate(integrand, 0.0, until, pieces=pieces)


def tail(losses: Tensor, *, above: float) -> float:
    """Share of the bound from mask rates u > `above`: the weight is du/u, whatever the schedule."""
    return integrate(lambda u: expected_loss(1 - u, losses) / u, above, 1.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_bound_is_the_likelihood(schedule: Schedule) -> None:
    joint = toy_distribution()
    config = DiffusionConfig(schedule=schedule)
    for x in itertools.product(range(LETTERS), repeat=LENGTH):
        value = bound(config, perfect_losses(joint, x))
        assert value == pytest.approx(-math.log(joint[x]), abs=1e-9)


@pytest.mark.parametrize("rate", [3.0, 5.0])
def test_bound_of_exponential_is_the_likelihood_at_infinity(rate: float) -> None:
    """alpha_1 = exp(-rate) > 0: [0, 1] leaves out exactly the mask rates above 1 - alpha_1."""
    joint = toy_distribution()
    config = DiffusionConfig(schedule="exponential", rate=rate)
    for x in itertools.product(range(LETTERS), repeat=LENGTH):
        losses = perfect_losses(joint, x)
        likelihood = -math.log(joint[x])
        assert bound(config, losses, until=8.0, pieces=16) == pytest.approx(likelihood, abs=1e-8)
        missing = tail(losses, above=1 - math.exp(-rate))
        assert missing > 1e-4
        assert likelihood - bound(config, losses, pieces=4) == pytest.approx(missing, abs=1e-9)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_sampled_loss_estimates_the_likelihood(schedule: Schedule, stratified: bool) -> None:
    """What training does (draw t, corrupt, weigh) is unbiased for the same number."""
    joint, x, rows = toy_distribution(), (0, 2, 1), 100_000
    losses = perfect_losses(joint, x)
    config = DiffusionConfig(schedule=schedule, weight="elbo", stratified=stratified)
    x0, draw = torch.tensor(x).expand(rows, LENGTH), seeded(3)
    t = diffusion.sample_t(rows, config, generator=draw)
    xt, masked = diffusion.corrupt(x0, t, config, mask_id=9, generator=draw)
    assert torch.equal(xt == 9, masked)
    which = (masked * torch.tensor([4, 2, 1])).sum(1)  # MASKS counts in binary
    weighted = diffusion.token_weights(masked, t, config) * losses[which]
    estimate = float(weighted.sum() / diffusion.weight_total(masked, config))
    error = float(weighted.sum(1).std()) / math.sqrt(rows) / LENGTH
    assert error < 0.02
    assert abs(estimate + math.log(joint[x]) / LENGTH) < 4 * error


def test_inverse_t_is_the_elbo_weight_of_linear_alone() -> None:
    masked, t = torch.ones(4, 2, dtype=torch.bool), torch.tensor([0.1, 0.4, 0.7, 1.0])
    inverse = DiffusionConfig(schedule="linear", weight="inverse-t")
    for schedule in ("linear", "exponential", "cosine"):
        elbo = DiffusionConfig(schedule=schedule, weight="elbo")
        same = torch.allclose(
            diffusion.token_weights(masked, t, inverse), diffusion.token_weights(masked, t, elbo)
        )
        assert same == (schedule == "linear")


def test_mean_weight() -> None:
    masked = torch.tensor([[True, False, True], [False, False, True]])
    config = DiffusionConfig(weight="mean")
    assert diffusion.token_weights(masked, torch.rand(2), config).tolist() == [[1, 0, 1], [0, 0, 1]]
    assert diffusion.weight_total(masked, config) == 3
    assert diffusion.weight_total(masked, DiffusionConfig(weight="elbo")) == 6


# --- drawing


@pytest.mark.parametrize("suffix_share", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_share_of_masked_tokens(schedule: Schedule, t: float, suffix_share: float) -> None:
    config = DiffusionConfig(schedule=schedule, suffix_share=suffix_share, mask_ratio=0.3)
    rows, length = 4_000, 24
    x0 = torch.randint(0, 9, (rows, length), generator=seeded())
    xt, masked = diffusion.corrupt(x0, torch.full((rows,), t), config, mask_id=99, generator=seeded(1))
    share = 1 - diffusion.alpha(double(t), config).item()
    error = math.sqrt(share * (1 - share) / masked.numel())
    assert masked.float().mean().item() == pytest.approx(share, abs=4.5 * error)
    assert (xt[masked] == 99).all()
    assert torch.equal(xt[~masked], x0[~masked])
    if suffix_share:
        assert (masked[:, :-1] <= masked[:, 1:]).all()
        counts = masked.sum(1)
        assert counts.max() - counts.min() <= 1  # the share itself, rounded at random


def test_share_of_suffix_rows() -> None:
    config = DiffusionConfig(suffix_share=0.3)
    x0 = torch.zeros(4_000, 32, dtype=torch.long)
    _, masked = diffusion.corrupt(x0, torch.full((4_000,), 0.5), config, mask_id=9, generator=seeded())
    suffixes = (masked[:, :-1] <= masked[:, 1:]).all(1)  # by chance once in 10^8 rows
    assert suffixes.float().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_everything_is_masked_at_one(schedule: Schedule) -> None:
    config = DiffusionConfig(schedule=schedule, suffix_share=0.5)
    x0 = torch.zeros(200, 32, dtype=torch.long)
    for t, share in ((1.0, 1.0), (0.0, 0.0)):
        _, masked = diffusion.corrupt(x0, torch.full((200,), t), config, mask_id=9, generator=seeded())
        assert masked.float().mean() == share


@pytest.mark.parametrize("rows", [1, 7, 400])
def test_stratified_t_has_one_draw_a_stratum(rows: int) -> None:
    t = diffusion.sample_t(rows, DiffusionConfig(stratified=True), generator=seeded())
    assert ((t >= 0) & (t <= 1)).all()
    assert sorted((t.double() * rows).ceil().long().tolist()) == list(range(1, rows + 1))
    free = diffusion.sample_t(400, DiffusionConfig(stratified=False), generator=seeded())
    assert ((free > 0) & (free <= 1)).all()
    assert len(set((free * 400).ceil().tolist())) < 300  # 63 % of the strata are met by chance


def test_no_t_below_the_lowest() -> None:
    t = diffusion.sample_t(1000, DiffusionConfig(lowest_t=0.3), generator=seeded())
    assert 0.3 <= t.min() < 0.302 and 0.998 < t.max() <= 1
    assert t.mean() == pytest.approx(0.65, abs=1e-3)


def test_same_seed_same_draws() -> None:
    config = DiffusionConfig(suffix_share=0.2)
    x0 = torch.arange(12 * 8).view(12, 8)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        t = diffusion.sample_t(12, config, generator=generator)
        return t, diffusion.corrupt(x0, t, config, mask_id=-1, generator=generator)[0]

    first, again, other = draw(4), draw(4), draw(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# --- rows of other kinds


@given(rows=st.integers(1, 600), causal=st.floats(0, 1), more=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_embedded_rows_are_a_share_of_all_and_evenly_spread_among_those_not_causal(
    rows: int, causal: float, more: float
) -> None:
    config = DiffusionConfig(causal_share=causal, embed_share=more * (1 - causal))
    left = diffusion.causal_rows(rows, config, device="cpu")
    whole = diffusion.embedded_rows(rows, config, device="cpu")
    assert whole.shape == (rows,) and not (left & whole).any()
    assert abs(int(whole.sum()) - rows * config.embed_share) <= 1 + 1e-3
    so_far = whole[~left].cumsum(0) - more * torch.arange(1, int((~left).sum()) + 1)
    assert not len(so_far) or float(so_far.abs().max()) <= 1 + 1e-3


@pytest.mark.parametrize(
    ("causal", "share", "count"), [(0.0, 0.0, 0), (1.0, 0.0, 0), (0.0, 1.0, 10), (0.7, 0.3, 3), (0.7, 0.1, 1)]
)
def test_embedded_rows_at_the_ends_of_their_share(causal: float, share: float, count: int) -> None:
    config = DiffusionConfig(causal_share=causal, embed_share=share)
    assert int(diffusion.embedded_rows(10, config, device="cpu").sum()) == count


# --- a fixed number of places


@pytest.mark.parametrize("lowest_t", [0.0, 0.3])
@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("suffix_share", [0.0, 0.5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_capacity_holds_and_is_tight(
    schedule: Schedule, suffix_share: float, stratified: bool, lowest_t: float
) -> None:
    config = DiffusionConfig(
        schedule=schedule, suffix_share=suffix_share, stratified=stratified, lowest_t=lowest_t
    )
    rows, length, batches = 256, 32, 80
    x0, draw = torch.zeros(rows, length, dtype=torch.long), seeded()
    counts = []
    for _ in range(batches):
        t = diffusion.sample_t(rows, config, generator=draw)
        counts.append(int(diffusion.corrupt(x0, t, config, mask_id=1, generator=draw)[1].sum()))
    capacity = diffusion.capacity(rows, length, config)
    assert max(counts) <= capacity <= rows * length
    assert capacity < 1.3 * np.mean(counts)


def test_capacity_is_never_more_than_there_is() -> None:
    assert diffusion.capacity(1, 4, DiffusionConfig()) == 4
    assert diffusion.capacity(8, 32, DiffusionConfig(schedule="fixed", mask_ratio=1.0)) == 256


def test_chosen_places_are_the_masked_ones_first_and_in_order() -> None:
    masked = torch.tensor([[False, True, False], [True, True, False]])
    assert diffusion.chosen_places(masked, 3).tolist() == [1, 3, 4]
    assert diffusion.chosen_places(masked, 5).tolist() == [1, 3, 4, 0, 2]
    assert diffusion.chosen_places(masked, 2).tolist() == [1, 3]  # a surplus goes without loss
