"""Records of single texts -> figures with intervals: of a suite, of a language, of a difference.

Knows rows and statistics. Must not know how the rows came about, nor how figures are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unembed import metrics
from unembed.errors import UnembedError
from unembed.personal import KINDS
from unembed.records import Method, Records, Row

# Of one text each; BLEU, which is of a corpus, comes on top.
PER_TEXT = ("token_accuracy", "token_f1", "exact_match", "rouge_l", "cosine")
METRICS = ("token_accuracy", "token_f1", "exact_match", "bleu", "rouge_l", "cosine")
RESAMPLES = 1000


@dataclass(frozen=True)
class Leak:
    """How much personal data of one kind came back."""

    kind: str
    items: int
    recovered: int
    share: float  # of the items
    share_interval: metrics.Interval
    per_1000: float  # items recovered from 1,000 vectors
    per_1000_interval: metrics.Interval


@dataclass(frozen=True)
class Figures:
    """What one method recovers of one suite, or of one language in it (None: of all)."""

    method: str
    suite: str
    language: str | None
    texts: int
    values: dict[str, float]  # means over the texts; `bleu` of the corpus, where it could be computed
    intervals: dict[str, metrics.Interval]  # 95 %, bootstrap over the texts
    forward_passes: float  # mean a text
    encoder_calls: float
    texts_per_second: float
    unknown: float  # share of the texts' tokens that the vocabulary cannot write
    bleu_tokenizers: dict[str, str]  # of each language
    leaks: list[Leak]


def figures_of(records: Records) -> list[Figures]:
    """All figures of a file: of each method and suite, then of each language where there are several."""
    seed = int(records.settings["seed"])
    return [
        figures(rows, seed=seed, language=language)
        for language, rows in grouped(records.rows, records.methods)
    ]


def grouped(rows: Iterable[Row], methods: Sequence[Method]) -> list[tuple[str | None, list[Row]]]:
    """Gather the rows of each method and suite, and of each language in it where there are several."""
    suites: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        suites.setdefault((row.method, row.suite), []).append(row)
    order = {method.name: i for i, method in enumerate(methods)}
    out: list[tuple[str | None, list[Row]]] = []
    for _, group in sorted(suites.items(), key=lambda each: order.get(each[0][0], len(order))):
        out.append((None, group))
        languages = list(dict.fromkeys(row.language for row in group))
        if len(languages) > 1:
            out += [(each, [row for row in group if row.language == each]) for each in languages]
    return out


def figures(rows: Sequence[Row], *, seed: int = 0, language: str | None = None) -> Figures:
    """Compute the figures of rows that have a method and a suite in common."""
    tokenizers = {row.language or "": metrics.bleu_tokenizer(row.language) for row in rows}
    columns: dict[str, np.ndarray] = {name: _column(rows, name) for name in PER_TEXT}
    kinds = sorted({item["kind"] for row in rows for item in row.personal}, key=_kind_order)
    for kind in kinds:
        columns[f"items {kind}"] = _counts(rows, kind, recovered=False)
        columns[f"found {kind}"] = _counts(rows, kind, recovered=True)
    statistics = bleu_rows(rows) if metrics.has_bleu() else np.zeros((len(rows), 0))
    # One set of resamples for all figures, as costly as that of one.
    table = np.concatenate([np.stack(list(columns.values()), axis=1), statistics], axis=1)
    drawn = metrics.resampled_sums(table, n=RESAMPLES, seed=seed)
    sums = dict(zip(columns, drawn.T, strict=False))

    values = {name: float(columns[name].mean()) for name in PER_TEXT}
    intervals = {name: metrics.percentiles(sums[name] / len(rows)) for name in PER_TEXT}
    if statistics.shape[1]:
        values["bleu"] = float(metrics.bleu_of_sums(statistics.sum(axis=0)))
        intervals["bleu"] = metrics.percentiles(metrics.bleu_of_sums(drawn[:, len(columns) :]))
    seconds = sum(row.seconds for row in rows)
    return Figures(
        method=rows[0].method,
        suite=rows[0].suite,
        language=language,
        texts=len(rows),
        values={name: values[name] for name in METRICS if name in values},
        intervals={name: intervals[name] for name in METRICS if name in intervals},
        forward_passes=float(np.mean([row.forward_passes for row in rows])),
        encoder_calls=float(np.mean([row.encoder_calls for row in rows])),
        texts_per_second=len(rows) / max(seconds, 1e-9),
        unknown=sum(row.unknown for row in rows) / max(1, sum(row.tokens for row in rows)),
        bleu_tokenizers=tokenizers,
        leaks=[_leak(kind, columns, sums, len(rows)) for kind in kinds],
    )


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    """One metric of every row."""
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def _counts(rows: Sequence[Row], kind: str, *, recovered: bool) -> np.ndarray:
    """How many items of a kind each row has, or has recovered."""
    return np.array(
        [sum(i["kind"] == kind and (i["recovered"] or not recovered) for i in row.personal) for row in rows],
        dtype=np.float64,
    )


def _kind_order(kind: str) -> tuple[int, str]:
    """Known kinds in their order, then any others by name."""
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def _leak(kind: str, columns: dict[str, np.ndarray], sums: dict[str, np.ndarray], texts: int) -> Leak:
    """Turn counts of one kind into rates."""
    items, found = columns[f"items {kind}"].sum(), columns[f"found {kind}"].sum()
    # A resample without any item of the kind says nothing of its share.
    some = sums[f"items {kind}"] > 0
    share_interval = metrics.percentiles(sums[f"found {kind}"][some] / sums[f"items {kind}"][some])
    per_1000_interval = metrics.percentiles(1000 * sums[f"found {kind}"] / texts)
    if found in (0, items):
        # All resamples are alike, which must not pass for certainty that nothing leaks.
        share_interval = metrics.wilson_interval(int(found), int(items))
        low, high = (1000 * items / texts * share for share in share_interval)
        per_1000_interval = float(low), float(high)
    return Leak(
        kind=kind,
        items=int(items),
        recovered=int(found),
        share=float(found / items),
        share_interval=share_interval,
        per_1000=float(1000 * found / texts),
        per_1000_interval=per_1000_interval,
    )


def bleu_rows(rows: Sequence[Row]) -> np.ndarray:
    """The statistics of BLEU for every row, (N, 10), by the tokenizer of its language."""
    out = np.zeros((len(rows), 10))
    for tokenizer in dict.fromkeys(metrics.bleu_tokenizer(row.language) for row in rows):
        here = [i for i, row in enumerate(rows) if metrics.bleu_tokenizer(row.language) == tokenizer]
        out[here] = metrics.bleu_statistics(
            [rows[i].reference for i in here], [rows[i].recovered for i in here], tokenize=tokenizer
        )
    return out


# --- differences ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How one metric differs between two methods, B - A, on the same texts."""

    metric: str
    a: float
    b: float
    difference: float
    interval: metrics.Interval

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True)
class Comparison:
    """Two methods on the texts that both were measured on."""

    a: str
    b: str
    texts: int
    only_a: int  # texts left out because the other has not got them
    only_b: int
    cut_differently: int  # texts whose references are not the same, by another vocabulary or length
    differences: list[Difference]
    verdict: str


