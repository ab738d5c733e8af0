"""lessons: drafts by earlier weights, the same whoever asks and whenever."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import END, MASK, PAD, T, V
from revising import (
    content,
    revising_model,
    same,
    seeded,
    some_texts,
    some_vectors,
    spans_of,
    told,
    writer_for,
)
from syllables import ALONE, FakeEncoder
from syllables import T as LENGTH
from torch import Tensor

from unembed import lessons
from unembed.corpus import PreparedData
from unembed.lessons import Lesson, Teacher, drawn, write
from unembed.model import Denoiser
from unembed.pairs import step_generator
from unembed.run import Group

WHOLE = slice(None)


# --- tokens that are drawn ------------------------------------------------------------------------


def test_without_heat_the_likeliest_token_is_drawn() -> None:
    logits = torch.randn(500, V, generator=seeded())
    for noise in (torch.rand(500, V, generator=seeded(1)), torch.zeros(500, V), torch.ones(500, V)):
        assert torch.equal(drawn(logits, noise, torch.zeros(500)), logits.argmax(1))


@pytest.mark.parametrize("heat", [1.0, 0.5])
def test_with_heat_tokens_are_drawn_as_often_as_they_are_likely(heat: float) -> None:
    logits, count = torch.tensor([0.3, 1.0, -torch.inf, -0.5, 0.8, -2.0]), 100_000
    noise = torch.rand(count, 6, generator=seeded())
    found = drawn(logits.expand(count, 6), noise, torch.full((count,), heat))
    shares = torch.bincount(found, minlength=6) / count
    torch.testing.assert_close(shares, (logits / heat).softmax(0), rtol=0, atol=0.006)
    assert shares[2] == 0


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_rarest_draws_are_tokens_too(noise: float) -> None:
    logits = torch.tensor([[0.0, 2.0, -torch.inf]])
    assert drawn(logits, torch.full((1, 3), noise), torch.ones(1)).tolist() == [1]


# --- texts that are written -----------------------------------------------------------------------


def by_hand(model: Denoiser, e: Tensor, draft: Tensor | None) -> list[int]:
    """Write the likeliest text of one vector (1, E), reading the whole row once for each of its places."""
    ids, known = torch.full((1, T), MASK), told(model, e, draft)
    for place in range(T):
        token = int(model.head(model.hidden(ids, e, **known)[0, place]).argmax())
        ids[0, place] = token
        if token == END:
            return [*ids[0, : place + 1].tolist(), *[PAD] * (T - place - 1)]
    return ids[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("revised", [False, True])
def test_texts_are_written_as_by_reading_each_row_whole_again_and_again(revised: bool) -> None:
    model, e = revising_model(), some_vectors(40)
    drafts = some_texts(40) if revised else None
    found = write(model, e, draft=drafts)
    rows = [None] * 40 if drafts is None else drafts.split(1)
    assert found.tolist() == [by_hand(model, *row) for row in zip(e.split(1), rows, strict=True)]
    ends = (found == END).sum(1)
    assert len(found.unique(dim=0)) > 10 and 0 < ends.sum() < 40
    if drafts is not None:  # it does matter what is revised
        others = write(model, e, draft=drafts.roll(1, 0))
        assert all((other != found).any() for other in (others, write(model, e)))


@torch.no_grad()
@pytest.mark.parametrize("revised", [False, True])
def test_rows_with_heat_are_drawn_and_others_are_not(revised: bool) -> None:
    model, e = revising_model(), some_vectors(60)
    draft = some_texts(60) if revised else None
    heat = torch.where(torch.arange(60) % 2 == 0, 0.0, 2.0)
    plain = write(model, e, draft=draft)
    found, again, other = (write(model, e, heat=heat, generator=seeded(s), draft=draft) for s in (3, 3, 4))
    assert torch.equal(found, again)
    assert torch.equal(found[::2], plain[::2]) and torch.equal(other[::2], plain[::2])
    changed = (found[1::2] != plain[1::2]).any(1) & (found[1::2] != other[1::2]).any(1)
    assert changed.float().mean() > 0.8
    assert not (found == MASK).any()


@torch.no_grad()
def test_behind_an_end_stands_padding() -> None:
    model, e = revising_model(), some_vectors(300)
    found = write(model, e, heat=torch.full((300,), 1.5), generator=seeded())
    ends, places = found == END, torch.arange(T)
    first = torch.where(ends.any(1), ends.int().argmax(1), T)[:, None]
    assert len(first.unique()) > T // 2
    assert torch.equal(ends, places == first)
    assert (found[places > first] == PAD).all()


@torch.no_grad()
def test_who_writes_may_choose_tokens_in_a_way_of_its_own() -> None:
    model, asked = revising_model(), list[tuple[Tensor, ...]]()

    def choose(*given: Tensor) -> Tensor:
        asked.append(given)
        return torch.full((5,), 7)

    heat = torch.full((5,), 0.3)
    found = write(model, some_vectors(5), heat=heat, generator=seeded(), choose=choose)
    assert torch.equal(found, torch.full((5, T), 7)) and len(asked) == T
    for logits, noise, given in asked:
        assert logits.shape == noise.shape == (5, V) and given is heat
        assert 0 <= noise.min() < noise.max() < 1


# --- lessons --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(passages: Path) -> PreparedData:
    return PreparedData.open(passages)


def test_a_lesson_is_a_function_of_weights_seed_and_step(prepared: PreparedData) -> None:
    """Steps of a CPU's block: 64 // 8."""
    model = writer_for(prepared)
    teacher = Teacher(model, spans_of(prepared), rows=8, share=ALONE.rows)
    taught = [teacher.lesson(step) for step in range(20)]
    assert [lesson.draft.shape for lesson in taught] == [(8, LENGTH)] * 20
    assert not any(same(taught[a], taught[b]) for a in range(20) for b in range(a))
    for step in (3, 19, 0, 7, 8, 7, 15, 16):  # no matter what was asked for before
        torch.manual_seed(step)
        torch.rand(step)
        again = Teacher(model, spans_of(prepared), rows=8, share=ALONE.rows)
        assert same(teacher.lesson(step), taught[step]) and same(again.lesson(step), taught[step])
    seed = Teacher(model, spans_of(prepared, seed=6), rows=8, share=ALONE.rows).lesson(3)
    assert not torch.equal(seed.x0, taught[3].x0) and not torch.equal(seed.draft, taught[3].draft)
    assert not any(p.requires_grad for f in fields(Lesson) for p in [getattr(taught[0], f.name)])


