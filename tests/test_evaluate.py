from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recovering import SHAPE, FakeEncoder, FakeInverter, make_tokenizer

from unembed.baselines import random_tokens
from unembed.corpus import prepare
from unembed.errors import UnembedError
from unembed.evaluate import evaluate, evaluate_suites, plan
from unembed.figures import figures_of
from unembed.inverter import Inverter
from unembed.metrics import bleu
from unembed.personal import Item
from unembed.provenance import weights_digest
from unembed.scoring import References, refer
from unembed.suites import Sample, Suite, suite_of
from unembed.tokens import TextTokenizer

TEXTS = [
    "The small cat sat on the mat",
    "the old dog ran",
    "a red bird sat on a roof today",
    "the red cat ran on the old road",
]
LONG = "the red cat ran on the old road today and tomorrow"
KEYS = {
    "strategy", "steps", "texts", "token_accuracy", "token_f1", "exact_match", "bleu", "rouge_l", "cosine",
    "forward_passes", "encoder_calls", "texts_per_second", "intervals",
}  # fmt: skip


@pytest.fixture
def tokenizer() -> TextTokenizer:
    return make_tokenizer()


def run(inverter: Inverter, texts: Iterable[str] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    options.setdefault("encoder", FakeEncoder())
    records = evaluate(texts, inverter=inverter, **options)
    return [dataclasses.asdict(record) for record in records]


def test_perfect_inverter(tokenizer: TextTokenizer) -> None:
    (record,) = run(FakeInverter(tokenizer, known=TEXTS))
    assert set(record) == KEYS
    for metric in ("token_accuracy", "token_f1", "exact_match", "rouge_l", "cosine"):
        assert record[metric] == pytest.approx(1)
        assert record["intervals"][metric] == pytest.approx((1, 1))
    assert record["bleu"] == pytest.approx(100)
    assert record["intervals"]["bleu"] == pytest.approx((100, 100))
    assert (record["texts"], record["steps"], record["forward_passes"]) == (4, 8, 8)
    assert record["encoder_calls"] == 0
    assert 0 < record["texts_per_second"] < 500
    assert json.loads(json.dumps(record))["strategy"] == "confidence"


def test_half_known(tokenizer: TextTokenizer) -> None:
    (record,) = run(FakeInverter(tokenizer, known=TEXTS[:2]), texts=[TEXTS[0], "a red bird ran"])
    # Against "a red bird ran", "the old cat" has no token right.
    for metric in ("token_accuracy", "token_f1", "exact_match", "rouge_l"):
        assert record[metric] == pytest.approx(0.5)
        low, high = record["intervals"][metric]
        assert 0 <= low < 0.5 < high <= 1
    assert 0 < record["bleu"] < 100
    assert record["cosine"] < 0.99


def test_each_strategy_and_number_of_steps(tokenizer: TextTokenizer) -> None:
    inverter = FakeInverter(tokenizer, known=TEXTS)
    records = run(
        inverter,
        texts=iter(TEXTS),
        limit=3,
        strategies=["euler", "confidence"],
        steps=[2, 8],
        guidance=1.5,
        seed=7,
        batch_size=2,
    )
    assert [(r["strategy"], r["steps"]) for r in records] == [
        ("euler", 2), ("euler", 8), ("confidence", 2), ("confidence", 8)
    ]  # fmt: skip
    assert [r["forward_passes"] for r in records] == [2, 8, 2, 8]
    assert {r["texts"] for r in records} == {3}
    calls = inverter.calls[1::2]
    assert all(call["count"] == 3 for call in calls)
    for option, value in {"guidance": 1.5, "seed": 7, "batch_size": 2, "temperature": None}.items():
        assert {call[option] for call in calls} == {value}


def test_each_method_is_warmed_up_with_its_own_options(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inverter, encoder = FakeInverter(tokenizer, known=TEXTS), FakeEncoder()
    monkeypatch.setattr(inverter, "config", inverter.config.override(causal=True))
    config = inverter.config.model
    search: dict[str, Any] = {"refine": "encoder", "rounds": 3, "candidates": 8, "pool": 2, "budget": 9}
    methods = plan(["beam", "causal", "euler"], [2], config=config, baselines=["random", "unconditional"])
    methods += plan(["confidence"], [4], config=config, drafts=3)
    methods += plan(["auto"], config=config, **search)
    evaluate_suites([suite_of(TEXTS)], inverter=inverter, encoder=encoder, methods=methods, seed=5)
    warm_ups, timed = inverter.calls[::2], inverter.calls[1::2]
    assert [call["strategy"] for call in timed] == ["beam", "causal", "euler", "euler", "confidence", "beam"]
    assert [(one["count"], other["count"]) for one, other in zip(warm_ups, timed, strict=True)] == [
        (1, 4)
    ] * 6
    for one, other in zip(warm_ups, timed, strict=True):
        short = {"rounds": 1, "candidates": 4} if "refine" in other else {}
        assert one == other | {"count": 1, "batch_size": 1} | short


def test_texts_are_embedded_as_cut_with_their_case(tokenizer: TextTokenizer) -> None:
    encoder = FakeEncoder()
    with pytest.warns(UserWarning, match="1 of 3 texts are longer than 8 tokens"):
        references = refer([*TEXTS[:2], LONG], tokenizer=tokenizer, encoder=encoder, max_tokens=8)
    assert encoder.seen == [*TEXTS[:2], "the red cat ran on the old road"]
    assert references.texts[0] == TEXTS[0].lower()
    assert [len(ids) for ids in references.ids] == [7, 4, 8]


def test_empty_hypothesis_scores_nothing(tokenizer: TextTokenizer) -> None:
    inverter = FakeInverter(tokenizer, known=[])
    inverter.guess = []
    encoder = FakeEncoder()
    (record,) = run(inverter, encoder=encoder)
    for metric in ("token_accuracy", "token_f1", "exact_match", "bleu", "rouge_l", "cosine"):
        assert record[metric] == 0
    assert "" not in encoder.seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ["confidense"]}, "did you mean 'confidence'"),
        ({"steps": [0]}, "steps must be between 1 and 8"),
        ({"steps": [8, 9]}, "steps must be between 1 and 8"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"texts": "the cat"}, "list of texts"),
        ({"texts": []}, "no text to evaluate"),
        ({"texts": ["the cat", " "]}, "blank"),
        ({"encoder": SimpleNamespace(name="other", size=3)}, "other gives vectors of 3 numbers.*fake, of 16"),
    ],
)
def test_mistakes_are_named_before_any_inversion(
    tokenizer: TextTokenizer, options: dict[str, Any], message: str
) -> None:
    inverter = FakeInverter(tokenizer, known=TEXTS)
    with pytest.raises(UnembedError, match=message):
        run(inverter, **options)
    assert not inverter.calls


