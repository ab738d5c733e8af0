"""The decoding strategies, each a few small pure functions of one step: the paper's five (3.4), and ours.

A strategy says where predictions are wanted, which of them to keep, and what to mask again. It
must not know of models, vectors or loops: `decode` asks it and does as it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig
from unembed.diffusion import alpha, time_at
from unembed.errors import UnembedError, unknown_name

RevealSchedule = Literal["linear", "cosine"]


@dataclass(frozen=True)
class Moment:
    """Where decoding stands when a step is taken."""

    step: int  # from 0
    steps: int
    uniforms: Tensor  # (B, T), this step's own draws for what to reveal
    pad_id: int
    diffusion: DiffusionConfig
    remask: float = 0.05  # tau of euler-remask
    restart: float = 0.5  # t0 of two-stage
    reveal: RevealSchedule = "linear"  # how the tokens kept by `confidence` grow

    @property
    def last(self) -> bool:
        """Whether no step follows."""
        return self.step == self.steps - 1


@dataclass(frozen=True)
class Proposal:
    """What the model says at the places it was asked about; elsewhere meaningless."""

    where: Tensor  # (B, T) bool
    tokens: Tensor  # (B, T) ids
    confidence: Tensor  # (B, T) probability of that token


@dataclass(frozen=True)
class Strategy:
    """One way to get from all masks to a text.

    Attributes:
        name: Its name everywhere: Python, command line, reports.
        summary: One line for people.
        temperature: Of token draws when the caller names none; 0 takes the most likely token.
        select: (masked, moment) -> places where predictions are wanted in this step.
        commit: (proposal, moment) -> which of them to reveal.
        remask: (recorded confidence, revealed, moment) -> places to mask again after the step.
        final: (moment) -> whether what is revealed by now is never masked again.
        time: (share still masked, diffusion) -> the t that a time-conditioned model is told.
        causal: Whether the model reads left to right; then every token takes a pass.
        beams: Whether several beginnings are kept, which is `beam`'s to do; the functions then say nothing.
    """

    name: str
    summary: str
    temperature: float
    select: Callable[[Tensor, Moment], Tensor]
    commit: Callable[[Proposal, Moment], Tensor]
    remask: Callable[[Tensor, Tensor, Moment], Tensor] | None = None
    final: Callable[[Moment], bool] = lambda moment: True
    causal: bool = False
    beams: bool = False
    time: Callable[[Tensor, DiffusionConfig], Tensor] = time_at


def share_to_reveal(step: int, steps: int, schedule: RevealSchedule = "linear") -> float:
    """Share of what is still masked that a step reveals; 1 at the last step.

    >>> [share_to_reveal(s, 4) for s in range(4)]
    [0.25, 0.3333333333333333, 0.5, 1.0]
    """

    def done(s: int) -> float:
        return s / steps if schedule == "linear" else 1 - math.cos(math.pi / 2 * s / steps)

    if step >= steps - 1:
        return 1.0
    return (done(step + 1) - done(step)) / (1 - done(step))


def count_to_reveal(left: Tensor, share: float) -> Tensor:
    """How many of `left` masked places (B,) to reveal: the share, rounded up, so at least one."""
    # A little less, lest 43.000004 become 44: float32 is sure of six digits.
    return torch.ceil(left * (share * (1 - 1e-6))).clamp_min(1).minimum(left)


def first_of(order: Tensor, count: Tensor) -> Tensor:
    """Mark in each row the first `count` (B, 1) of the places that `order` (B, T) lists."""
    rank = torch.arange(order.shape[1], device=order.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, rank < count)


def select_all(masked: Tensor, moment: Moment) -> Tensor:
    """Ask about every masked place."""
    return masked


def commit_all(proposal: Proposal, moment: Moment) -> Tensor:
    """Keep everything that was asked about."""
    return proposal.where


def select_leftmost(masked: Tensor, moment: Moment) -> Tensor:
    """Ask about the next few masked places, left to right (equation 11)."""
    count = count_to_reveal(masked.sum(1, keepdim=True), share_to_reveal(moment.step, moment.steps))
    return masked & (masked.cumsum(1) <= count)


def select_next(masked: Tensor, moment: Moment) -> Tensor:
    """Ask about the first masked place."""
    return masked & (masked.cumsum(1) == 1)


def commit_confident(proposal: Proposal, moment: Moment) -> Tensor:
    """Keep the k most confident of the words (equations 14 and 15); padding rides along.

    Padding is easy, and counted as a word it would use up the early steps of a short text. So k
    counts words only, and padding is kept where it is as sure as the least sure word kept. Places do not
    know of each other, and several may mean the same word of the text: those that propose what another
    is surer of come last.
    """
    words = proposal.where & (proposal.tokens != moment.pad_id)
    share = share_to_reveal(moment.step, moment.steps, moment.reveal)
    count = count_to_reveal(words.sum(1, keepdim=True), share)
    again = proposed_again(proposal.tokens, proposal.confidence.masked_fill(~words, -1.0))
    score = (proposal.confidence - again.float()).masked_fill(~words, -2.0)
    kept = words & first_of(score.argsort(dim=1, descending=True, stable=True), count)
    # Where no word is left, all that remains is padding: keep it.
    bar = proposal.confidence.masked_fill(~kept, 2.0).amin(1, keepdim=True)
    bar = torch.where(words.any(1, keepdim=True), bar, 0.0)
    padding = proposal.where & ~words & (proposal.confidence >= bar)
    return proposal.where if moment.last else kept | padding


def proposed_again(tokens: Tensor, confidence: Tensor) -> Tensor:
    """Places (B, T) whose token another place is surer of, or as sure and further left."""
    surer = confidence[:, None] > confidence[..., None]
    left = torch.ones(tokens.shape[1:] * 2, dtype=torch.bool, device=tokens.device).tril(-1)
    surer = surer | (confidence[:, None] == confidence[..., None]) & left
    return (surer & (tokens[:, None] == tokens[..., None])).any(2)


def select_euler(masked: Tensor, moment: Moment, *, start: float = 1.0) -> Tensor:
    """Reveal each masked place with probability (alpha_s - alpha_t) / (1 - alpha_t).

    Which places those are does not depend on the prediction, so only they need logits.
    """
    if moment.last:
        return masked
    t, s = (torch.tensor(start * (1 - k / moment.steps)) for k in (moment.step, moment.step + 1))
    at, as_ = alpha(t, moment.diffusion), alpha(s, moment.diffusion)
    # A fixed mask ratio has no time; revealing in equal parts is all that can be asked of it.
    fixed = moment.diffusion.schedule == "fixed"
    chance = share_to_reveal(moment.step, moment.steps) if fixed else float((as_ - at) / (1 - at))
    return masked & (moment.uniforms < chance)


def remask_unsure(confidence: Tensor, revealed: Tensor, moment: Moment) -> Tensor:
    """Mask again the lowest tau of the revealed, by the confidence recorded when revealed."""
    if moment.last:
        return torch.zeros_like(revealed)
    count = torch.floor(revealed.sum(1, keepdim=True) * moment.remask + 0.5)
    score = confidence.masked_fill(~revealed, 2.0)
    return revealed & first_of(score.argsort(dim=1, stable=True), count)


def _stages(moment: Moment) -> tuple[Moment, bool]:
    """Split the steps of two-stage in halves: the moment within its stage, and whether it is the first."""
    first = (moment.steps + 1) // 2
    if moment.step < first:
        return replace(moment, steps=first), True
    return replace(moment, step=moment.step - first, steps=moment.steps - first), False


def select_two_stage(masked: Tensor, moment: Moment) -> Tensor:
    """Left to right in the first half, Euler from t0 in the second."""
    stage, first = _stages(moment)
    return select_leftmost(masked, stage) if first else select_euler(masked, stage, start=moment.restart)


def remask_two_stage(confidence: Tensor, revealed: Tensor, moment: Moment) -> Tensor:
    """Noise the finished hypothesis to t0 at the end of the first stage."""
    stage, first = _stages(moment)
    if not (first and stage.last) or moment.last:
        return torch.zeros_like(revealed)
    return revealed & (moment.uniforms >= float(alpha(torch.tensor(moment.restart), moment.diffusion)))


STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(
            "sequential",
            "left to right, the most likely token",
            0.0,
            select_leftmost,
            commit_all,
            time=lambda masked, diffusion: masked,  # t = (n - i) / n, whatever the schedule (equation 11)
        ),
        Strategy("euler", "random places, tokens drawn from the model", 1.0, select_euler, commit_all),
        Strategy(
            "euler-remask",
            "euler, masking the least sure tokens again after each step",
            1.0,
            select_euler,
            commit_all,
            remask=remask_unsure,
            final=lambda moment: moment.last,
        ),
        Strategy("confidence", "the surest tokens first (MaskGIT)", 0.0, select_all, commit_confident),
        Strategy(
            "two-stage",
            "sequential, then noised to t0 and refined by euler",
            0.0,
            select_two_stage,
            commit_all,
            remask=remask_two_stage,
            final=lambda moment: moment.last or not _stages(moment)[1],
        ),
        Strategy(
            "causal",
            "left to right, each token told only what stands before it; a pass a token",
            0.0,
            select_next,
            commit_all,
            causal=True,
            time=lambda masked, diffusion: torch.ones_like(masked),  # as in training, however much is known
        ),
        Strategy(
            "beam",
            "left to right, keeping several beginnings by likelihood and by where they lead",
            0.0,
            select_next,
            commit_all,
            causal=True,
            beams=True,
        ),
    )
}

AUTO = "auto"  # not a way to decode, but the best one that a model has


def resolve(
    name: str, *, config: ModelConfig, steps: int | None, temperature: float | None, drafts: int = 1
) -> Strategy:
    """Return the strategy that a name stands for, which with `auto` goes by the model and by what is asked.

    A model that reads left to right recovers most by `beam`, and by `causal` if tokens are to be drawn. Both
    take a step a token, so who asks for fewer steps gets `confidence`, which takes any number; and so does
    who asks for several drafts, which are there to do with few steps.
    """
    if name != AUTO:
        return find_strategy(name)
    if not config.causal or drafts != 1 or (steps is not None and steps < config.max_tokens):
        return STRATEGIES["confidence"]
    return STRATEGIES["causal" if temperature else "beam"]


def find_strategy(name: str) -> Strategy:
    """Return the strategy of that name."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", str(name), (AUTO, *STRATEGIES))
    return STRATEGIES[name]


def check_steps(steps: int, max_tokens: int) -> None:
    """Refuse a number of steps that is not between 1 and the number of tokens."""
    if not 1 <= steps <= max_tokens:
        raise UnembedError(
            f"steps must be between 1 and {max_tokens} (the model's length in tokens), not {steps}."
        )