def test_texts_of_lessons_are_spans_that_a_run_has_not(prepared: PreparedData) -> None:
    """They are drawn as its batches are, by another seed and a block at a time."""
    spans = spans_of(prepared, swap_share=0.5, splice_share=0.5)
    teacher = Teacher(writer_for(prepared), spans, rows=8, share=ALONE.rows)
    for first in (0, 8):
        x0, e = spans.others(batch_size=64, seed=6).batch(first, WHOLE)
        taught = [teacher.lesson(first + step) for step in range(8)]
        assert torch.equal(torch.cat([lesson.x0 for lesson in taught]), x0)
        assert torch.equal(torch.cat([lesson.e for lesson in taught]), e)
        torch.testing.assert_close(e, FakeEncoder().encode_ids(x0, content(x0)))


def test_other_spans_are_those_of_their_seed_and_size(prepared: PreparedData) -> None:
    shares = {"swap_share": 0.5, "splice_share": 0.5}
    spans, wanted = spans_of(prepared, **shares), spans_of(prepared, **shares, batch_size=20, seed=11)
    spans._compiled = spans.encoder.encode_ids
    before, others = spans.batch(4, WHOLE), spans.others(batch_size=20, seed=11)
    for step in range(3):
        assert all(map(torch.equal, others.batch(step, WHOLE), wanted.batch(step, WHOLE)))
    assert others._compiled is None and spans._compiled is not None  # that was for one shape
    assert all(map(torch.equal, spans.batch(4, WHOLE), before)) and others.tokens is spans.tokens


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_texts_of_a_block(world: int, prepared: PreparedData) -> None:
    model, spans = writer_for(prepared), spans_of(prepared, splice_share=0.5)
    alone = Teacher(model, spans, rows=5, share=ALONE.rows)  # steps of a block: 64 // 5
    groups = [Group(rank, world, torch.device("cpu")) for rank in range(world)]
    teachers = [Teacher(model, spans, rows=5, share=group.rows) for group in groups]
    for first in (0, 12):
        whole = [alone.lesson(first + step) for step in range(12)]
        parts = [[teacher.lesson(first + step) for step in range(12)] for teacher in teachers]
        sizes = [[len(lesson.x0) for lesson in part] for part in parts]
        assert sizes == [[len(range(5)[group.rows(5)])] * 12 for group in groups]
        for name in ("x0", "e"):
            found = torch.cat([getattr(lesson, name) for part in parts for lesson in part])
            torch.testing.assert_close(found, torch.cat([getattr(lesson, name) for lesson in whole]))


