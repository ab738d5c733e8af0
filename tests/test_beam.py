"""Beam search: the same as the plainest one, whatever the batch, the device, or what the model keeps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beginnings import (
    Text,
    assert_same,
    cosines,
    found,
    guessing,
    next_tokens,
    parts,
    pretend,
    vectors,
)
from reading import CONFIG, END, MASK, PAD, Attentive, Forgetful, NoQuestions, T, Told, V, causal_model
from recovering import make_tokenizer
from torch import Tensor

from unembed import beam, choice, trunk, writer
from unembed.beam import Beams, beam_search
from unembed.choice import LENGTH_POWER, recognise, rescore
from unembed.config import Config, DiffusionConfig
from unembed.decode import DecodeOptions, Draft, blank, decode, draw_uniforms
from unembed.engine import HalfModel, Int8Model, RecordedModel
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.trunk import Model


@pytest.fixture
def by_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the likeliest text win, whatever else speaks for others."""
    monkeypatch.setattr(choice, "rescore", lambda ids, score, **_: score)


def decoded(model: Model, e: Tensor, start: Draft | None = None, **options: Any) -> list[Draft]:
    uniforms = draw_uniforms(0, len(e), steps=T, length=T, seed=0)
    plan = DecodeOptions(**options)
    return list(decode(model, e, options=plan, diffusion=DiffusionConfig(), uniforms=uniforms, start=start))


def normal(text: Text) -> float:
    return text[1] / len(text[0]) ** LENGTH_POWER


def plain_beam(model: Denoiser, e: Tensor, beams: int, guidance: float) -> tuple[list[Text], int]:
    """Search as it is written down in books, one beginning after the other; and how many were read."""
    kept: list[Text] = [((), 0.0)]
    passes = 0
    for _ in range(model.config.max_tokens):
        longer: list[Text] = []
        for text, likelihood in kept:
            if END in text:
                longer.append((text, likelihood))
                continue
            passes += 1 if guidance in (0, 1) else 2
            chances = next_tokens(model, e, text, guidance)
            longer += [((*text, token), likelihood + chance) for token, chance in enumerate(chances)]
        kept = sorted(longer, key=lambda text: -text[1])[:beams]
    return sorted(kept, key=lambda text: -normal(text)), passes


