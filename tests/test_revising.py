"""Runs that learn to revise: what is lost on a lesson, how steps are taken, resumed, begun and measured."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import END, MASK, PAD, E, T, V
from revising import (
    REVISES,
    perturb,
    revising_model,
    same,
    seeded,
    some_texts,
    some_vectors,
    spans_of,
    told,
    writer_for,
)
from running import assert_same_run, hashes, watch_steps
from safetensors.torch import load_file
from syllables import ALONE, CONFIG, GUESSING, LEFT_TO_RIGHT, SIZE, syllable_tokenizer, texts
from syllables import T as LENGTH
from tabled import TabledEncoder
from torch import Tensor

from unembed.checkpoint import Checkpoint, save_checkpoint
from unembed.config import Config
from unembed.corpus import PreparedData, prepare
from unembed.errors import UnembedError
from unembed.lessons import Lesson, Teacher, write
from unembed.metrics import token_f1
from unembed.model import REVISING, Denoiser
from unembed.pairs import FreshSpans
from unembed.run import Group, Run
from unembed.step import masked_loss, most_wanted, reviewed_loss, revised_loss, train_step
from unembed.train import call_teacher, fit_to_data, open_pairs, train
from unembed.validation import validate

WHOLE = slice(None)


@pytest.fixture(scope="module")
def prepared(passages: Path) -> PreparedData:
    return PreparedData.open(passages)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"causal": False}, "revises needs a model that reads left to right and guesses vectors; set causal"),
        ({"embeds": False}, "revises needs a model that reads left to right and guesses vectors; set causal"),
        (
            {"revises": False},
            "revise_share 0.3 needs a model that revises; set revises, or revise_share to 0",
        ),
        ({"pairs": "cached"}, "revise_share 0.3 needs an encoder at hand, .*; set pairs to fresh, or"),
        ({"revise_share": 0.95}, "revise_share must be between 0.0 and 0.9, not 0.95"),
        ({"backbone": "some/lm"}, "the backbone some/lm guesses no vectors; leave embeds out"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_who_is_to_revise_must_be_able_to(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnembedError, match=said) as caught:
        Config().override(**{**REVISES, "revise_share": 0.3, **changes})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_model_may_revise_without_a_share() -> None:
    config = Config().override(**{**REVISES, "pairs": "cached"})
    assert (config.train.revised_rows, config.train.noised_rows) == (0, 400)
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(("size", "share", "revised"), [(20, 0.3, 6), (9, 0.4, 4), (9, 0.01, 0)])
def test_a_share_of_a_batch_is_revised(size: int, share: float, revised: int) -> None:
    train = Config().override(**REVISES, batch_size=size, revise_share=share).train
    assert (train.revised_rows, train.noised_rows) == (revised, size - revised)


def test_older_settings_know_nothing_of_revising() -> None:
    raw = json.loads(Config().to_json())
    del raw["model"]["revises"], raw["train"]["revise_share"]
    assert Config.from_json(json.dumps(raw)) == Config()


# --- what is lost ---------------------------------------------------------------------------------


def some_lesson(rows: int = 12) -> Lesson:
    vectors = F.normalize(some_vectors(rows, seed=4), dim=1)
    return Lesson(some_texts(rows, 1), some_vectors(rows, seed=2), some_texts(rows, 3), vectors)


def rows_of(lesson: Lesson) -> list[Lesson]:
    """A lesson of each text."""
    return [
        Lesson(*row) for row in zip(*(getattr(lesson, f.name).split(1) for f in fields(Lesson)), strict=True)
    ]


@torch.no_grad()
def test_it_counts_how_far_a_guess_is_and_how_far_off_its_nearness() -> None:
    model, lesson, wanted = revising_model(), some_lesson(), 0.0
    for row in rows_of(lesson):
        guess, vector = model.embed(row.draft, row.e)[0], row.vectors[0]
        nearness = [float(F.cosine_similarity(each, row.e[0], dim=0)) for each in (guess, vector)]
        tokens = int((row.draft != PAD).sum())
        wanted += tokens * (float((guess - vector).norm()) + 2.0 * abs(nearness[0] - nearness[1]))
    found = float(reviewed_loss(model.review(lesson.draft, lesson.e), lesson))
    assert found == pytest.approx(wanted, rel=1e-4) and found > 10


@torch.no_grad()
def test_it_counts_every_token_that_is_written_anew_told_those_on_its_left() -> None:
    model, lesson, wanted, count = revising_model(), some_lesson(), 0.0, 0
    for row in rows_of(lesson):
        known = told(model, row.e, row.draft)
        for place in range(int((row.x0 != PAD).sum())):
            ids = row.x0.clone()
            ids[:, place:] = MASK
            logits = model.head(model.hidden(ids, row.e, **known)[0, place])
            wanted -= float(logits.log_softmax(0)[row.x0[0, place]])
            count += 1
    review = model.review(lesson.draft, lesson.e)
    for most in (count, count + 20, lesson.x0.numel()):  # where there is room for more, nothing is added
        assert float(revised_loss(model, review, lesson, most=most)) == pytest.approx(wanted, rel=1e-4)


def loss_of(model: Denoiser, lesson: Lesson | None, **changes: Any) -> Tensor:
    """Loss of some noisy texts, and of a lesson beside them."""
    sizes = {"vocab_size": V, "mask_id": MASK, "end_id": END, "pad_id": PAD, "max_tokens": T}
    config = Config().override(**REVISES, **sizes, embedding_size=E, **changes)
    x0, e, t = some_texts(6, seed=8), some_vectors(6, seed=9), torch.rand(6, generator=seeded())
    masked = torch.rand(6, T, generator=seeded(1)) < 0.5
    more: dict[str, Any] = {} if lesson is None else {"lesson": lesson, "most": int((lesson.x0 != PAD).sum())}
    return masked_loss(model, x0, e, t, masked, t > 2, config=config, count=int(masked.sum()), **more)


@torch.no_grad()
@pytest.mark.parametrize("weight", [0.0, 15.0])
@pytest.mark.parametrize("bag_weight", [0.0, 0.3])
def test_what_is_lost_on_a_lesson_is_added(weight: float, bag_weight: float) -> None:
    model, lesson = revising_model(), some_lesson()
    plain, both = (
        loss_of(model, given, embed_weight=weight, bag_weight=bag_weight) for given in (None, lesson)
    )
    review, most = model.review(lesson.draft, lesson.e), int((lesson.x0 != PAD).sum())
    wanted = weight * reviewed_loss(review, lesson) + revised_loss(model, review, lesson, most=most)
    assert plain > 1 and wanted > 1
    torch.testing.assert_close(both - plain, wanted, rtol=1e-4, atol=1e-3)


def gradients(model: Denoiser, loss: Tensor) -> dict[str, bool]:
    """Whether the loss moves each of the parameters that only a model that revises has."""
    model.zero_grad()
    loss.backward()
    return {
        name.removeprefix("projection.").removeprefix("blocks.0.attention."): bool(p.grad.any())
        for name, p in model.named_parameters()
        if name.endswith(REVISING) and p.grad is not None
    }


@pytest.mark.parametrize("fresh", [False, True])
def test_a_lesson_teaches_all_that_revising_needs(fresh: bool) -> None:
    """Also where it has taught nothing yet."""
    model, lesson = revising_model(), some_lesson()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(not (fresh and name.endswith(REVISING)))
    assert gradients(model, loss_of(model, None)) == {}
    names = {"asked", "nearer", "within", "beyond", "draft_gain"}
    assert gradients(model, loss_of(model, lesson)) == dict.fromkeys(names, True)
    # What a draft misses is not bent to what is easier to write by.
    review, most = model.review(lesson.draft, lesson.e), int((lesson.x0 != PAD).sum())
    found = gradients(model, revised_loss(model, review, lesson, most=most))
    assert found == dict.fromkeys(names - {"nearer"}, True)
    assert model.vector is not None and model.vector.weight.grad is None


# --- a step ---------------------------------------------------------------------------------------


def revising_run(prepared: PreparedData, **changes: Any) -> tuple[Run, FreshSpans]:
    """A run that is about to take a step with a lesson, and its batches."""
    config = CONFIG.override(**{**REVISES, "batch_size": 20, "revise_share": 0.3, **changes})
    run = Run(fit_to_data(config, prepared), group=ALONE)
    spans = spans_of(prepared, batch_size=config.train.noised_rows, seed=config.train.seed)
    assert run.earlier is not None
    run.teacher = Teacher(run.earlier, spans, rows=config.train.revised_rows, share=ALONE.rows)
    return run, spans


@pytest.mark.parametrize("weight", ["mean", "elbo"])
def test_a_step_is_taken_on_both_kinds_of_rows(weight: str, prepared: PreparedData) -> None:
    run, spans = revising_run(prepared, weight=weight)
    asked: dict[str, Any] = {}

    def loss(
        model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, **more: Any
    ) -> Tensor:
        asked.update(more, x0=x0, t=t, masked=masked, drop=drop)
        return model.places.sum() * 0 + 1000.0

    found = float(train_step(run, spans, loss))
    lesson = asked["lesson"]
    assert [len(asked[name]) for name in ("x0", "t", "masked", "drop")] == [14] * 4
    assert torch.equal(asked["x0"], spans.batch(0, WHOLE)[0])
    strata = (asked["t"] * 14).ceil().long()  # there are as many as rows that are noised
    assert sorted(strata.tolist()) == list(range(1, 15))
    assert run.teacher is not None and lesson is run.teacher.lesson(0) and len(lesson.x0) == 6
    wanted = int((lesson.x0 != 0).sum())
    assert (asked["most"], asked["count"]) == (wanted, int(asked["masked"].sum()))
    total = asked["count"] + wanted if weight == "mean" else 20 * LENGTH
    assert found == pytest.approx(1000 / total)


def test_without_a_lesson_a_step_is_as_it_was(prepared: PreparedData) -> None:
    run = Run(fit_to_data(CONFIG.override(**REVISES), prepared), group=ALONE)
    asked: dict[str, Any] = {}

    def loss(model: Any, *_: Any, **more: Any) -> Tensor:
        asked.update(more)
        return model.places.sum()

    train_step(run, spans_of(prepared), loss)
    assert asked.keys() == {"config", "count"} and run.earlier is None and run.lesson() is None


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"precision": "bf16", "bag_weight": 0.1}])
def test_a_step_with_a_lesson_depends_on_seed_and_step_alone(
    changes: dict[str, Any], prepared: PreparedData
) -> None:
    losses = []
    for count in (0, 9):
        run, spans = revising_run(prepared, **changes)
        run.step = 3
        torch.rand(count)  # by others, before
        losses.append(float(train_step(run, spans, masked_loss)))
    assert losses[0] == losses[1] > 0
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_compiled_steps_have_room_for_all_of_a_lesson(prepared: PreparedData) -> None:
    run, spans = revising_run(prepared, compile=True)
    counts, targets = set(), []
    for step in range(20):
        wanted = spans_of(prepared, batch_size=3000).batch(step, WHOLE)[0] != 0
        counts.add(most_wanted(run, spans, wanted))
        targets.append(int(wanted.sum()))
    (count,) = counts
    assert max(targets) <= count < 1.05 * max(targets) and count % 512 == 0
    assert most_wanted(run, spans, wanted[:5]) == 5 * LENGTH
    run.group = Group(0, 2, torch.device("cpu"))
    assert most_wanted(run, spans, wanted) == wanted.numel()


def test_the_teacher_learns_the_average_now_and_then(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "lessons"):
        monkeypatch.setattr(f"unembed.{module}.REFRESH", 3)
    run, spans = revising_run(prepared)
    known, drafts = run.average, []
    for run.step in range(8):
        if run.step in (3, 6):
            known = run.average
        found = run.lesson()
        assert found is not None
        assert same(found, Teacher(known, spans, rows=6, share=ALONE.rows).lesson(run.step))
        run.average = writer_for(prepared, seed=run.step)
        drafts.append(found.draft)
    assert len(torch.stack(drafts).unique(dim=0)) == 8


# --- killed and resumed ---------------------------------------------------------------------------

LEARNS = CONFIG.override(**{**REVISES, **LEFT_TO_RIGHT, **GUESSING}, revise_share=0.4, steps=40)


class Killed(BaseException):
    """Ends a run where it stands, with nothing more written down."""


@pytest.mark.parametrize(("refresh", "at", "saved"), [(20, 22, 15), (20, 38, 30), (15, 38, 30), (7, 18, 15)])
def test_a_killed_run_goes_on_with_the_lessons_that_it_would_have_had(
    refresh: int,
    at: int,
    saved: int,
    passages: Path,
    tmp_path: Path,
    local: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first refresh, between two, at one; a block of lessons has 16 steps."""
    for module in ("run", "lessons"):
        monkeypatch.setattr(f"unembed.{module}.REFRESH", refresh)

    def kill(run: Run) -> None:
        if run.step == at:
            raise Killed

    with monkeypatch.context() as patch:
        watch_steps(patch, kill)
        with pytest.raises(Killed):
            train(LEARNS, data=passages, out=tmp_path / "killed")
    state = tmp_path / "killed" / "state"
    assert json.loads((state / "progress.json").read_text())["step"] == saved
    earlier, average = (load_file(state / f"{name}.safetensors") for name in ("earlier", "average"))
    assert not any(torch.equal(earlier[key], average[key]) for key in ("places", "tokens.weight"))
    train(LEARNS, data=passages, out=tmp_path / "killed", resume=True)
    train(LEARNS, data=passages, out=tmp_path / "whole")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    one, two = (hashes(tmp_path / name / "state") for name in ("killed", "whole"))
    assert one["earlier.safetensors"] == two["earlier.safetensors"]


