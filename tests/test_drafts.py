"""Several drafts of each vector: the same that would be drawn alone, and one of them chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import CONFIG, END, MASK, PAD, E, Forgetful, NoQuestions, T, Told, V, causal_model
from torch import Tensor

from unembed import beam, choice, drafts
from unembed import decode as decoding
from unembed.choice import LENGTH_POWER, rescore
from unembed.config import DiffusionConfig
from unembed.decode import DRAFTS_TEMPERATURE, DecodeOptions, Draft, FittedOptions, decode, draw_uniforms
from unembed.drafts import choose, token_likelihood
from unembed.engine import HalfModel, Int8Model, RecordedModel
from unembed.errors import UnembedError
from unembed.model import Denoiser
from unembed.strategies import find_strategy
from unembed.trunk import Model, Trunk, guided_logits

K = 5
DRAWN = ("confidence", "sequential", "euler", "euler-remask", "two-stage", "causal")
READING = dataclasses.replace(CONFIG, causal=True)


def plain_model(**changes: Any) -> Denoiser:
    """Return a random model that does not read left to right, and whose texts end here and there."""
    torch.manual_seed(0)
    model = Denoiser(dataclasses.replace(CONFIG, **changes)).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.3)
    model.bias[[END, PAD]] += 1
    return model


def hearing(model: Denoiser) -> Denoiser:
    model.hears = True
    return model


def guessing_model(make: Any = causal_model) -> Denoiser:
    """Return a random model that guesses the vectors of texts, too."""
    model: Denoiser = make(embeds=True)
    model.embeds = True
    return model


def vectors(rows: int) -> Tensor:
    return torch.randn((rows, E), generator=torch.Generator().manual_seed(1))


def run(
    model: Model, e: Tensor, *, seed: int = 0, first: int = 0,
    start: Draft | None = None, avoid: Tensor | None = None, **options: Any,
) -> list[Draft]:  # fmt: skip
    plan = DecodeOptions(**options).fit(model.config)
    uniforms = plan.draw(first, first + len(e), config=model.config, seed=seed)
    return list(
        decode(
            model, e, options=plan, diffusion=DiffusionConfig(), uniforms=uniforms, start=start, avoid=avoid
        )
    )


def alone(model: Model, e: Tensor, *, steps: int, seed: int = 0, **options: Any) -> list[list[Draft]]:
    """Draft K times, each time as if there were no other draft; the steps of each."""
    own = find_strategy(options["strategy"]).temperature
    options.setdefault("temperature", own or DRAFTS_TEMPERATURE)
    plan = DecodeOptions(steps=steps, **options).fit(model.config)
    drawn = draw_uniforms(0, len(e) * K, steps=plan.steps, length=T, seed=seed)
    return [
        list(decode(model, e, options=plan, diffusion=DiffusionConfig(), uniforms=drawn[k::K]))
        for k in range(K)
    ]


def cut(row: Tensor) -> list[int]:
    """Return a text with its end, if it has one."""
    ids: list[int] = row.tolist()
    return ids[: ids.index(END) + 1] if END in ids else ids


@torch.inference_mode()
def plain_score(model: Denoiser, e: Tensor, draft: Draft, row: int, guidance: float) -> float:
    """Score one text by itself: its likelihood left to right, or how sure the model was of it."""
    text = cut(draft.ids[row])
    if not model.config.causal:
        return float(draft.confidence[row, : len(text)].log().mean())
    one, ids = torch.ones(1, dtype=torch.bool), draft.ids[row : row + 1]
    hidden = [
        model.hidden(ids, e[row : row + 1], t=one.float(), causal=one, drop=torch.tensor([drop]))
        for drop in [True] * (guidance != 1) + [False] * (guidance != 0)
    ]
    logs = guided_logits(model, [h[0] for h in hidden], guidance=guidance).log_softmax(-1)
    return sum(float(logs[i, token]) for i, token in enumerate(text)) / len(text) ** LENGTH_POWER


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize(
    ("reading", "strategy", "guidance"),
    [(reading, strategy, 1.0) for reading in (False, True) for strategy in DRAWN[: 5 + reading]]
    + [(True, "confidence", 0.0), (True, "confidence", 2.5), (True, "causal", 2.5)],
)
def test_the_best_of_the_drafts_is_the_answer(
    reading: bool, strategy: str, guidance: float, embeds: bool
) -> None:
    make, e, steps = causal_model if reading else plain_model, vectors(40), 5
    model = hearing(guessing_model(make) if embeds else make())
    found = run(model, e, strategy=strategy, steps=steps, drafts=K, guidance=guidance)
    left = strategy == "causal"
    assert len(found) == (T if left else steps)
    each = alone(model, e, strategy=strategy, steps=steps - (reading and not left), guidance=guidance)
    texts = torch.stack([s[-1].ids for s in each], 1)
    score = torch.tensor(
        [[plain_score(model, e, s[-1], row, guidance) for s in each] for row in range(len(e))]
    )
    padded = torch.tensor([[(cut(text) + [PAD] * T)[:T] for text in row] for row in texts])
    heard = model.bag(e).log_softmax(-1) if guidance else None
    with torch.inference_mode():
        like = None
        if embeds and guidance:
            guesses = torch.stack([torch.cat([model.embed(text[None]) for text in row]) for row in padded])
            like = F.cosine_similarity(guesses, e[:, None], dim=2)
        best = rescore(padded, score, heard=heard, likeness=like, config=model.config).argmax(1)
    best = torch.tensor([row.tolist().index(row[k].tolist()) for row, k in zip(padded, best, strict=True)])
    assert torch.equal(found[-1].ids, texts[torch.arange(len(e)), best])
    sure = torch.stack([s[-1].confidence for s in each], 1)[torch.arange(len(e)), best]
    torch.testing.assert_close(found[-1].confidence, sure, atol=1e-5, rtol=0)
    guessed = torch.full((len(e),), torch.nan) if like is None else like[torch.arange(len(e)), best]
    torch.testing.assert_close(found[-1].likeness, guessed, atol=1e-5, rtol=0, equal_nan=True)
    # Neither the first draft, nor by likelihood alone.
    assert (best > 0).any() and (best != score.argmax(1)).any()
    # Until then the first is shown, and all that was read for it and the others is counted.
    for step, draft in enumerate(found[:-1]):
        assert torch.equal(draft.ids, each[0][step].ids)
        assert draft.passes.tolist() == torch.stack([s[step].passes for s in each]).sum(0).tolist()
        assert draft.likeness.isnan().all()
    spent = torch.stack([s[-1].passes for s in each]).sum(0)
    reads = K * (2 if guidance == 2.5 else 1) if reading and not left else 0
    guesses_made = K if embeds and guidance else 0
    assert torch.equal(found[-1].passes, spent + reads + guesses_made)


@pytest.mark.parametrize("make", [causal_model, plain_model])
def test_passes_are_the_rows_that_were_read(make: Any) -> None:
    model = Forgetful(make())
    last = run(model, vectors(8), strategy="confidence", steps=4, drafts=K)[-1]
    assert len(model.rows) == 4  # one after the other, whatever the number of drafts
    assert sum(model.rows) == int(last.passes.sum())
    assert model.rows[2] < 8 * K  # those that are done are not read again,
    assert (model.rows[3] == 8 * K) is model.config.causal  # but to be chosen from


@pytest.mark.parametrize("make", [causal_model, guessing_model])
def test_a_gpu_finds_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, e = make(), vectors(8)
    plain = run(model, e, steps=4, drafts=K)[-1]
    for module in (decoding, choice):  # where rows that are done stay a while, and guesses are made together
        monkeypatch.setattr(module, "is_gpu", lambda e: True)
    last = run(model, e, steps=4, drafts=K)[-1]
    assert torch.equal(last.ids, plain.ids) and torch.equal(last.passes, plain.passes)


@pytest.mark.parametrize(
    "make", [causal_model, plain_model, guessing_model, lambda: guessing_model(plain_model)]
)
@pytest.mark.parametrize("strategy", ["confidence", "euler"])
def test_neither_the_batch_nor_the_room_changes_an_answer(
    make: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, e = make(), vectors(9)
    options: dict[str, Any] = {"strategy": strategy, "steps": 4, "drafts": K, "seed": 3}
    whole = run(model, e, **options)[-1]
    for row in range(len(e)):
        one = run(model, e[row : row + 1], first=row, **options)[-1]
        assert torch.equal(one.ids[0], whole.ids[row]) and one.passes[0] == whole.passes[row]
        torch.testing.assert_close(one.confidence[0], whole.confidence[row], atol=1e-5, rtol=0)
    for rows in (3, 11, 40):
        monkeypatch.setattr(beam, "ROWS", {"cpu": rows})
        noting = Forgetful(model)
        steps = run(noting, e, **options)
        assert len(steps) == 4
        assert torch.equal(steps[-1].ids, whole.ids) and torch.equal(steps[-1].passes, whole.passes)
        assert K <= max(noting.rows) <= max(rows, K)  # one vector's drafts, if there is room for no more


def test_a_seed_gives_the_same_answer_and_another_another() -> None:
    model, e = causal_model(), vectors(12)
    one, same, other = (run(model, e, steps=4, drafts=K, seed=seed)[-1] for seed in (1, 1, 2))
    assert torch.equal(one.ids, same.ids) and torch.equal(one.confidence, same.confidence)
    assert not torch.equal(one.ids, other.ids)


def test_more_drafts_are_better_by_what_they_are_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "rescore", lambda ids, score, **_: score)
    model, e = causal_model(), vectors(30)
    likely = []
    for count in (2, 8, 32):
        last = run(model, e, steps=4, drafts=count)[-1]
        likely.append(sum(plain_score(model, e, last, row, 1.0) for row in range(len(e))))
    assert likely == sorted(likely) and likely[0] < likely[-1] - 5


def test_one_draft_is_what_it_was() -> None:
    for config in (CONFIG, READING):
        for strategy in DRAWN[: 5 + config.causal]:
            plan = DecodeOptions(strategy, 3).fit(config)
            assert plan.drafting(config) == plan.steps and plan.temperature is None
            drawn = plan.draw(4, 9, config=config, seed=2)
            assert torch.equal(drawn, draw_uniforms(4, 9, steps=plan.steps, length=T, seed=2))


def test_a_draft_draws_as_a_vector_of_its_own() -> None:
    plan = DecodeOptions("confidence", 4, drafts=3).fit(READING)
    drawn = plan.draw(2, 5, config=READING, seed=7)
    assert drawn.shape == (3, 3 * 3, 2, T)  # the fourth step reads
    expected = draw_uniforms(6, 15, steps=3, length=T, seed=7)
    assert torch.equal(drawn.reshape_as(expected), expected)


def test_options_meet_a_model() -> None:
    for options, config, strategy, steps, drafting, temperature in (
        (DecodeOptions(drafts=2), READING, "confidence", 8, 7, 0.7),  # and no beam
        (DecodeOptions(steps=3, drafts=2), READING, "confidence", 3, 2, 0.7),
        (DecodeOptions(steps=T, drafts=2), READING, "confidence", T, T - 1, 0.7),
        (DecodeOptions(temperature=0.5, drafts=2), READING, "confidence", 8, 7, 0.5),
        (DecodeOptions("euler", drafts=2), READING, "euler", 8, 7, 1.0),
        (DecodeOptions("causal", 3, drafts=2), READING, "causal", T, T, 0.7),  # likelihood is known
        (DecodeOptions(drafts=2), CONFIG, "confidence", 8, 8, 0.7),
        (DecodeOptions(steps=1, drafts=64), CONFIG, "confidence", 1, 1, 0.7),
    ):
        fitted = options.fit(config)
        assert (fitted.strategy, fitted.steps, fitted.temperature) == (strategy, steps, temperature)
        assert fitted.drafting(config) == drafting and fitted.drafts == options.drafts
        assert fitted.fit(config) == fitted  # what is settled stays
    assert FittedOptions(drafts=4).drafts == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafts": 0}, "drafts must be a whole number from 1 to 64, not 0"),
        ({"drafts": 65}, "drafts must be .* not 65"),
        ({"drafts": 2.0}, "drafts must be .* not 2.0"),
        ({"drafts": True}, "drafts must be .* not True"),
        ({"strategy": "beam", "drafts": 2}, "beam .* draws nothing; leave drafts out"),
        ({"temperature": 0.0, "drafts": 2}, "at temperature 0 all would be the same"),
        ({"strategy": "euler", "temperature": 0, "drafts": 2}, "at temperature 0 all would be the same"),
        ({"steps": 1, "drafts": 2}, "steps must be at least 2 with drafts, not 1"),
        ({"steps": T + 1, "drafts": 2}, f"steps must be between 1 and {T}"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnembedError, match=said):
        DecodeOptions(**options).fit(READING)


@pytest.mark.parametrize("make", [causal_model, plain_model])
def test_masks_are_filled_too(make: Any) -> None:
    model, e = make(), vectors(12)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, V, (len(e), T), generator=generator)
    known = torch.rand((len(e), T), generator=generator) < 0.5
    known[0] = True  # nothing is left to fill
    start = Draft(
        torch.where(known, words, MASK), known * 0.5, torch.arange(len(e)), torch.full((len(e),), torch.nan)
    )
    options: dict[str, Any] = {"strategy": "confidence", "steps": 3, "drafts": K, "start": start}
    last = run(model, e, **options)[-1]
    assert torch.equal(last.ids[known], words[known]) and not (last.ids == MASK).any()
    assert not torch.equal(last.ids, run(model, e, **options, seed=1)[-1].ids)
    reads = K if model.config.causal else 0
    assert int(last.passes[0]) == reads
    assert ((last.passes - start.passes)[1:] > reads).all()
    assert ((last.passes - start.passes) <= 3 * K).all()
    avoided = run(model, e, **options, avoid=last.ids)[-1]
    free = ~known & ~((avoided.ids == END).cumsum(1) > 0)
    assert free.any() and (avoided.ids[free] != last.ids[free]).all()


def test_no_rows_no_answer() -> None:
    for model in (causal_model(), plain_model(), guessing_model()):
        steps = run(model, vectors(0), steps=3, drafts=K)
        assert len(steps) == 3 and steps[-1].ids.shape == (0, T)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_host_asks_for_nothing_but_counts(guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "is_gpu", lambda e: True)
    monkeypatch.setattr(choice, "is_gpu", lambda e: True)
    for module in (decoding, drafts):
        monkeypatch.setattr(module, "Count", Told)
    model, e = guessing_model(), vectors(9)
    monkeypatch.setattr(model, "head", lambda h: h[:, :1].expand(-1, V).clone())
    plan = DecodeOptions(steps=3, guidance=guidance, drafts=4).fit(model.config)
    uniforms = plan.draw(0, 9, config=model.config, seed=0)
    with NoQuestions():
        list(decode(model, e, options=plan, diffusion=DiffusionConfig(), uniforms=uniforms))


@pytest.mark.parametrize("wrap", [HalfModel, Int8Model, lambda m: RecordedModel(HalfModel(m))])
def test_models_as_decoding_runs_them_do_it_too(wrap: Any) -> None:
    model, e = hearing(causal_model(hidden=32, layers=2)).requires_grad_(False), vectors(12)
    ready = wrap(model)
    last = run(ready, e, steps=4, drafts=4)[-1]
    assert not (last.ids == MASK).any() and int(last.ids.max()) < V
    if isinstance(ready, Int8Model):
        assert torch.equal(run(ready, e[5:6], steps=4, drafts=4, first=5)[-1].ids[0], last.ids[5])


# --- choosing


def chosen(
    model: Denoiser,
    texts: list[list[int]],
    confidence: list[float],
    *,
    reads: bool = False,
    guidance: float = 1.0,
) -> int:
    """Choose between texts of one vector, each of whose tokens the model was so sure of."""
    ids = torch.tensor([[(text + [PAD] * T)[:T] for text in texts]])
    sure = torch.tensor(confidence)[None, :, None].expand(ids.shape)
    e = vectors(1)
    trunk = Trunk.of(model, e, guidance=guidance).take(torch.zeros(len(texts), dtype=torch.long))
    with torch.inference_mode():
        best, _ = choose(trunk, e, ids, sure, guidance=guidance, reads=reads)
        return int(best)


def test_a_blank_text_does_not_win_by_having_no_words() -> None:
    assert chosen(plain_model(), [[3, 4, 5, END], [END], [3, 4, 6, END]], [0.5, 0.1, 0.4]) == 0
    assert chosen(plain_model(), [[3, 4, 5, END], [7, 8, END], [3, 4, 6, END]], [0.0, 0.0, 0.0]) in (0, 2)


def test_of_those_that_say_the_same_it_is_the_first() -> None:
    texts = [[3, 4, END], [5, 6, 7, END], [8, 9, END], [5, 6, 7, END, 4], [5, 6, 7, END, 9, 9]]
    assert chosen(plain_model(), texts, [0.1, 0.2, 0.1, 0.3, 0.4]) == 1


def test_what_stands_behind_an_end_counts_for_nothing() -> None:
    for model, reads in ((plain_model(), False), (causal_model(), True), (guessing_model(), True)):
        generator = torch.Generator().manual_seed(4)
        for _ in range(20):
            texts = [[*torch.randint(3, 8, (3 + k,), generator=generator).tolist(), END] for k in range(4)]
            sure = torch.rand(4, generator=generator).tolist()
            more = [[*text, *torch.randint(3, 8, (T,), generator=generator).tolist()] for text in texts]
            assert chosen(model, texts, sure, reads=reads) == chosen(model, more, sure, reads=reads)


def test_a_guess_that_is_nearer_speaks_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model, e = guessing_model(plain_model), F.normalize(vectors(1), dim=-1)
    texts = [[3, 4, 5, END], [6, 7, END], [8, 9, 10, 11, END]]
    for k, text in enumerate(texts):

        def embed(ids: Tensor, first: int = text[0]) -> Tensor:
            return torch.where(ids[:, :1] == first, e, -e)

        monkeypatch.setattr(model, "embed", embed)
        assert chosen(model, texts, [0.5, 0.4, 0.3]) == k
        # Without the vector nothing is compared with it.
        assert chosen(model, texts, [0.5, 0.4, 0.3], guidance=0.0) == 0


@torch.inference_mode()
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_drafts_written_left_to_right_are_as_likely_as_they_were_sure(guidance: float) -> None:
    model, e = causal_model(), vectors(10)
    last = run(model, e, strategy="causal", temperature=1.0, guidance=guidance)[-1]
    content = drafts.content_places(last.ids, model.config)
    assert content.all(1).any() or content.sum(1).unique().numel() > 2
    trunk = Trunk.of(model, e, guidance=guidance, causal=True)
    read = token_likelihood(trunk, last.ids, content, guidance=guidance)
    torch.testing.assert_close(read[content], last.confidence[content].log(), atol=1e-4, rtol=0)
    assert not read[~content].any()