@pytest.mark.parametrize("gpu", [False, True])  # where the host's numbers are a step old
@pytest.mark.parametrize("guidance", [1.0, 0.0, 2.5])
@pytest.mark.parametrize(
    "changes", [{"layers": 2}, {"positions": "learned", "adaln_rank": 4, "time_conditioning": True}]
)
@pytest.mark.usefixtures("by_likelihood")
def test_the_beams_are_the_plainest_searches(
    changes: dict[str, Any], guidance: float, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = causal_model(**changes), vectors(7)
    last = found(model, e, beams=4, guidance=guidance)
    assert_same(last, found(Forgetful(model), e, beams=4, guidance=guidance))
    for row in range(len(e)):
        wanted, passes = plain_beam(model, e[row : row + 1], 4, guidance)
        padded = [[*text, *[PAD] * (T - len(text))] for text, _ in wanted]
        assert last.ids[row].tolist() == padded
        assert last.score[row].tolist() == pytest.approx([normal(text) for text in wanted], abs=1e-4)
        assert int(last.passes[row]) == passes
        for k, (text, likelihood) in enumerate(wanted):
            sure = last.confidence[row, k]
            assert float(sure[: len(text)].log().sum()) == pytest.approx(likelihood, abs=1e-4)
            assert (sure[len(text) :] == 0).all()  # padding was not predicted
    lengths = (last.confidence > 0).sum(2)
    if guidance == 1:  # else the random model's texts do not end
        assert len(lengths.unique()) > 3 and (lengths.amin(1) < lengths.amax(1)).any()


@pytest.mark.usefixtures("by_likelihood")
def test_a_beam_that_holds_every_text_finds_the_likeliest() -> None:
    size, words = 3, [PAD, 3, 4]  # as a token padding is one like any other
    model = causal_model(max_tokens=size, vocab_size=5)
    texts = [(*text, END) for n in range(size) for text in itertools.product(words, repeat=n)]
    texts += itertools.product(words, repeat=size)
    for e in vectors(5).split(1):
        every: list[Text] = [
            (text, sum(next_tokens(model, e, text[:i], 1.0)[token] for i, token in enumerate(text)))
            for text in texts
        ]
        every.sort(key=lambda text: -normal(text))
        last = found(model, e, beams=64)
        assert last.score[0, : len(every)].tolist() == pytest.approx([normal(t) for t in every], abs=1e-4)
        wanted = [[*text, *[PAD] * (size - len(text))] for text, _ in every]
        assert last.ids[0, : len(every)].tolist() == wanted
        assert (last.score[0, len(every) :] == -math.inf).all()  # there are no more
        assert not (last.ids == MASK).any()
        narrow = found(model, e, beams=2)
        assert float(narrow.score[0, 0]) <= float(last.score[0, 0]) + 1e-5


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 0.0, 2.5])
def test_one_beam_is_greedy(guidance: float, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("beam", "choice", "decode", "writer"):
        monkeypatch.setattr(f"unembed.{module}.is_gpu", lambda e: gpu)
    model, e = causal_model(layers=2), vectors(20)
    greedy = decoded(model, e, strategy="causal", guidance=guidance)
    narrow = decoded(model, e, strategy="beam", beams=1, guidance=guidance)
    for one, other in zip(narrow, greedy, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.passes, other.passes)
        torch.testing.assert_close(one.confidence, other.confidence, atol=1e-5, rtol=0)
    wide = decoded(model, e, strategy="beam", guidance=guidance)[-1]
    assert not torch.equal(wide.ids, greedy[-1].ids)
    assert not (wide.ids == MASK).any()


def test_guidance_changes_the_answer() -> None:
    model, e = causal_model(), vectors(8)
    plain, more = found(model, e, beams=4), found(model, e, beams=4, guidance=3.0)
    assert not torch.equal(plain.ids, more.ids)
    almost = found(model, e, beams=4, guidance=1 + 1e-7)
    assert torch.equal(almost.ids, plain.ids) and torch.equal(almost.passes, 2 * plain.passes)


@pytest.mark.parametrize("gpu", [False, True])
def test_neither_the_batch_nor_the_room_changes_an_answer(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = causal_model(), vectors(9)
    whole = found(model, e, beams=4)
    for row in (0, 8):
        assert_same(found(model, e[row : row + 1], beams=4), Beams(*(x[row : row + 1] for x in parts(whole))))
    for rows in (3, 8, 20):
        monkeypatch.setattr(beam, "ROWS", {"cpu": rows})
        noting = Attentive(model)
        steps = list(beam_search(noting, e, beams=4))
        assert len(steps) == T
        assert_same(steps[-1], whole)
        assert 4 <= max(noting.rows) <= max(rows, 4)  # one text's beams, if there is room for no more


def test_ended_beams_are_not_read_again() -> None:
    model = Attentive(causal_model())
    last = found(model, vectors(9), beams=4)
    assert model.places == int(last.passes.sum())
    assert (last.passes <= 1 + 4 * (T - 1)).all() and (last.passes < 1 + 4 * (T - 1)).any()
    ends = last.ids == END
    behind = ends.cumsum(2) - ends.long() > 0
    assert behind.any() and (last.ids[behind] == PAD).all()
    for row in last.ids:
        assert len(row.unique(dim=0)) == len(row)  # no text twice


def test_a_step_shows_a_beginning() -> None:
    for place, step in enumerate(beam_search(causal_model(), vectors(6), beams=3)):
        ends = (step.ids == END).cumsum(2) > 0
        assert torch.equal(step.ids == MASK, ~ends & (torch.arange(T) > place))
        assert (step.score[:, :-1] >= step.score[:, 1:]).all()


def test_the_stream_is_the_best_beams() -> None:
    model, e = causal_model(), vectors(6)
    drafts, steps = decoded(model, e, strategy="beam", beams=3), list(beam_search(model, e, beams=3))
    for draft, step in zip(drafts, steps, strict=True):
        assert torch.equal(draft.ids, step.ids[:, 0]) and torch.equal(draft.passes, step.passes)
        assert torch.equal(draft.confidence, step.confidence[:, 0])


def test_no_rows_no_passes() -> None:
    model = Attentive(causal_model())
    steps = list(beam_search(model, vectors(0), beams=4))
    assert len(steps) == T and steps[-1].ids.shape == (0, 4, T) and not model.places


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_host_asks_for_nothing_but_counts(guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=True)
    for module in (writer, trunk):
        monkeypatch.setattr(module, "Count", Told)
    model, e = guessing(), vectors(9)
    monkeypatch.setattr(model, "head", lambda h: h[:, :1].expand(-1, V).clone())
    with NoQuestions():
        list(beam_search(model, e, beams=4, looks=2, guidance=guidance))


def test_a_gpus_batch_is_halved_as_texts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=True)
    model = causal_model()
    with torch.no_grad():
        model.bias[END] += 3.0
    noting = Attentive(model)
    found(noting, vectors(16), beams=2)
    # One row a text at first, then all of its beams; half of the texts end, which is seen a step late.
    assert noting.rows == [16, 32, 32] + [16] * (T - 3)


class Branching:
    """A model that begins in four ways: three end at once, and the likeliest branches a little later."""

    config = dataclasses.replace(CONFIG, causal=True)

    def hidden(self, xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        logits = torch.full((len(xt), T, V), -9.0)
        logits[:, 0, 3:7] = torch.tensor([3.0, 0.3, 0.2, 0.1])
        logits[:, 1:, END] = 4.0
        for place in range(1, T):
            main = xt[:, place - 1] == 3
            logits[main, place, END] = -9.0
            logits[main, place, 3] = 4.0 if place < 3 else -9.0
            if place == 3:
                logits[main, place, 7:11] = torch.tensor([4.0, 3.9, 3.8, 3.7])
        return logits

    def head(self, h: Tensor) -> Tensor:
        return h


@pytest.mark.usefixtures("by_likelihood")
def test_ended_beams_give_way_to_those_that_branch_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (False, True):  # where a number a step old would be too small
        pretend(monkeypatch, gpu=gpu)
        last = found(Branching(), vectors(1), beams=4)
        assert last.ids[0, :, :5].tolist() == [[3, 3, 3, token, END] for token in (7, 8, 9, 10)]
        assert last.passes.tolist() == [1 + 4 + 1 + 1 + 4]


@pytest.mark.parametrize("wrap", [HalfModel, Int8Model, lambda m: RecordedModel(HalfModel(m))])
def test_models_as_decoding_runs_them_do_it_too(wrap: Any) -> None:
    model, e = causal_model(hidden=32, layers=2).requires_grad_(False), vectors(12)
    ready = wrap(model)
    last = found(ready, e, beams=4)
    assert not (last.ids == MASK).any() and int(last.ids.max()) < V
    plain = found(model, e, beams=4)
    same = (last.ids[:, 0] == plain.ids[:, 0]).all(1).float().mean()
    assert float(same) > 0.4  # rounding decides close choices, and no others
    if isinstance(ready, Int8Model):
        assert torch.equal(found(ready, e[5:6], beams=4).ids[0], last.ids[5])


def test_beams_begin_with_nothing() -> None:
    model, e = causal_model(), vectors(3)
    start = blank(3, CONFIG, device=e.device)
    start = dataclasses.replace(start, passes=torch.tensor([1, 0, 5]))
    plain, begun = decoded(model, e, strategy="beam")[-1], decoded(model, e, start, strategy="beam")[-1]
    assert torch.equal(begun.ids, plain.ids) and torch.equal(begun.passes, plain.passes + start.passes)
    start.ids[1, 0] = 7
    with pytest.raises(UnembedError, match="beam writes whole texts"):
        decoded(model, e, start, strategy="beam")
    with pytest.raises(UnembedError, match="beam writes whole texts"):
        list(
            decode(
                model, e, options=DecodeOptions("beam"), diffusion=DiffusionConfig(),
                uniforms=torch.rand(3, T, 2, T), avoid=torch.full((3, T), MASK),
            )
        )  # fmt: skip


def test_a_model_that_does_not_read_left_to_right_says_so() -> None:
    with pytest.raises(UnembedError, match="does not read left to right, as beam does"):
        decoded(Denoiser(CONFIG), vectors(1), strategy="beam")


def hearing(model: Denoiser) -> Denoiser:
    model.hears = True
    return model


@torch.inference_mode()
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 0.0])
@pytest.mark.parametrize("embeds", [False, True])
def test_at_last_all_that_speaks_for_a_text_decides_between_the_same_beams(
    guidance: float, embeds: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = hearing(guessing() if embeds else causal_model()), vectors(40)
    *before, chosen = beam_search(model, e, beams=6, guidance=guidance)
    monkeypatch.setattr(choice, "rescore", lambda ids, score, **_: score)
    *same, likeliest = beam_search(model, e, beams=6, guidance=guidance)
    for one, other in zip(before, same, strict=True):
        assert_same(one, other)
    heard = model.bag(e).log_softmax(-1) if guidance else None  # without the vector there is nothing to hear
    like = cosines(model, e, likeliest.ids) if guidance and embeds else None
    score = rescore(likeliest.ids, likeliest.score, heard=heard, likeness=like, config=model.config)
    assert_same(chosen, likeliest.sorted_by(score))
    for each in before:
        assert each.likeness.isnan().all()  # until then nothing is guessed
    assert chosen.likeness.isnan().all() if like is None else chosen.likeness.isfinite().all()
    changed = (chosen.ids[:, 0] != likeliest.ids[:, 0]).any(1)
    assert 0 < int(changed.sum()) < len(e) or not guidance  # without it, all the texts are one


@pytest.mark.parametrize("wrap", [HalfModel, Int8Model, lambda model: RecordedModel(HalfModel(model))])
def test_models_as_decoding_runs_them_hear_too(wrap: Any) -> None:
    model = hearing(causal_model())
    ready = wrap(model)
    assert ready.hears and not wrap(causal_model()).hears
    told = ready.head(ready.gist(vectors(3))).float()[:, :V].softmax(-1)
    torch.testing.assert_close(told, model.bag(vectors(3)).softmax(-1), atol=0.02, rtol=0)


class Partial:
    """Guesses the vector itself of one text, and its opposite of all others; counts what it is asked."""

    def __init__(self, model: Denoiser, e: Tensor, text: Tensor) -> None:
        self.config, self.hidden, self.head = model.config, model.hidden, model.head
        self.embeds, self.e, self.text, self.asked = True, F.normalize(e, dim=-1), text, 0

    def embed(self, ids: Tensor) -> Tensor:
        self.asked += 1
        same = (F.pad(ids, (0, T - ids.shape[1]), value=PAD) == self.text).all(1, keepdim=True)
        return torch.where(same, self.e, -self.e)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_text_that_the_guess_speaks_for_is_chosen(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    model = causal_model()
    for e in vectors(3).split(1):
        for text in (plain := found(model, e, beams=4)).ids[0]:
            last = found(Partial(model, e, text), e, beams=4)
            assert torch.equal(last.ids[0, 0], text)
            torch.testing.assert_close(last.likeness, torch.tensor([[1.0, -1.0, -1.0, -1.0]]))
            others = (plain.ids[0] != text).any(1)
            assert torch.equal(last.ids[0, 1:], plain.ids[0][others])  # between which nothing has changed


def test_without_the_vector_no_guess_is_asked_for() -> None:
    model, e = causal_model(), vectors(1)
    plain = found(model, e, beams=4, guidance=0.0)
    partial = Partial(model, e, plain.ids[0, -1])
    assert_same(found(partial, e, beams=4, guidance=0.0), plain)
    assert not partial.asked
    found(partial, e, beams=4, guidance=2.0)
    assert partial.asked


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, Int8Model])
def test_with_guesses_an_answer_does_not_depend_on_the_vectors_beside_it(
    wrap: Any, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = wrap(guessing().requires_grad_(False)), vectors(9)
    whole = found(model, e, beams=4)
    for row in range(len(e)):
        assert_same(found(model, e[row : row + 1], beams=4), Beams(*(x[row : row + 1] for x in parts(whole))))
    monkeypatch.setattr(beam, "ROWS", {"cpu": 8})
    assert_same(found(model, e, beams=4), whole)


def test_guesses_of_texts_depend_neither_on_the_texts_beside_them_nor_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, e = guessing(), vectors(1)
    texts = [[5, 6, END], [7], [5, PAD, 6, END], list(range(3, 3 + T))]  # as a token, padding is one, too
    ids = torch.tensor([[text + [PAD] * (T - len(text)) for text in texts]])
    wanted = cosines(model, e, ids)
    with torch.inference_mode():
        for gpu in (False, True):
            pretend(monkeypatch, gpu=gpu)
            torch.testing.assert_close(recognise(model, e, ids), wanted)
            for k in range(len(texts)):
                torch.testing.assert_close(recognise(model, e, ids[:, k : k + 1]), wanted[:, k : k + 1])


def test_a_model_that_was_not_taught_to_guess_is_not_asked() -> None:
    model = causal_model(embeds=True)
    assert recognise(model, vectors(2), torch.full((2, 3, T), 5)) is None
    assert recognise(Branching(), vectors(2), torch.full((2, 3, T), 5)) is None


@pytest.mark.parametrize("gpu", [False, True])
def test_guesses_of_no_rows(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    assert found(guessing(), vectors(0), beams=4).ids.shape == (0, 4, T)


@pytest.mark.parametrize("wrap", [HalfModel, Int8Model, lambda model: RecordedModel(HalfModel(model))])
def test_models_as_decoding_runs_them_guess_too(wrap: Any) -> None:
    model, e = guessing(hidden=32, layers=2).requires_grad_(False), vectors(12)
    ids = found(model, e, beams=4).ids
    with torch.inference_mode():
        torch.testing.assert_close(recognise(wrap(model), e, ids), cosines(model, e, ids), atol=0.05, rtol=0)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_an_inverter_knows_whether_its_model_was_taught_to_guess(share: float) -> None:
    config = Config().override(embeds=True, embed_share=share)
    inverter = Inverter(causal_model(embeds=True), config=config, tokenizer=make_tokenizer(), device="cpu")
    assert inverter.ready.embeds is (share > 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight", [0.0, 0.2])
def test_an_inverter_knows_whether_its_model_was_taught_to_hear(weight: float) -> None:
    config = Config().override(bag_weight=weight)
    inverter = Inverter(causal_model(), config=config, tokenizer=make_tokenizer(), device="cpu")
    assert inverter.ready.hears is (weight > 0)  # type: ignore[attr-defined]