def test_a_run_without_lessons_keeps_nothing_for_them(
    passages: Path, tmp_path: Path, local: list[str]
) -> None:
    config = LEARNS.override(revise_share=0.0, steps=2)
    train(config, data=passages, out=tmp_path)
    assert not (tmp_path / "state" / "earlier.safetensors").exists()


@pytest.mark.parametrize(("share", "noised", "revised"), [(0.4, 5, 4), (0.0, 9, 0)])
def test_a_run_has_batches_and_lessons_of_its_shares(
    share: float, noised: int, revised: int, prepared: PreparedData, local: list[str]
) -> None:
    run = Run(fit_to_data(LEARNS.override(revise_share=share), prepared), group=ALONE)
    pairs = open_pairs(run.config, prepared, ALONE)
    call_teacher(run, pairs)
    lesson = run.lesson()
    assert isinstance(pairs, FreshSpans) and pairs.batch_size == noised
    assert (0 if lesson is None else len(lesson.x0)) == revised
    assert (run.teacher is None) == (run.earlier is None) == (share == 0)


# --- begun with given weights ---------------------------------------------------------------------

NEVER: dict[str, Any] = {"causal": True, "embeds": True}
READING, GUESSES = {"projection.w1.weight", "projection.w1.bias"}, {"vector.weight", "vector.bias", "whole"}
ONLY_REVISING = {
    "projection.within", "projection.beyond", "asked", "nearer", "blocks.0.attention.draft_gain"
}  # fmt: skip