def compare(
    a: Sequence[Row], b: Sequence[Row], *, names: tuple[str, str] = ("A", "B"), seed: int = 0
) -> Comparison:
    """Compare two sets of rows text by text, by a paired bootstrap."""
    left, right = _numbered(a), _numbered(b)
    common = [key for key in left if key in right]
    if not common:
        raise UnembedError(
            f"{names[0]} and {names[1]} have no text in common, so there is nothing to compare; "
            "evaluate both on the same texts."
        )
    first, second = [left[key] for key in common], [right[key] for key in common]
    differences = _differences(first, second, seed=seed)
    return Comparison(
        a=names[0],
        b=names[1],
        texts=len(common),
        only_a=len(left) - len(common),
        only_b=len(right) - len(common),
        cut_differently=sum(x.reference != y.reference for x, y in zip(first, second, strict=True)),
        differences=differences,
        verdict=_verdict(names, differences, len(common)),
    )


def _numbered(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Name each row by its text and, where a text comes several times, by which time it is."""
    seen: dict[str, int] = {}
    out = {}
    for row in rows:
        seen[row.key] = seen.get(row.key, -1) + 1
        out[row.key, seen[row.key]] = row
    return out


def _differences(first: Sequence[Row], second: Sequence[Row], *, seed: int) -> list[Difference]:
    """The difference of every metric, with its interval."""
    pairs = {name: (_column(first, name), _column(second, name)) for name in PER_TEXT}
    columns = [np.stack([b - a for a, b in pairs.values()], axis=1)]
    if metrics.has_bleu():
        columns += [bleu_rows(first), bleu_rows(second)]
    table = np.concatenate(columns, axis=1)
    drawn = metrics.resampled_sums(table, n=RESAMPLES, seed=seed)
    found = {
        name: Difference(
            name,
            float(pairs[name][0].mean()),
            float(pairs[name][1].mean()),
            float(table[:, i].mean()),
            metrics.percentiles(drawn[:, i] / len(first)),
        )
        for i, name in enumerate(PER_TEXT)
    }
    if metrics.has_bleu():
        # Behind the differences stand ten statistics of A, then ten of B.
        sums = np.concatenate([table.sum(axis=0, keepdims=True), drawn])[:, len(PER_TEXT) :]
        a, b = metrics.bleu_of_sums(sums[:, :10]), metrics.bleu_of_sums(sums[:, 10:])
        interval = metrics.percentiles((b - a)[1:])
        found["bleu"] = Difference("bleu", float(a[0]), float(b[0]), float(b[0] - a[0]), interval)
    return [found[name] for name in METRICS if name in found]


def _verdict(names: tuple[str, str], differences: Sequence[Difference], texts: int) -> str:
    """Say in a sentence who recovers more, judged by token F1."""
    f1 = next(each for each in differences if each.metric == "token_f1")
    low, high = f1.interval
    said = f"{f1.difference:+.3f} token F1 (95 % interval {low:+.3f} to {high:+.3f}) on {texts} common texts"
    if f1.a == f1.b and low == high == 0:
        return f"{names[0]} and {names[1]} recover the same: {said}."
    if not f1.clear:
        return f"No difference can be told between {names[0]} and {names[1]}: {said}."
    winner, loser = (names[1], names[0]) if f1.difference > 0 else names
    against = [
        each.metric.replace("_", " ")
        for each in differences
        if each.clear and (each.difference > 0) != (f1.difference > 0)
    ]
    but = (
        f", though {' and '.join(against)} {'says' if len(against) == 1 else 'say'} the opposite"
        if against
        else ""
    )
    return f"{winner} recovers more than {loser}: B - A is {said}{but}."


def select(records: Records, name: str | None) -> dict[str, list[Row]]:
    """The rows of each method of a file, or of the one that is named."""
    known: dict[str, list[Row]] = {method.name: [] for method in records.methods}
    for row in records.rows:
        known.setdefault(row.method, []).append(row)
    if name is not None and name not in known:
        raise UnembedError(f"{records.path} has no method {name!r}; it has {', '.join(known)}.")
    return {key: rows for key, rows in known.items() if name in (None, key)}


def as_record(each: Figures, method: Method) -> dict[str, Any]:
    """Lay figures out flat, as `--json` prints them."""
    return {
        "strategy": method.strategy,
        "steps": method.steps,
        "method": each.method,
        "suite": each.suite,
        "language": each.language,
        "texts": each.texts,
        **{name: each.values.get(name) for name in METRICS},
        "forward_passes": each.forward_passes,
        "encoder_calls": each.encoder_calls,
        "texts_per_second": each.texts_per_second,
        "unknown": each.unknown,
        "intervals": each.intervals,
    }