def test_drafts_are_drawn_anew_for_every_seed_block_and_process(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seeds = writer_for(prepared), list[int]()

    def note(*args: Any, **options: Any) -> torch.Generator:
        generator = step_generator(*args, **options)
        seeds.append(generator.initial_seed())
        return generator

    monkeypatch.setattr(lessons, "step_generator", note)
    for seed in range(3):
        for rank in range(3):
            share = Group(rank, 3, torch.device("cpu")).rows
            teacher = Teacher(model, spans_of(prepared, seed=seed), rows=16, share=share)
            for step in range(12):  # four of a block
                teacher.lesson(step)
    others = {
        step_generator(seed, step, stream=stream).initial_seed()
        for seed in range(5)
        for step in range(12)
        for stream in (*range(10), *range(10_000, 10_004))
    }
    assert len(set(seeds)) == len(seeds) == 27 and not others & set(seeds)


def test_drafts_are_of_the_weights_that_the_teacher_has_learnt(prepared: PreparedData) -> None:
    one, two = (writer_for(prepared, seed) for seed in (0, 1))
    spans = spans_of(prepared)
    first, second = (Teacher(model, spans, rows=8, share=ALONE.rows).lesson(3) for model in (one, two))
    assert torch.equal(first.x0, second.x0) and torch.equal(first.e, second.e)
    assert not torch.equal(first.draft, second.draft)
    teacher = Teacher(one, spans, rows=8, share=ALONE.rows)
    with torch.no_grad():
        for p, new in zip(one.parameters(), two.parameters(), strict=True):
            p.copy_(new)
    assert same(teacher.lesson(3), first)  # it keeps what it knows, whatever is learnt meanwhile
    teacher.learn(one)
    assert same(teacher.lesson(3), second)


def test_blocks_begin_anew_when_the_teacher_is_to_learn(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "REFRESH", 10)
    spans = spans_of(prepared)
    teacher, others = (
        Teacher(writer_for(prepared), spans, rows=8, share=ALONE.rows),
        spans.others(batch_size=64, seed=6),
    )
    for first, steps in ((0, 8), (8, 2), (10, 8), (18, 2), (20, 8)):
        x0, _ = others.batch(first, WHOLE)
        for step in range(steps):
            assert torch.equal(teacher.lesson(first + step).x0, x0[8 * step : 8 * step + 8])


def test_drafts_have_the_vectors_that_the_encoder_gives_them(prepared: PreparedData) -> None:
    teacher = Teacher(writer_for(prepared), spans_of(prepared), rows=8, share=ALONE.rows)
    taught = [teacher.lesson(step) for step in range(8)]
    for lesson in taught:
        vectors = F.normalize(FakeEncoder().encode_ids(lesson.draft, content(lesson.draft)), dim=1)
        torch.testing.assert_close(lesson.vectors, vectors)
        # This encoder has none of an empty text.
        torch.testing.assert_close(lesson.vectors.norm(dim=1), content(lesson.draft).clamp_max(1).float())
    drafts = torch.cat([lesson.draft for lesson in taught])
    assert len(content(drafts).unique()) > 3 and not (drafts == 2).any()


def test_drafts_are_of_four_kinds(prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2000 rows 5 in 100 are as they should be, 20 edited, 75 written, and 25 of these twice."""
    asked: list[tuple[int, Tensor]] = []

    def text(e: Tensor, draft: Tensor | None) -> Tensor:
        body = (10 + e.argmax(1))[:, None].expand(-1, LENGTH - 1)
        return torch.cat((body, torch.full((len(e), 1), 3 if draft is None else 4)), 1)

    def pretend(model: Any, e: Tensor, *, heat: Tensor, draft: Tensor | None, **_: Any) -> Tensor:
        assert draft is None or torch.equal(draft, text(e, None))
        asked.append((len(e), heat))
        return text(e, draft)

    monkeypatch.setattr(lessons, "write", pretend)
    monkeypatch.setattr(lessons, "_ROWS", {"cpu": 2000})
    teacher = Teacher(writer_for(prepared), spans_of(prepared), rows=50, share=ALONE.rows)
    taught = [teacher.lesson(step) for step in range(40)]
    x0, e, draft = (torch.cat([getattr(lesson, name) for lesson in taught]) for name in ("x0", "e", "draft"))
    once, twice = ((draft == text(e, given)).all(1) for given in (None, draft))
    assert (int(once.sum()), int(twice.sum())) == (1000, 500)
    others = ~(once | twice)
    right = others & (draft == x0).all(1)
    assert 100 <= right.sum() < 150  # some edits change nothing
    edits = others & ~right
    assert ((draft == x0)[edits].float().mean() > 0.3) and content(draft[edits]).min() > 0
    # In no order: a lesson has all kinds.
    assert all(
        0.5 < float((once | twice)[rows].float().mean()) < 0.95 for rows in torch.arange(2000).chunk(40)
    )
    assert [count for count, _ in asked] == [1500, 500]
    for _, heat in asked:
        assert heat.unique().tolist() == pytest.approx([0.0, 0.7])
        assert 0.4 < float((heat > 0).float().mean()) < 0.6