def given(prepared: PreparedData, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Write a model with random weights to a folder, and return these."""
    run = Run(fit_to_data(CONFIG.override(**settings), prepared), group=ALONE)
    perturb(run.model)
    weights = {name: p.detach() for name, p in run.model.named_parameters()}
    save_checkpoint(folder, Checkpoint(run.config, weights, prepared.tokenizer))
    return weights


@pytest.mark.parametrize(
    ("before", "now", "encoder", "fresh"),
    [
        (NEVER, REVISES, "fake", ONLY_REVISING),
        (REVISES, REVISES, "fake", set()),
        (REVISES, NEVER, "fake", set()),
        ({}, REVISES, "fake", ONLY_REVISING | GUESSES | {"shifted"}),
        (REVISES, {"causal": True}, "fake", set()),
        (NEVER, REVISES, "other", ONLY_REVISING | GUESSES | READING),
        (REVISES, NEVER, "other", GUESSES | READING),
    ],
)
def test_a_model_may_learn_to_revise_later_and_may_leave_it(
    before: dict[str, Any],
    now: dict[str, Any],
    encoder: str,
    fresh: set[str],
    prepared: PreparedData,
    tmp_path: Path,
) -> None:
    weights = given(prepared, tmp_path / "model", before)
    config = fit_to_data(CONFIG.override(**now), prepared).override(encoder=encoder)
    new, run = Run(config, group=ALONE), Run(config, group=ALONE, start_from=tmp_path / "model")
    own, found = dict(new.model.named_parameters()), dict(run.model.named_parameters())
    assert found.keys() == own.keys()
    kept = {name for name in found.keys() & weights.keys() if torch.equal(found[name], weights[name])}
    assert found.keys() - kept == fresh
    # Drawn as in a run from nothing, but for what stands for a vector that is to be guessed.
    assert all(torch.equal(found[name], own[name]) for name in fresh - {"whole"})
    assert ("whole" not in fresh) or torch.equal(found["whole"], weights["projection.null"])


@torch.no_grad()
def test_a_model_that_is_to_revise_says_the_same_at_first(prepared: PreparedData, tmp_path: Path) -> None:
    given(prepared, tmp_path / "model", NEVER)
    configs = [fit_to_data(CONFIG.override(**settings), prepared) for settings in (NEVER, REVISES)]
    models: list[Any] = [
        Run(config, group=ALONE, start_from=tmp_path / "model").average for config in configs
    ]
    x0, e = spans_of(prepared).validation()
    one, two = (write(model, e) for model in models)
    assert torch.equal(models[0](x0, e), models[1](x0, e)) and torch.equal(one, two)
    assert torch.equal(models[0].embed(x0), models[1].embed(x0))
    torch.testing.assert_close(models[0].embed(x0), models[1].embed(x0, e))


# --- measured -------------------------------------------------------------------------------------

FIGURES = {"revised_loss", "draft_f1", "revised_f1", "told_apart"}


@torch.no_grad()
def test_validation_tells_what_revising_is_worth(prepared: PreparedData) -> None:
    run, _ = revising_run(prepared, validation=40)
    model: Any = writer_for(prepared)
    x0, e = spans_of(prepared, validation=40).validation()
    # Some are as the model writes them: of these there is nothing to be told apart.
    run.average, held_out = model, (torch.cat((write(model, e[:7]), x0[7:])), e)
    figures = validate(run, held_out)
    assert figures == validate(run, held_out) and figures.keys() >= FIGURES
    loss, tokens, apart, f1 = 0.0, 0, list[bool](), list[list[float]]()
    for x0, e in zip(*(part.split(1) for part in held_out), strict=True):
        draft = write(model, e)
        known, count = told(model, e, draft), int((x0 != 0).sum())
        chances = model.head(model.hidden(x0, e, **known)[0, :count]).log_softmax(1)
        loss, tokens = loss - float(chances.gather(1, x0[:, :count].T).sum()), tokens + count
        if not torch.equal(draft, x0):
            right, wrong = (F.cosine_similarity(model.embed(ids, e), e) for ids in (x0, draft))
            apart.append(bool(right > wrong))
        words = [ids[0][ids[0] > 1].tolist() for ids in (x0, draft, write(model, e, draft=draft))]
        f1.append([token_f1(words[0], found) for found in words[1:]])
    assert len(apart) == 33
    assert figures["revised_loss"] == pytest.approx(loss / tokens, rel=1e-4)
    assert figures["told_apart"] == pytest.approx(sum(apart) / len(apart)) and 0 < sum(apart) < len(apart)
    drafts, revised = (sum(row[k] for row in f1) / len(f1) for k in (0, 1))
    assert (figures["draft_f1"], figures["revised_f1"]) == pytest.approx((drafts, revised))
    assert 0 < drafts < 1 and 0 < revised < 1 and drafts != revised
    run.config = run.config.override(revise_share=0.0)
    assert validate(run, held_out).keys() == figures.keys() - FIGURES


# --- learnt ---------------------------------------------------------------------------------------


class BagEncoder(TabledEncoder):
    """A random vector for each token, wherever it stands: what a draft misses are some of the words."""

    def __init__(self) -> None:
        table = torch.randn(64, 1, SIZE, generator=seeded()).expand(64, LENGTH, SIZE)
        super().__init__(table, syllable_tokenizer())


def test_revising_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder tells words and not their order, so that what a draft misses is soon understood."""
    monkeypatch.setattr("unembed.encoders.load_encoder", lambda name, **_: BagEncoder())
    for module in ("run", "lessons"):
        monkeypatch.setattr(f"unembed.{module}.REFRESH", 100)
    data = prepare(texts(1500, 30), encoder=BagEncoder(), out=tmp_path, max_tokens=LENGTH, kind="passages")
    config = CONFIG.override(
        **REVISES, revise_share=0.5, causal_share=0.7, embed_share=0.1, batch_size=64, optimizer="muon",
        muon_rate=2e-2, decay="constant", steps=400, validation=400,
    )  # fmt: skip
    run = Run(fit_to_data(config, data), group=ALONE)
    pairs = open_pairs(run.config, data, ALONE)
    call_teacher(run, pairs)
    held_out, found = pairs.validation(), list[dict[str, float]]()
    for run.step in range(400):
        run.set_rate()
        train_step(run, pairs, masked_loss)
        if run.step >= 199 and run.step % 50 == 49:
            found.append(validate(run, held_out))
    mean = {name: sum(figures[name] for figures in found) / len(found) for name in found[0]}
    assert mean["revised_f1"] > mean["draft_f1"] > 0.4
    assert mean["revised_loss"] < mean["causal_loss"]
    assert all(figures["told_apart"] > 0.8 for figures in found)
