"""Figures: means, intervals and leaks of rows, and what two sets of rows have between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from unembed import metrics
from unembed.errors import UnembedError
from unembed.figures import METRICS, compare, figures, select
from unembed.records import Records, Row


def row(number: int, f1: float = 0.5, *, key: str | None = None, **options: Any) -> Row:
    defaults: dict[str, Any] = dict(
        method="confidence-8", suite="s", language=None, text="a b c d e", reference="a b c d e",
        recovered="a b c d x", tokens=5, token_accuracy=0.8, exact_match=0.0, rouge_l=0.8, cosine=0.9,
        forward_passes=8, encoder_calls=0, seconds=0.5,
    )  # fmt: skip
    return Row(**{**defaults, "number": number, "key": key or str(number), "token_f1": f1, **options})


def leaks(*items: tuple[str, bool]) -> list[dict[str, Any]]:
    return [{"kind": kind, "text": "x", "recovered": found} for kind, found in items]


def test_figures_are_means_with_their_intervals() -> None:
    f1 = np.random.default_rng(0).random(40)
    rows = [row(i, float(x), recovered="a b c d e" if i % 2 else "x") for i, x in enumerate(f1)]
    found = figures(rows, seed=3)
    assert found.values["token_f1"] == pytest.approx(f1.mean())
    assert found.intervals["token_f1"] == pytest.approx(metrics.bootstrap_interval(f1, seed=3))
    expected = sacrebleu.corpus_bleu([r.recovered for r in rows], [[r.reference for r in rows]]).score
    assert found.values["bleu"] == pytest.approx(expected)
    statistics = metrics.bleu_statistics([r.reference for r in rows], [r.recovered for r in rows])
    assert found.intervals["bleu"] == pytest.approx(metrics.bleu_interval(statistics, seed=3))
    assert list(found.values) == list(METRICS)
    assert (found.texts, found.forward_passes, found.texts_per_second) == (40, 8, pytest.approx(2))


def test_leaks() -> None:
    rows = [row(i, personal=leaks(("name", i < 5), ("number", False))) for i in range(20)]
    rows += [row(i) for i in range(20, 100)]
    name, number = figures(rows).leaks
    assert (name.kind, name.items, name.recovered, name.share, name.per_1000) == ("name", 20, 5, 0.25, 50)
    assert name.share_interval[0] < 0.25 < name.share_interval[1]
    assert name.per_1000_interval[0] < 50 < name.per_1000_interval[1]
    # None of 20 is no proof that none ever does: Wilson's bound, z^2 / (n + z^2).
    bound = 1.96**2 / (20 + 1.96**2)
    assert (number.recovered, number.share, number.per_1000) == (0, 0, 0)
    assert number.share_interval == pytest.approx((0, bound), abs=1e-4)
    assert number.per_1000_interval == pytest.approx((0, 200 * bound), abs=0.02)
    (every,) = figures([row(i, personal=leaks(("name", True))) for i in range(20)]).leaks
    assert every.share_interval == pytest.approx((1 - bound, 1), abs=1e-4)
    assert figures([row(0)]).leaks == []


def test_several_items_in_a_text_count_each() -> None:
    rows = [row(0, personal=leaks(("date", True), ("date", True), ("made up", True))), row(1)]
    date, other = figures(rows).leaks
    assert (date.items, date.per_1000) == (2, 1000)
    assert other.kind == "made up"


@pytest.mark.parametrize(
    ("gain", "verdict"), [(0.2, "B recovers more than A"), (-0.2, "A recovers more than B")]
)
def test_a_clear_difference(gain: float, verdict: str) -> None:
    noise = np.random.default_rng(1).random(60)
    a = [row(i, 0.3 + 0.2 * x) for i, x in enumerate(noise)]
    b = [row(i, 0.3 + 0.2 * x + gain + 0.01 * (i % 3)) for i, x in enumerate(noise)]
    found = compare(a, b)
    assert found.verdict.startswith(verdict) and "on 60 common texts" in found.verdict
    f1 = next(d for d in found.differences if d.metric == "token_f1")
    assert f1.difference == pytest.approx(gain + 0.01, abs=0.001) and f1.clear
    # Paired: the spread among the texts does not count, only that of their differences.
    assert f1.interval[1] - f1.interval[0] < 0.006
    assert {d.metric for d in found.differences} == set(METRICS)


def test_no_difference_can_be_told() -> None:
    rng = np.random.default_rng(2)
    a, b = ([row(i, float(rng.random())) for i in range(30)] for _ in range(2))
    found = compare(a, b, names=("one", "other"))
    assert found.verdict.startswith("No difference can be told between one and other")
    same = compare(a, a)
    assert "recover the same" in same.verdict
    assert {(d.difference, d.interval, d.clear) for d in same.differences} == {(0, (0, 0), False)}


def test_a_metric_that_disagrees_is_named() -> None:
    a = [row(i, 0.4, cosine=0.9) for i in range(10)]
    b = [row(i, 0.6, cosine=0.8) for i in range(10)]
    assert compare(a, b).verdict.endswith("though cosine says the opposite.")


def test_bleu_is_compared_by_corpus() -> None:
    a = [row(i, recovered="a b c d x" if i % 2 else "a x b y") for i in range(20)]
    b = [row(i, recovered="a b c d e" if i % 3 else "q") for i in range(20)]
    found = next(d for d in compare(a, b).differences if d.metric == "bleu")
    for rows, value in ((a, found.a), (b, found.b)):
        expected = sacrebleu.corpus_bleu([r.recovered for r in rows], [[r.reference for r in rows]]).score
        assert value == pytest.approx(expected)
    assert found.interval[0] <= found.difference == found.b - found.a <= found.interval[1]


def test_only_common_texts_count() -> None:
    a = [row(i, 0.5) for i in range(10)]
    b = [row(i, 0.5 if i < 10 else 1.0) for i in reversed(range(5, 30))]
    found = compare(a, b)
    assert (found.texts, found.only_a, found.only_b, found.cut_differently) == (5, 5, 20, 0)
    assert found.differences[1].difference == 0
    # A text that comes twice is compared twice.
    twice = [row(0, 0.1, key="k"), row(1, 0.9, key="k")]
    assert compare(twice, twice).texts == 2
    assert compare(twice, twice[:1]).texts == 1
    other = [row(i, reference="a b") for i in range(10)]
    assert compare(a, other).cut_differently == 10


def test_nothing_in_common() -> None:
    with pytest.raises(UnembedError, match="no text in common"):
        compare([row(0)], [row(1)])
    with pytest.raises(UnembedError, match="no text in common"):
        compare([], [row(1)])


def test_methods_are_chosen_by_name() -> None:
    methods = [{"name": name, "strategy": name} for name in ("x", "y")]
    records = Records(Path("r.jsonl"), {"settings": {"methods": methods}}, [row(0, method="y")], [], None)
    assert {k: len(v) for k, v in select(records, None).items()} == {"x": 0, "y": 1}
    assert list(select(records, "y")) == ["y"]
    with pytest.raises(UnembedError, match="no method 'z'; it has x, y"):
        select(records, "z")