@pytest.mark.parametrize("kind", ["pairs", "passages"])
def test_baselines_are_recorded_like_strategies(tokenizer: TextTokenizer, tmp_path: Path, kind: Any) -> None:
    encoder = FakeEncoder()
    data = prepare(
        [*TEXTS[2:], "the mat"],
        encoder=encoder,
        tokenizer=tokenizer,
        out=tmp_path / "data",
        max_tokens=8,
        kind=kind,
    )
    methods = plan([], [4], baselines=["random", "unconditional", "nearest"], config=SHAPE)
    assert [(m.name, m.guidance, m.baseline) for m in methods] == [
        ("random", 1, True), ("unconditional-4", 0, True), ("nearest", 1, True)
    ]  # fmt: skip
    inverter = FakeInverter(tokenizer, known=TEXTS)
    suites = [suite_of(TEXTS[:2], name="a"), suite_of(TEXTS[2:], name="b")]
    out = tmp_path / "records.jsonl"
    records = evaluate_suites(
        suites, inverter=inverter, encoder=encoder, methods=methods, out=out, data=data, batch_size=1
    )
    assert [(row.method, row.suite) for row in records.rows] == [
        (name, suite) for name in ("random", "unconditional-4", "nearest") for suite in "aabb"
    ]
    calls = [call for call in inverter.calls if "guidance" in call]
    assert {(call["guidance"], call["steps"]) for call in calls} == {(0, 4)}
    exact = [row.exact_match for row in records.rows if row.method == "nearest"]
    assert exact == [0, 0, 1, 1]
    assert records.settings["nearest_from"]["name"] == "data"


