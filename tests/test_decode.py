"""The loop, for every strategy and number of steps: what comes out, and what it cost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import CONFIG, END, MASK, PAD, E, NoQuestions, T, Told, V, beginnings, causal_model
from torch import Tensor

from unembed import strategies
from unembed.config import DiffusionConfig, Schedule
from unembed.decode import (
    DecodeOptions,
    Draft,
    FittedOptions,
    blank,
    decode,
    draw_uniforms,
    fill_after_end,
    pick,
)
from unembed.diffusion import alpha
from unembed.errors import UnembedError
from unembed.model import Denoiser
from unembed.strategies import STRATEGIES, Moment, Proposal
from unembed.trunk import Model, Trunk, guided_logits

KEYS = 2 * (T + 1)  # of every length two
# Mixed lengths, all short, all long, one, and the same row thrice.
BATCHES = ([0, 3, 7, 10, 5, 21], [0, 1, 2], [9, 10, 20], [4], [6, 6, 6])
ALL = [name for name, s in STRATEGIES.items() if not s.causal]  # the causal one has tests of its own
every_strategy = pytest.mark.parametrize("strategy", ALL)


class Oracle:
    """Knows a text for each key, `e[:, 0]`, of length key % (T + 1), and leans to it, more or less.

    Its logits depend on the tokens revealed, so that a confidence taken later is another one. Rows
    are computed one by one: what a row gets does not depend on its batch. Every call is noted.
    """

    config = CONFIG

    def __init__(self, *, sharpness: float = 4.0) -> None:
        draw = torch.Generator().manual_seed(0)
        self.targets = torch.full((KEYS, T), PAD)
        for key in range(KEYS):
            length = key % (T + 1)
            self.targets[key, :length] = torch.randint(3, V, (length,), generator=draw)
            self.targets[key, length : length + 1] = END
        noise = torch.randn(KEYS + 1, T, V, generator=draw)  # the last is the null condition
        lean = torch.cat([F.one_hot(self.targets, V), torch.zeros(1, T, V)])
        self.table = noise + sharpness * (0.1 + torch.rand(KEYS + 1, T, 1, generator=draw)) * lean
        self.mood = torch.randn(7, T, V, generator=draw)
        self.calls: list[tuple[list[int], Tensor, Tensor | None, Tensor | None]] = []

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        keys = e[:, 0].long()
        self.calls.append((keys.tolist(), xt.clone(), t, drop))
        keys = keys if drop is None else keys.masked_fill(drop, KEYS)
        return self.table[keys] + self.mood[xt.masked_fill(xt == MASK, 0).sum(1) % 7]

    def head(self, h: Tensor) -> Tensor:
        return h.index_fill(-1, torch.tensor(MASK), float("-inf"))

    def passes(self) -> Counter[int]:
        """Count the rows that came by, for each key."""
        return Counter(key for keys, *_ in self.calls for key in keys)


def vectors(keys: list[int]) -> Tensor:
    return torch.tensor([[float(key)] + [0.0] * (E - 1) for key in keys])


def denoiser(seed: int = 0) -> Denoiser:
    """Return a random model that likes to end: with any luck rows leave at different times."""
    torch.manual_seed(seed)
    model = Denoiser(CONFIG).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.3)
    model.bias[[END, PAD]] += 1
    return model


def run(
    model: Model,
    e: Tensor,
    *,
    seed: int = 0,
    first: int = 0,
    diffusion: DiffusionConfig = DiffusionConfig(),  # noqa: B008 - frozen
    **options: Any,
) -> list[Draft]:
    chosen = DecodeOptions(**options).fit(model.config)
    uniforms = draw_uniforms(first, first + len(e), steps=chosen.steps, length=T, seed=seed)
    return list(decode(model, e, options=chosen, diffusion=diffusion, uniforms=uniforms))


# Every strategy, every number of steps


@every_strategy
@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.0])
def test_ends_complete_and_counts_its_passes(strategy: str, guidance: float) -> None:
    for steps in range(1, T + 1):
        for keys in BATCHES:
            model = Oracle()
            drafts = run(model, vectors(keys), strategy=strategy, steps=steps, guidance=guidance)
            assert len(drafts) == steps
            assert not (drafts[-1].ids == MASK).any()
            assert drafts[-1].ids.min() >= 0 and drafts[-1].ids.max() < V
            spent: Counter[int] = Counter()
            for key, passes in zip(keys, drafts[-1].passes.tolist(), strict=True):
                spent[key] += passes
            assert spent == model.passes()
            each = 2 if guidance == 2 else 1
            assert all(each <= p <= each * steps for p in drafts[-1].passes.tolist())


@every_strategy
def test_a_denoiser_ends_complete_at_every_number_of_steps(strategy: str) -> None:
    model, e = denoiser(), torch.randn(6, E, generator=torch.Generator().manual_seed(1))
    for steps in range(1, T + 1):
        last = run(model, e, strategy=strategy, steps=steps)[-1]
        assert not (last.ids == MASK).any()
        # Padding filled in behind an end was never predicted, so nothing is claimed of it.
        ended = (last.ids == END).cumsum(1) > 0
        assert ((last.confidence > 0) & (last.confidence <= 1))[~ended].all()


@every_strategy
def test_a_revealed_token_stays_or_is_masked_again(strategy: str) -> None:
    again = 0
    for steps in range(1, T + 1):
        drafts = run(Oracle(), vectors(BATCHES[0]), strategy=strategy, steps=steps, remask=0.3)
        for step, (before, after) in enumerate(zip(drafts, drafts[1:], strict=False), 1):
            known, kept = before.ids != MASK, after.ids != MASK
            assert torch.equal(before.ids[known & kept], after.ids[known & kept])
            assert torch.equal(before.confidence[known & kept], after.confidence[known & kept])
            assert (after.confidence[~kept] == 0).all()
            lost = int((known & ~kept).sum())
            again += lost
            if strategy == "two-stage" and lost:
                assert step == (steps + 1) // 2 - 1
    remasks = strategy in ("euler-remask", "two-stage")
    assert (again > 0) == remasks


@every_strategy
def test_the_same_seed_gives_the_same_text(strategy: str) -> None:
    e = vectors(BATCHES[0])
    for temperature in (None, 1.0):
        options: dict[str, Any] = {"strategy": strategy, "steps": 5, "temperature": temperature}
        one, two = (run(Oracle(), e, seed=7, **options)[-1] for _ in range(2))
        assert torch.equal(one.ids, two.ids) and torch.equal(one.confidence, two.confidence)
        other = run(Oracle(), e, seed=8, **options)[-1]
        draws = temperature == 1 or strategy in ("euler", "euler-remask", "two-stage")
        assert torch.equal(one.confidence, other.confidence) != draws
        if strategy in ("euler", "euler-remask"):
            assert not torch.equal(one.ids, other.ids)


@every_strategy
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_batch_size_changes_nothing(strategy: str, temperature: float | None) -> None:
    keys = [0, 3, 7, 10, 5, 21, 6]
    mixed = torch.randn(len(keys), E, generator=torch.Generator().manual_seed(2))
    model: Model
    for model, e in ((Oracle(), vectors(keys)), (denoiser(), mixed)):
        for steps in (1, 4, T):
            options: dict[str, Any] = {"strategy": strategy, "steps": steps, "temperature": temperature}
            whole = run(model, e, seed=3, **options)[-1]
            for size in (1, 3):
                starts = range(0, len(e), size)
                parts = [run(model, e[i : i + size], seed=3, first=i, **options)[-1] for i in starts]
                assert torch.equal(torch.cat([p.ids for p in parts]), whole.ids)
                assert torch.equal(torch.cat([p.passes for p in parts]), whole.passes)
                torch.testing.assert_close(torch.cat([p.confidence for p in parts]), whole.confidence)


def test_rows_leave_when_nothing_is_left_to_reveal() -> None:
    model = Oracle(sharpness=100)
    drafts = run(model, vectors([2, 10]), strategy="sequential", steps=T)
    # Two words and an end, then what follows is known; ten words take ten passes.
    assert drafts[-1].passes.tolist() == [3, T]
    assert torch.equal(drafts[-1].ids, model.targets[[2, 10]])
    assert torch.equal(drafts[2].ids[0], model.targets[2])
    assert [len(keys) for keys, *_ in model.calls] == [2] * 3 + [1] * (T - 3)


def test_confidence_ends_early_where_the_rest_is_padding() -> None:
    model = Oracle(sharpness=100)
    drafts = run(model, vectors([3, 10]), strategy="confidence", steps=T)
    assert torch.equal(drafts[-1].ids, model.targets[[3, 10]])
    assert drafts[-1].passes[0] <= 4 < drafts[-1].passes[1] == T


def test_no_rows_no_passes() -> None:
    model = Oracle()
    drafts = run(model, vectors([]).reshape(0, E), steps=4)
    assert len(drafts) == 4 and drafts[-1].ids.shape == (0, T) and not model.calls


def test_steps_out_of_range_are_refused() -> None:
    for steps in (0, T + 1):
        options, uniforms = DecodeOptions(steps=steps), torch.rand(1, T + 1, 2, T)
        drafts = decode(
            Oracle(), vectors([1]), options=options, diffusion=DiffusionConfig(), uniforms=uniforms
        )
        with pytest.raises(UnembedError, match=f"between 1 and {T}"):
            next(drafts)


# The same as the plainest loop


def plain_decode(
    model: Model, e: Tensor, options: FittedOptions, uniforms: Tensor, start: Draft, avoid: Tensor | None
) -> list[Draft]:
    """Decode as first written down: one row after the other, logits at every place."""
    strategy, rows = STRATEGIES[options.strategy], []
    temperature = strategy.temperature if options.temperature is None else options.temperature
    diffusion = DiffusionConfig()
    for n in range(len(e)):
        row = slice(n, n + 1)
        ids, sure, passes = start.ids[row], start.confidence[row], start.passes[row]
        active, drafts = bool((ids == MASK).any()), []
        for step in range(options.steps):
            if active:
                now = Moment(
                    step, options.steps, uniforms[row, step, 0], PAD, diffusion,
                    options.remask, options.restart, options.reveal,
                )  # fmt: skip
                masked = ids == MASK
                t = strategy.time(masked.float().mean(1), diffusion)
                free, given = (
                    model.head(model.hidden(ids, e[row], t=t, drop=torch.tensor([drop])))[0]
                    for drop in (True, False)
                )
                g = options.guidance
                logits = free if g == 0 else given if g == 1 else free + g * (given - free)
                logits[:, MASK] = -torch.inf
                if avoid is not None:
                    logits = logits.scatter(1, avoid[n][:, None], -torch.inf)
                tokens, chance = pick(logits, uniforms[n, step, 1], temperature=temperature)
                where = strategy.select(masked, now)
                tokens, chance = torch.where(where, tokens, ids), torch.where(where, chance, sure)
                kept = strategy.commit(Proposal(where, tokens, chance), now)
                ids, sure = torch.where(kept, tokens, ids), torch.where(kept, chance, sure)
                if strategy.remask is not None:
                    again = strategy.remask(sure, ids != MASK, now)
                    ids, sure = ids.masked_fill(again, MASK), sure.masked_fill(again, 0.0)
                passes = passes + (1 if g in (0, 1) else 2)
                if strategy.final(now):
                    ids = fill_after_end(ids, CONFIG)
                    active = bool((ids == MASK).any())
            drafts.append(Draft(ids, sure, passes, start.likeness[row]))
        rows.append(drafts)
    return [
        Draft(*(torch.cat([getattr(d, f.name) for d in step]) for f in dataclasses.fields(Draft)))
        for step in zip(*rows, strict=True)
    ]


def half_known(e: Tensor) -> tuple[Draft, Tensor]:
    """Return drafts with some places known, one row with all of them, and tokens to avoid in some places."""
    draw = torch.Generator().manual_seed(5)
    n = len(e)
    ids = torch.randint(3, V, (n, T), generator=draw)
    masked = torch.rand(n, T, generator=draw) < torch.linspace(0, 1, n)[:, None]
    start = Draft(
        ids.masked_fill(masked, MASK),
        torch.rand(n, T, generator=draw).masked_fill(masked, 0.0),
        torch.arange(n),
        torch.full((n,), torch.nan),
    )
    named = torch.rand(n, T, generator=draw) < 0.5
    return start, torch.randint(0, V, (n, T), generator=draw).masked_fill(named, MASK)


@every_strategy
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_every_draft_is_the_plainest_loops(
    strategy: str, begun: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a GPU does differently, halving the batch by counts a step old, is only a matter of order.
    monkeypatch.setattr(f"{decode.__module__}.is_gpu", lambda e: gpu)
    e = torch.randn(9, E, generator=torch.Generator().manual_seed(1))
    start, avoid = half_known(e) if begun else (None, None)
    model: Model
    for model in (Oracle(), denoiser()):
        e = vectors([0, 3, 7, 10, 5, 21, 6, 2, 1]) if isinstance(model, Oracle) else e
        for steps, guidance, temperature in ((1, 1.0, None), (4, 2.0, 1.0), (6, 1.0, 0.0), (T, 0.0, 0.7)):
            options = FittedOptions(strategy, steps, temperature, guidance, remask=0.3)
            uniforms = draw_uniforms(0, len(e), steps=steps, length=T, seed=3)
            found = decode(
                model, e, options=options, diffusion=DiffusionConfig(), uniforms=uniforms,
                start=start, avoid=avoid,
            )  # fmt: skip
            begin = start or blank(len(e), CONFIG, device=e.device)
            wanted = plain_decode(model, e, options, uniforms, begin, avoid)
            for ours, plain in zip(found, wanted, strict=True):
                assert torch.equal(ours.ids, plain.ids)
                assert torch.equal(ours.passes, plain.passes)
                torch.testing.assert_close(ours.confidence, plain.confidence)


def test_a_gpus_batch_is_halved_as_rows_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{decode.__module__}.is_gpu", lambda e: True)
    model = Oracle(sharpness=100)
    drafts = run(model, vectors([2, 1, 10, 0, 1]), strategy="sequential", steps=T)
    # After one pass a row is done, after two three, after three four: seen a step later, halved at two left.
    assert [len(keys) for keys, *_ in model.calls] == [5] * 3 + [2] + [1] * (T - 4)
    assert drafts[-1].passes.tolist() == [3, 2, T, 1, 2]


@pytest.mark.parametrize(
    "strategy", ["sequential", "confidence", "causal"]
)  # the others take the logarithm of a number
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_host_asks_for_nothing_but_counts(
    strategy: str, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{decode.__module__}.is_gpu", lambda e: True)
    for module in (decode, Trunk):
        monkeypatch.setattr(f"{module.__module__}.Count", Told)
    causal = STRATEGIES[strategy].causal
    model = causal_model() if causal else denoiser()
    e = torch.randn(9, E, generator=torch.Generator().manual_seed(1))
    start, avoid = half_known(e)
    start = beginnings(9, [3, 0, 5]) if causal else start
    monkeypatch.setattr(model, "head", lambda h: h[:, :1].expand(-1, V).clone())
    uniforms = torch.rand(9, T, 2, T)
    drafts = decode(
        model, e, options=DecodeOptions(strategy, 6, guidance=guidance, temperature=0.5),
        diffusion=DiffusionConfig(), uniforms=uniforms, start=start, avoid=avoid,
    )  # fmt: skip
    with NoQuestions():
        list(drafts)
    with NoQuestions(), pytest.raises(AssertionError, match="waits"):
        int(e.sum())


# What each strategy is about


def test_sequential_reveals_left_to_right() -> None:
    for steps in range(1, T + 1):
        for draft in run(Oracle(), vectors(BATCHES[0]), strategy="sequential", steps=steps):
            known = (draft.ids != MASK).int()
            # Known places are a prefix, unless an end was met and the rest filled in.
            assert (known.diff(dim=1) <= 0).all()


def test_places_and_tokens_have_draws_of_their_own() -> None:
    model, e, steps = Oracle(), vectors([21, 8]), 3
    uniforms = torch.rand(2, steps, 2, T, generator=torch.Generator().manual_seed(0))
    uniforms[0, :, 0], uniforms[1, :, 0] = 0.0, 0.99  # all at once, and all in the last step
    options = DecodeOptions("euler", steps=steps)
    drafts = list(decode(model, e, options=options, diffusion=DiffusionConfig(), uniforms=uniforms))
    logits = model.head(model.hidden(torch.full((2, T), MASK), e))
    for row, step in ((0, 0), (1, steps - 1)):
        tokens, sure = pick(logits[row], uniforms[row, step, 1], temperature=1.0)
        assert torch.equal(drafts[step].ids[row], tokens)
        torch.testing.assert_close(drafts[step].confidence[row], sure)
        assert all((draft.ids[row] == MASK).all() for draft in drafts[:step])


def test_sequential_takes_the_likeliest_token_given_those_before() -> None:
    model, key = Oracle(), 10
    (row,) = run(model, vectors([key]), strategy="sequential", steps=T)[-1].ids
    xt = torch.full((1, T), MASK)
    for place in range(T):
        xt[0, place] = model.head(model.hidden(xt, vectors([key])))[0, place].argmax()
        if xt[0, place] == END:
            xt[0, place + 1 :] = PAD
            break
    assert torch.equal(row, xt[0])


@every_strategy
@pytest.mark.parametrize("schedule", ["linear", "exponential", "cosine"])
def test_the_model_is_told_the_time_at_which_as_much_is_masked(strategy: str, schedule: Schedule) -> None:
    model, diffusion = Oracle(), DiffusionConfig(schedule=schedule)
    run(model, vectors(BATCHES[0]), strategy=strategy, steps=6, diffusion=diffusion)
    assert len(model.calls) > 3
    for _, xt, t, _ in model.calls:
        assert t is not None
        share = (xt == MASK).float().mean(1)
        if strategy == "sequential":  # equation 11
            torch.testing.assert_close(t, share)
        else:
            below = t < 1  # all masked: exp(-5) says never, so the last time there is
            torch.testing.assert_close(1 - alpha(t, diffusion)[below], share[below], atol=1e-5, rtol=0)


def test_confidence_keeps_the_most_confident_of_all_places() -> None:
    model, key = Oracle(), 21  # ten words, no end
    first = run(model, vectors([key]), strategy="confidence", steps=5)[0]
    logits = model.head(model.hidden(torch.full((1, T), MASK), vectors([key])))[0]
    sure, tokens = logits.softmax(-1).max(-1)
    assert not (tokens == PAD).any()
    kept = first.ids[0] != MASK
    assert int(kept.sum()) == 2
    assert set(kept.nonzero().flatten().tolist()) == set(sure.topk(2).indices.tolist())
    assert torch.equal(first.ids[0, kept], tokens[kept])
    torch.testing.assert_close(first.confidence[0, kept], sure[kept])


def test_euler_remask_goes_by_the_confidence_recorded_at_the_reveal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, keys, steps = Oracle(), [21, 8, 9, 10, 19], T
    plain, seen = STRATEGIES["euler-remask"], []
    assert plain.remask is not None
    inner = plain.remask

    def spy(confidence: Tensor, revealed: Tensor, moment: strategies.Moment) -> Tensor:
        again = inner(confidence, revealed, moment)
        seen.append((confidence.clone(), revealed.clone(), again.clone()))
        return again

    monkeypatch.setitem(STRATEGIES, "euler-remask", dataclasses.replace(plain, remask=spy))
    drafts = run(model, vectors(keys), strategy="euler-remask", steps=steps, remask=0.25)
    ids, recorded = torch.full((len(keys), T), MASK), torch.zeros(len(keys), T)
    stale, asked = 0, [xt for _, xt, *_ in model.calls]
    for (confidence, revealed, again), draft, xt in zip(seen, drafts, asked, strict=True):
        assert torch.equal(xt, ids)
        probabilities = model.head(model.hidden(xt, vectors(keys))).softmax(-1)
        new, old = revealed & (ids == MASK), ids != MASK
        # Tokens known before are judged as they were when revealed; the others are new.
        torch.testing.assert_close(confidence[old], recorded[old])
        chosen = torch.where(again, 0, draft.ids.clamp_min(0))  # a masked one's token is not to be seen
        now = probabilities.gather(2, chosen[..., None]).squeeze(2)
        torch.testing.assert_close(confidence[new & ~again], now[new & ~again])
        stale += int(((now - recorded).abs() > 0.01)[old & ~again].sum())
        if draft is not drafts[-1]:
            for row in range(len(keys)):
                count = int(revealed[row].sum() * 0.25 + 0.5)
                lowest = confidence[row].masked_fill(~revealed[row], 2.0).argsort(stable=True)[:count]
                assert again[row].nonzero().flatten().tolist() == sorted(lowest.tolist())
        else:
            assert not again.any()
        ids, recorded = draft.ids, draft.confidence
        assert torch.equal(ids == MASK, ~revealed | again) or draft is drafts[-1]
    assert stale > 10  # a confidence taken afresh would have been another


@pytest.mark.parametrize("steps", range(2, T + 1))
def test_two_stage_without_noise_is_its_first_stage(steps: int) -> None:
    e = vectors(BATCHES[0])
    two = run(Oracle(), e, strategy="two-stage", steps=steps, restart=0.0)[-1]
    one = run(Oracle(), e, strategy="sequential", steps=(steps + 1) // 2)[-1]
    # Behind an end the first stage still predicts, where `sequential` fills in; texts end there.
    text = (one.ids == END).cumsum(1) == 0
    assert torch.equal(two.ids[text], one.ids[text])
    assert torch.equal((two.ids == END).cumsum(1) == 0, text)
    torch.testing.assert_close(two.confidence[text], one.confidence[text])


def test_two_stage_noised_to_the_full_starts_again() -> None:
    e = vectors(BATCHES[0])
    drafts = run(Oracle(), e, strategy="two-stage", steps=7, restart=1.0, seed=4)
    assert (drafts[3].ids == MASK).all() and (drafts[3].confidence == 0).all()
    assert not (drafts[2].ids == MASK).all()
    # The second stage is then Euler in three steps, with the draws of steps 4 to 6.
    options = DecodeOptions("euler", steps=3, temperature=0.0)
    uniforms = draw_uniforms(0, len(e), steps=7, length=T, seed=4)[:, 4:]
    *_, last = decode(Oracle(), e, options=options, diffusion=DiffusionConfig(), uniforms=uniforms)
    assert torch.equal(drafts[-1].ids, last.ids)


def test_padding_does_not_use_up_the_steps_of_a_short_text() -> None:
    drafts = run(Oracle(sharpness=1000), vectors([4]), strategy="confidence", steps=5)
    words = [int(((d.ids[0] != MASK) & (d.ids[0] != PAD)).sum()) for d in drafts]
    assert words == [1, 2, 3, 4, 5]  # four words and the end, one a step, not all in the last


def test_what_follows_an_end_is_padding() -> None:
    ids = torch.tensor([[5, END, MASK, 7, MASK], [MASK, 6, MASK, END, MASK], [5, MASK, 6, 7, 8]])
    filled = torch.tensor([[5, END, PAD, 7, PAD], [MASK, 6, MASK, END, PAD], [5, MASK, 6, 7, 8]])
    assert torch.equal(fill_after_end(ids, CONFIG), filled)


# Guidance


def test_plain_guidance_is_one_pass_with_the_condition() -> None:
    model = Oracle()
    run(model, vectors([3, 10]), steps=4, guidance=1.0)
    assert len(model.calls) == 4
    assert not any(drop is not None and drop.any() for *_, drop in model.calls)


@every_strategy
def test_no_guidance_knows_nothing_of_the_vector(strategy: str) -> None:
    for options in ({"seed": 0}, {"seed": 5, "temperature": 1.0}):
        one, two = (
            run(Oracle(), vectors(keys), strategy=strategy, steps=5, guidance=0.0, **options)[-1]
            for keys in ([3, 8, 10], [20, 1, 13])
        )
        assert torch.equal(one.ids, two.ids) and torch.equal(one.confidence, two.confidence)
    e = torch.randn(2, 3, E, generator=torch.Generator().manual_seed(0))
    one, two = (run(denoiser(), x, strategy=strategy, steps=5, guidance=0.0)[-1] for x in e)
    assert torch.equal(one.ids, two.ids)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 1.5, 4.0])
def test_guidance_moves_away_from_the_null_condition(guidance: float) -> None:
    model = denoiser()
    draw = torch.Generator().manual_seed(0)
    xt, e = torch.randint(0, V, (3, T), generator=draw), torch.randn(3, E, generator=draw)
    t = torch.rand(3, generator=draw)
    given = model(xt, e, t=t).flatten(0, 1)
    free = model(xt, e, t=t, drop=torch.ones(3, dtype=torch.bool)).flatten(0, 1)
    found = guided_logits(model, Trunk.of(model, e, guidance=guidance).hidden(xt, t), guidance=guidance)
    others = torch.arange(V) != MASK
    torch.testing.assert_close(found[:, others], (free + guidance * (given - free))[:, others])
    assert (found[:, MASK] == -torch.inf).all()
    assert float((given - free)[:, others].abs().max()) > 0.1


# Choosing tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    n, logits = 20_000, torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    logits[[0, 5, 11]] = -torch.inf
    uniforms = (torch.arange(n) + 0.5) / n  # evenly spread: the counts must be near exact
    tokens, sure = pick(logits.expand(n, -1), uniforms, temperature=temperature)
    found = torch.bincount(tokens, minlength=12) / n
    torch.testing.assert_close(found, (logits / temperature).softmax(0), atol=2 / n, rtol=0)
    assert not found[[0, 5, 11]].any()
    # The confidence is the model's, whatever the temperature.
    torch.testing.assert_close(sure, logits.softmax(0)[tokens])


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_a_token_without_probability_is_never_drawn(temperature: float) -> None:
    extremes = torch.tensor([0.0, 2**-149, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24])
    for size in (5, 1000, 50_000):  # large vocabularies, where cumulated probabilities round off
        for draw in range(5):
            logits = torch.randn(size, generator=torch.Generator().manual_seed(draw))
            logits[0] = logits[-1] = logits[size // 2] = -torch.inf
            tokens, sure = pick(logits.expand(len(extremes), -1), extremes, temperature=temperature)
            assert logits[tokens].isfinite().all()
            assert (sure > 0).all()


def test_at_temperature_zero_the_likeliest_is_taken() -> None:
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(0))
    u = torch.rand(50, generator=torch.Generator().manual_seed(1))
    likeliest = logits.argmax(-1)
    for temperature in (0.0, 1e-4, 1e-42):
        tokens, sure = pick(logits, u, temperature=temperature)
        assert torch.equal(tokens, likeliest)
        torch.testing.assert_close(sure, logits.softmax(-1).max(-1).values)
    assert not torch.equal(pick(logits, u, temperature=1.0)[0], likeliest)


@every_strategy
def test_temperature_is_the_strategys_own_unless_given(strategy: str) -> None:
    e, own = vectors(BATCHES[0]), STRATEGIES[strategy].temperature
    unset, same, other = (
        run(Oracle(), e, strategy=strategy, steps=4, temperature=t)[-1].ids for t in (None, own, 1 - own)
    )
    assert torch.equal(unset, same) and not torch.equal(unset, other)


@every_strategy
def test_the_mask_is_never_predicted(strategy: str) -> None:
    e = torch.randn(8, E, generator=torch.Generator().manual_seed(0))
    model = denoiser()
    model.bias[MASK] = 100.0
    for guidance in (0.0, 1.0, 3.0):
        drafts = run(model, e, strategy=strategy, steps=1, temperature=20.0, guidance=guidance)
        assert not (drafts[-1].ids == MASK).any()
