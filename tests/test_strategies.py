"""Each strategy's small steps: what they ask about, what they keep, what they mask again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig, Schedule
from unembed.diffusion import alpha
from unembed.errors import UnembedError
from unembed.strategies import (
    AUTO,
    STRATEGIES,
    Moment,
    Proposal,
    RevealSchedule,
    check_steps,
    commit_all,
    commit_confident,
    count_to_reveal,
    find_strategy,
    proposed_again,
    remask_two_stage,
    remask_unsure,
    resolve,
    select_all,
    select_euler,
    select_leftmost,
    select_two_stage,
    share_to_reveal,
)

PAD = 0
TIMED: tuple[Schedule, ...] = ("linear", "exponential", "cosine")


def moment(
    step: int, steps: int, uniforms: Tensor | None = None, *, schedule: Schedule = "linear", **knobs: Any
) -> Moment:
    u = torch.zeros(1, 1) if uniforms is None else uniforms
    return Moment(step, steps, u, PAD, DiffusionConfig(schedule=schedule), **knobs)


def proposal(confidence: list[float], *, padding: Sequence[int] = (), hidden: Sequence[int] = ()) -> Proposal:
    """Return one row; `padding` lists where padding is predicted, `hidden` where nothing was asked."""
    sure = torch.tensor([confidence])
    where, tokens = torch.ones_like(sure, dtype=torch.bool), torch.full(sure.shape, 7)
    where[0, list(hidden)] = False
    tokens[0, list(padding)] = PAD
    return Proposal(where, tokens, sure)


def places(mask: Tensor) -> list[int]:
    """Return the true places of the only row."""
    assert mask.dtype == torch.bool and len(mask) == 1
    return mask[0].nonzero().flatten().tolist()


def test_the_registry_holds_the_five_and_ours() -> None:
    paper = ["sequential", "euler", "euler-remask", "confidence", "two-stage"]
    assert list(STRATEGIES) == [*paper, "causal", "beam"]
    assert [name for name, s in STRATEGIES.items() if s.causal] == ["causal", "beam"]
    assert [name for name, s in STRATEGIES.items() if s.beams] == ["beam"]
    assert all(name == s.name and s.summary for name, s in STRATEGIES.items())
    assert {n for n, s in STRATEGIES.items() if s.temperature} == {"euler", "euler-remask"}
    assert {n for n, s in STRATEGIES.items() if s.remask} == {"euler-remask", "two-stage"}
    assert find_strategy("euler") is STRATEGIES["euler"]


def test_an_unknown_strategy_is_answered_with_the_nearest() -> None:
    said = r"'confidense'; did you mean 'confidence'\? Known: auto, .*two-stage"
    with pytest.raises(UnembedError, match=said):
        find_strategy("confidense")
    with pytest.raises(UnembedError, match=said):
        resolve("confidense", config=ModelConfig(), steps=None, temperature=None)


@pytest.mark.parametrize(
    ("causal", "steps", "temperature", "best"),
    [
        (True, None, None, "beam"),
        (True, None, 0.0, "beam"),
        (True, None, 0.7, "causal"),  # beams draw nothing
        (True, 4, None, "confidence"),  # left to right would take all steps
        (True, 4, 0.7, "confidence"),
        (True, 11, None, "confidence"),
        (True, 12, None, "beam"),  # a step for each token
        (True, 12, 0.7, "causal"),
        (False, 12, None, "confidence"),
        (False, None, None, "confidence"),
        (False, None, 0.7, "confidence"),
        (False, 4, None, "confidence"),
    ],
)
def test_auto_is_the_best_that_does_as_asked(
    causal: bool, steps: int | None, temperature: float | None, best: str
) -> None:
    assert AUTO not in STRATEGIES
    config = ModelConfig(max_tokens=12, causal=causal)
    found = resolve(AUTO, config=config, steps=steps, temperature=temperature)
    assert found is STRATEGIES[best]
    several = resolve(AUTO, config=config, steps=steps, temperature=temperature, drafts=4)
    assert several is STRATEGIES["confidence"]  # several drafts are there to do with few steps
    for name, strategy in STRATEGIES.items():
        assert resolve(name, config=config, steps=steps, temperature=temperature) is strategy


def test_steps_lie_between_one_and_the_length() -> None:
    for steps in (1, 12):
        check_steps(steps, 12)
    for steps in (0, -1, 13):
        with pytest.raises(UnembedError, match=f"between 1 and 12.*not {steps}"):
            check_steps(steps, 12)


# How much to reveal


@given(data=st.data(), n=st.integers(1, 512), schedule=st.sampled_from(["linear", "cosine"]))
def test_counts_fill_every_place_with_at_least_one_a_step(
    data: st.DataObject, n: int, schedule: RevealSchedule
) -> None:
    steps = data.draw(st.integers(1, n))
    left, counts = torch.tensor([[n]]), []
    for step in range(steps):
        done = step / steps if schedule == "linear" else 1 - math.cos(math.pi / 2 * step / steps)
        # Never behind the schedule, and never so far ahead that a later step has nothing to do.
        assert steps - step <= int(left) <= n * (1 - done) + 1e-2
        counts.append(int(count_to_reveal(left, share_to_reveal(step, steps, schedule))))
        left = left - counts[-1]
    assert min(counts) >= 1
    assert sum(counts) == n
    if schedule == "linear":
        assert max(counts) - min(counts) <= 1


def test_linear_counts_are_equal_where_they_can_be() -> None:
    for n in (*range(1, 65), 301, 512):
        for steps in (s for s in range(1, n + 1) if n % s == 0):
            counts = {
                float(count_to_reveal(torch.tensor([n - s * n // steps]), share_to_reveal(s, steps)))
                for s in range(steps)
            }
            assert counts == {n // steps}, (n, steps)


def test_cosine_reveals_few_at_first_and_many_at_last() -> None:
    left, counts = 64, []
    for step in range(8):
        counts.append(int(count_to_reveal(torch.tensor([left]), share_to_reveal(step, 8, "cosine"))))
        left -= counts[-1]
    assert counts == [2, 4, 6, 8, 10, 11, 12, 11]


def test_counts_of_a_batch_are_each_rows_own() -> None:
    assert count_to_reveal(torch.tensor([[0], [1], [5], [8]]), 0.5).flatten().tolist() == [0, 1, 3, 4]


# What to ask about


@given(data=st.data(), T=st.integers(1, 16), masks=st.data())
def test_sequential_goes_left_to_right_and_ends_in_time(
    data: st.DataObject, T: int, masks: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, T))
    masked = torch.tensor(masks.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=1)))
    for step in range(steps):
        asked = select_leftmost(masked, moment(step, steps))
        assert not (asked & ~masked).any()
        for before, now in zip(masked, asked, strict=True):
            todo = before.nonzero().flatten().tolist()
            assert now.nonzero().flatten().tolist() == todo[: int(now.sum())]
            assert bool(now.any()) == bool(before.any())
        masked = masked & ~asked
    assert not masked.any()


def test_confidence_asks_about_every_masked_place() -> None:
    masked = torch.tensor([[True, False, True]])
    assert places(select_all(masked, moment(0, 4))) == [0, 2]


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("schedule", [*TIMED, "fixed"])
def test_euler_leaves_masked_the_share_that_the_schedule_says(schedule: Schedule, steps: int) -> None:
    draw, n = torch.Generator().manual_seed(0), 40_000
    config = DiffusionConfig(schedule=schedule)
    masked = torch.ones(1, n, dtype=torch.bool)
    for step in range(steps):
        now = moment(step, steps, torch.rand(1, n, generator=draw), schedule=schedule)
        asked = select_euler(masked, now)
        assert not (asked & ~masked).any()
        masked &= ~asked
        s = torch.tensor(1 - (step + 1) / steps)
        # All masked at t = 1, though alpha(1) may be more than 0.
        share = (1 - alpha(s, config)) / (1 - alpha(torch.tensor(1.0), config))
        expected = float(s if schedule == "fixed" else share)
        assert float(masked.float().mean()) == pytest.approx(expected, abs=0.012)
    assert not masked.any()


def test_euler_compares_each_place_with_its_own_draw() -> None:
    u = torch.tensor([[0.1, 0.24, 0.26, 0.9, 0.1]])
    masked = torch.tensor([[True, True, True, True, False]])
    assert places(select_euler(masked, moment(0, 4, u))) == [0, 1]
    assert places(select_euler(masked, moment(1, 4, u))) == [0, 1, 2]  # a third of what is left
    assert places(select_euler(masked, moment(3, 4, u))) == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", TIMED)
def test_euler_from_the_middle_follows_the_schedule_from_there(schedule: Schedule) -> None:
    n, config = 40_000, DiffusionConfig(schedule=schedule)
    u = torch.rand(1, n, generator=torch.Generator().manual_seed(0))
    asked = select_euler(torch.ones(1, n, dtype=torch.bool), moment(0, 4, u, schedule=schedule), start=0.6)
    t, s = torch.tensor(0.6), torch.tensor(0.45)
    expected = (alpha(s, config) - alpha(t, config)) / (1 - alpha(t, config))
    assert float(asked.float().mean()) == pytest.approx(float(expected), abs=0.012)


# What to keep


def test_everything_asked_about_is_kept_but_by_confidence() -> None:
    said = proposal([0.1, 0.9, 0.5], hidden=[1])
    assert places(commit_all(said, moment(0, 3))) == [0, 2]


def test_confidence_keeps_the_surest_words() -> None:
    said = proposal([0.3, 0.9, 0.5, 0.8, 0.99], hidden=[4])
    assert places(commit_confident(said, moment(0, 4))) == [1]
    assert places(commit_confident(said, moment(0, 2))) == [1, 3]
    assert places(commit_confident(said, moment(2, 4))) == [1, 3]  # half of those left
    assert places(commit_confident(said, moment(3, 4))) == [0, 1, 2, 3]


def test_equally_sure_words_are_kept_from_the_left() -> None:
    assert places(commit_confident(proposal([0.5] * 6), moment(0, 2))) == [0, 1, 2]


def test_a_word_that_several_places_propose_is_kept_at_the_surest() -> None:
    said = proposal([0.8, 0.9, 0.85, 0.3, 0.2, 0.99], hidden=[5])
    tokens = torch.tensor([[7, 7, 7, 8, 9, 7]])  # the last was revealed before
    said = dataclasses.replace(said, tokens=tokens)
    assert places(proposed_again(tokens, said.confidence.masked_fill(~said.where, -1.0))) == [0, 2, 5]
    assert places(commit_confident(said, moment(0, 4))) == [1, 3]  # two of five
    assert places(commit_confident(said, moment(0, 2))) == [1, 3, 4]
    assert places(commit_confident(said, moment(2, 3))) == [
        0,
        1,
        2,
        3,
        4,
    ]  # at last they are all that is left
    more = dataclasses.replace(said, tokens=torch.tensor([[7, 7, 7, 7, 9, 7]]))
    assert places(commit_confident(more, moment(0, 2))) == [
        1,
        2,
        4,
    ]  # no more words than are due: the next surest
    same = dataclasses.replace(proposal([0.5, 0.5, 0.5]), tokens=torch.tensor([[7, 7, 8]]))
    assert places(commit_confident(same, moment(0, 2))) == [0, 2]  # as sure: the one on the left


def test_padding_rides_along_and_is_not_counted() -> None:
    said = proposal([0.3, 0.9, 0.95, 0.8, 0.7], padding=[2, 3])
    # Of three words one is kept; the surer padding comes with it, the less sure does not.
    assert places(commit_confident(said, moment(0, 4))) == [1, 2]
    # Two words, the lesser of 0.7: now all padding is as sure.
    assert places(commit_confident(said, moment(0, 2))) == [1, 2, 3, 4]


def test_where_only_padding_is_left_all_of_it_is_kept() -> None:
    said = proposal([0.01, 0.9, 0.2], padding=[0, 1, 2])
    assert places(commit_confident(said, moment(0, 4))) == [0, 1, 2]


def test_the_last_step_keeps_the_least_sure_padding_too() -> None:
    said = proposal([0.9, 0.01], padding=[1])
    assert places(commit_confident(said, moment(0, 2))) == [0]
    assert places(commit_confident(said, moment(1, 2))) == [0, 1]


@given(data=st.data(), T=st.integers(1, 12))
def test_confidence_keeps_as_many_words_as_are_due(data: st.DataObject, T: int) -> None:
    row = st.lists(st.sampled_from([0.1, 0.4, 0.7, 1.0]), min_size=T, max_size=T)
    bits = st.lists(st.booleans(), min_size=T, max_size=T)
    where, sure = torch.tensor([data.draw(bits)]), torch.tensor([data.draw(row)])
    tokens = torch.tensor([data.draw(bits)]) * 7
    steps = data.draw(st.integers(1, T))
    now = moment(
        data.draw(st.integers(0, steps - 1)), steps, reveal=data.draw(st.sampled_from(["linear", "cosine"]))
    )
    kept = commit_confident(Proposal(where, tokens, sure), now)
    words = where & (tokens != PAD)
    assert not (kept & ~where).any()
    assert bool(kept.any()) == bool(where.any())
    due = count_to_reveal(words.sum(1, keepdim=True), share_to_reveal(now.step, steps, now.reveal))
    assert int((kept & words).sum()) == int(due)
    if (kept & words).any() and (words & ~kept).any():
        assert float(sure[kept & words].min()) >= float(sure[words & ~kept].max())
    if now.last:
        assert torch.equal(kept, where)


def test_the_reveal_schedule_changes_the_pace() -> None:
    said = proposal([i / 64 for i in range(64)])
    linear, cosine = (commit_confident(said, moment(0, 8, reveal=r)) for r in ("linear", "cosine"))
    assert (len(places(linear)), len(places(cosine))) == (8, 2)


# What to mask again


def test_the_least_sure_of_the_revealed_are_masked_again() -> None:
    sure = torch.tensor([[0.5, 0.2, 0.0, 0.9, 0.3]])
    revealed = torch.tensor([[True, True, False, True, True]])
    assert places(remask_unsure(sure, revealed, moment(0, 4, remask=0.25))) == [1]
    assert places(remask_unsure(sure, revealed, moment(0, 4, remask=0.5))) == [1, 4]
    assert places(remask_unsure(sure, revealed, moment(0, 4, remask=1.0))) == [0, 1, 3, 4]
    assert places(remask_unsure(sure, revealed, moment(0, 4, remask=0.0))) == []


@pytest.mark.parametrize(("revealed", "count"), [(1, 0), (9, 0), (10, 1), (29, 1), (30, 2), (64, 3)])
def test_a_twentieth_is_rounded_to_the_nearest(revealed: int, count: int) -> None:
    again = remask_unsure(torch.rand(1, revealed), torch.ones(1, revealed, dtype=torch.bool), moment(0, 4))
    assert int(again.sum()) == count


def test_nothing_is_masked_again_after_the_last_step() -> None:
    sure, revealed = torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.bool)
    assert remask_unsure(sure, revealed, moment(2, 4, remask=1.0)).all()
    assert not remask_unsure(sure, revealed, moment(3, 4, remask=1.0)).any()
    for steps in range(1, 9):
        last = moment(steps - 1, steps, torch.ones(2, 8), restart=1.0)
        assert not remask_two_stage(sure, revealed, last).any()


@pytest.mark.parametrize("steps", range(1, 13))
def test_two_stage_is_sequential_then_euler(steps: int) -> None:
    T, draw = 12, torch.Generator().manual_seed(steps)
    first = math.ceil(steps / 2)
    everything = torch.ones(3, T, dtype=torch.bool)
    masked = everything
    for step in range(steps):
        # Not linear: there, where Euler starts makes no difference.
        now = moment(step, steps, torch.rand(3, T, generator=draw), schedule="exponential", restart=0.2)
        asked = select_two_stage(masked, now)
        masked = masked & ~asked
        if step < first:
            stage = dataclasses.replace(now, steps=first)
            assert torch.equal(asked, select_leftmost(masked | asked, stage))
            assert masked.any() == (step < first - 1)
        else:
            stage = dataclasses.replace(now, step=step - first, steps=steps - first)
            assert torch.equal(asked, select_euler(masked | asked, stage, start=0.2))
        again = remask_two_stage(torch.zeros(3, T), ~masked, now)
        if step == first - 1 and steps > 1:
            assert torch.equal(again, ~masked & (now.uniforms >= math.exp(-5 * 0.2)))
        else:
            assert not again.any()
        masked = masked | again
        assert STRATEGIES["two-stage"].final(now) == (step >= first or steps == 1)
    assert not masked.any()


@pytest.mark.parametrize("schedule", TIMED)
@pytest.mark.parametrize("restart", [0.0, 0.3, 0.5, 1.0])
def test_the_hypothesis_is_noised_to_the_share_at_t0(schedule: Schedule, restart: float) -> None:
    n = 40_000
    u = torch.rand(1, n, generator=torch.Generator().manual_seed(0))
    now = moment(1, 4, u, schedule=schedule, restart=restart)
    again = remask_two_stage(torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool), now)
    share = 1 - float(alpha(torch.tensor(restart), now.diffusion))
    assert float(again.float().mean()) == pytest.approx(share, abs=0.012)
    if restart == 0:
        assert not again.any()
    if restart == 1 and schedule != "exponential":  # where exp(-5) of the tokens survive t = 1
        assert again.all()


def test_what_may_be_masked_again_is_not_final() -> None:
    for name in ("sequential", "euler", "confidence"):
        assert all(STRATEGIES[name].final(moment(step, 4)) for step in range(4))
    assert [STRATEGIES["euler-remask"].final(moment(s, 4)) for s in range(4)] == [False] * 3 + [True]