def test_plans_that_make_no_sense() -> None:
    with pytest.raises(UnembedError, match="nothing to measure"):
        plan([], [8], config=SHAPE)
    with pytest.raises(UnembedError, match="did you mean 'nearest'"):
        plan(baselines=["nearst"], config=SHAPE)
    with pytest.raises(UnembedError, match="confidence-8 is asked for twice"):
        plan(["confidence"], [8, 8], config=SHAPE)
    names = [m.name for m in plan(["euler"], [2], config=SHAPE, guidance=1.5, temperature=0.5)]
    assert names == ["euler-2-guidance-1.5-temperature-0.5"]


@pytest.mark.parametrize(
    ("strategies", "options", "plain", "reading"),
    [
        (["auto"], {}, ["confidence-8"], ["beam-8"]),
        (["auto"], {"steps": [2, 4]}, ["confidence-2", "confidence-4"], ["confidence-2", "confidence-4"]),
        (["auto"], {"steps": [2, 8]}, ["confidence-2", "confidence-8"], ["confidence-2", "beam-8"]),
        (["auto"], {"temperature": 0.5}, ["confidence-8-temperature-0.5"], ["causal-8-temperature-0.5"]),
        (["auto", "euler"], {"temperature": 0.0}, ["confidence-8-temperature-0", "euler-8-temperature-0"],
         ["beam-8-temperature-0", "euler-8-temperature-0"]),
        (["auto"], {"drafts": 4}, ["confidence-8-drafts-4"], ["confidence-8-drafts-4"]),
        (["euler"], {"drafts": 4, "steps": [2], "temperature": 0.5}, ["euler-2-temperature-0.5-drafts-4"],
         ["euler-2-temperature-0.5-drafts-4"]),
        (["auto", "euler"], {"beams": 4}, ["confidence-8", "euler-8"], ["beam-8-beams-4", "euler-8"]),
        (["auto"], {"beams": 4, "looks": 1}, ["confidence-8"], ["beam-8-beams-4-looks-1"]),
        ([], {"baselines": ["unconditional"]}, ["unconditional-8"], ["unconditional-8"]),
    ],
)  # fmt: skip
def test_a_plan_names_what_auto_is(
    strategies: list[str], options: dict[str, Any], plain: list[str], reading: list[str]
) -> None:
    for causal, names in ((False, plain), (True, reading)):
        methods = plan(strategies, config=dataclasses.replace(SHAPE, causal=causal), **options)
        assert [m.name for m in methods] == names
        assert all(m.name.startswith(f"{m.strategy}-{m.steps}") for m in methods)
    assert plan(config=SHAPE) == plan(["auto"], config=SHAPE)
    assert plan(["euler"], config=dataclasses.replace(SHAPE, max_tokens=4))[0].steps == 4


def test_a_plan_says_how_many_beams_there_are() -> None:
    reading = dataclasses.replace(SHAPE, causal=True)
    usual = plan(["beam", "causal", "confidence"], config=reading)
    assert [(m.name, m.beams) for m in usual] == [("beam-8", 32), ("causal-8", None), ("confidence-8", None)]
    assert plan(["beam", "causal", "confidence"], config=reading, beams=32) == usual
    assert [(m.name, m.beams) for m in plan(config=reading, beams=16)] == [("beam-8-beams-16", 16)]


def test_a_plan_says_how_often_beams_look() -> None:
    reading = dataclasses.replace(SHAPE, causal=True)
    guessing = dataclasses.replace(reading, embeds=True)
    for config, looks in ((reading, 0), (guessing, 4)):
        methods = plan(["beam", "causal"], config=config)
        assert [(m.name, m.looks) for m in methods] == [("beam-8", looks), ("causal-8", None)]
        assert methods[0].knobs == {"drafts": 1, "beams": 32, "looks": looks}
    assert [(m.name, m.looks) for m in plan(config=guessing, looks=0)] == [("beam-8-looks-0", 0)]


def test_nearest_needs_data(tokenizer: TextTokenizer) -> None:
    with pytest.raises(UnembedError, match="needs the text it may choose from"):
        evaluate_suites(
            [suite_of(TEXTS)],
            inverter=FakeInverter(tokenizer, known=[]),
            encoder=FakeEncoder(),
            methods=plan([], [8], baselines=["nearest"], config=SHAPE),
        )


def test_random_tokens_depend_on_the_number_of_the_text(tokenizer: TextTokenizer) -> None:
    references = refer(TEXTS, tokenizer=tokenizer, encoder=FakeEncoder(), max_tokens=8)
    tail = References(references.ids[2:], references.texts[2:], references.vectors[2:])
    whole = random_tokens(references, tokenizer=tokenizer, seed=3)
    assert random_tokens(tail, tokenizer=tokenizer, seed=3, first=2).texts == whole.texts[2:]


def test_languages_get_figures_and_tokenizers_of_their_own(tokenizer: TextTokenizer) -> None:
    samples = [Sample(text, language) for language in ("en", "zh", "ko") for text in TEXTS]
    records = evaluate_suites(
        [Suite("mixed", tuple(samples))],
        inverter=FakeInverter(tokenizer, known=TEXTS[:2]),
        encoder=FakeEncoder(),
        methods=plan(config=SHAPE),
    )
    found = figures_of(records)
    assert [(f.language, f.texts) for f in found] == [(None, 12), ("en", 4), ("zh", 4), ("ko", 4)]
    assert found[0].bleu_tokenizers == {"en": "13a", "zh": "zh", "ko": "char"}
    rows = [row for row in records.rows if row.language == "ko"]
    expected = bleu([r.reference for r in rows], [r.recovered for r in rows], tokenize="char")
    assert found[3].values["bleu"] == pytest.approx(expected)
    assert found[1].values["bleu"] != pytest.approx(expected)


def test_unknown_words_are_never_recovered(tokenizer: TextTokenizer) -> None:
    text = "the wombat sat on the quokka"
    records = evaluate_suites(
        [suite_of([text, TEXTS[0]])],
        inverter=FakeInverter(tokenizer, known=[text, TEXTS[0]]),
        encoder=FakeEncoder(),
        methods=plan(config=SHAPE),
    )
    odd, plain = records.rows
    assert (odd.tokens, odd.unknown, plain.unknown) == (6, 2, 0)
    assert odd.token_accuracy == odd.token_f1 == pytest.approx(4 / 6)
    assert (odd.exact_match, plain.exact_match, plain.token_f1) == (0, 1, 1)
    assert figures_of(records)[0].unknown == pytest.approx(2 / 13)


def test_what_was_cut_off_is_no_leak(tokenizer: TextTokenizer) -> None:
    items = (Item("name", "Cat"), Item("name", "tomorrow"))
    with pytest.warns(UserWarning, match="1 of 1 texts"):
        records = evaluate_suites(
            [Suite("s", (Sample(LONG, "en", items),))],
            inverter=FakeInverter(tokenizer, known=[]),
            encoder=FakeEncoder(),
            methods=plan(config=SHAPE),
        )
    assert records.rows[0].personal == [{"kind": "name", "text": "Cat", "recovered": True}]


@pytest.mark.parametrize("refine", ["encoder", "self", "distilled"])
def test_a_search_is_recorded_with_whom_it_asked(
    tokenizer: TextTokenizer, refine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inverter, encoder = FakeInverter(tokenizer, known=TEXTS), FakeEncoder()
    guess = SimpleNamespace(model=torch.nn.Linear(2, 2))
    monkeypatch.setattr(inverter, "distilled", lambda: guess)
    methods = plan(refine=refine, rounds=3, candidates=4, budget=9, config=SHAPE)
    assert [m.name for m in methods] == [f"confidence-8-{refine}-3x4-budget-9"]
    records = evaluate_suites([suite_of(TEXTS)], inverter=inverter, encoder=encoder, methods=methods)
    call = inverter.calls[-1]
    assert (call["refine"], call["rounds"], call["budget"]) == (refine, 3, 9)
    # The real encoder is not handed to a search that is to do without.
    assert call.get("encoder") is (encoder if refine == "encoder" else None)
    expected = weights_digest(guess.model) if refine == "distilled" else None
    assert records.settings["distilled"] == expected
