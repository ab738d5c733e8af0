"""What a report tells: series of figures, which one leads, examples by a fixed rule.

Knows records and figures; must not know Markdown or HTML.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unembed import metrics
from unembed.errors import UnembedError
from unembed.figures import Figures, figures_of
from unembed.records import Method, Records, Row

TITLE = "What the vectors gave away"
EXAMPLES = 3  # of each kind
# Tokens of the texts whose F1 is shown together: 1 to 4, 5 to 8, and so on.
BIN = 4
BIN_TEXTS = 5  # fewer are not shown: their interval says nothing

RANKERS = {"encoder": "the encoder", "self": "the model's own guesses", "distilled": "a distilled encoder"}
NAMES = {
    "token_f1": "token F1",
    "exact_match": "exact",
    "token_accuracy": "token accuracy",
    "bleu": "BLEU",
    "rouge_l": "ROUGE-L",
    "cosine": "cosine",
}
MEANINGS = {
    "token F1": "tokens in common with the original, whatever their order; 1 is all and no others",
    "exact": "share of texts that came back letter for letter, as far as the vocabulary keeps letters",
    "token accuracy": "share of the original's tokens that stand at their own place",
    "BLEU": "runs of one to four words in common, 0 to 100, over all texts together",
    "ROUGE-L": "longest common subsequence of words",
    "cosine": "similarity of the two texts' vectors; 1 is the same to the encoder",
}
Mark = Literal["", "lost", "moved", "new"]


@dataclass(frozen=True)
class Series:
    """One method of one file, as a report shows it."""

    label: str
    method: Method
    records: Records
    rows: list[Row]
    figures: dict[tuple[str, str | None], Figures]  # by suite and language

    def of(self, suite: str, language: str | None = None) -> Figures | None:
        """The figures of a suite, or of one of its languages, if it was measured."""
        return self.figures.get((suite, language))


@dataclass(frozen=True)
class Example:
    """A text and what came back of it, chosen by rule."""

    place: str  # best, median, worst
    row: Row


@dataclass(frozen=True)
class Story:
    """All that a report tells."""

    title: str
    records: list[Records]
    series: list[Series]
    suites: list[str]

    def leader(self, suite: str) -> Series | None:
        """The series that recovers most of a suite by token F1; a baseline only if there is nothing else."""
        have = [s for s in self.series if s.of(suite)]
        own = [s for s in have if not s.method.baseline] or have
        # Of equals, the one that comes first.
        return max(own, key=lambda s: _f1(s, suite), default=None)

    def languages(self, suite: str) -> list[str | None]:
        """The languages of a suite that has several."""
        found = [language for s in self.series for name, language in s.figures if name == suite and language]
        return list(dict.fromkeys(found))

    @property
    def unfinished(self) -> list[tuple[str, int, int]]:
        """Files that are not finished: name, rows, rows expected."""
        files = [(r.path.name, len(r.rows), r.expected) for r in self.records]
        return [each for each in files if each[1] < each[2]]


def _f1(series: Series, suite: str) -> float:
    """Token F1 of a series on a suite."""
    found = series.of(suite)
    return found.values["token_f1"] if found else -1.0


def tell(records: Sequence[Records], *, title: str | None = None) -> Story:
    """Gather what there is to tell of files of records."""
    series = []
    labels = Counter(spoken(m) for r in records for m in r.methods)
    for each in records:
        found = figures_of(each)
        for method in each.methods:
            rows = [row for row in each.rows if row.method == method.name]
            if rows:
                label = spoken(method)
                if labels[label] > 1 or len(records) > 1:
                    label = f"{each.path.stem}: {label}"
                mine = {(f.suite, f.language): f for f in found if f.method == method.name}
                series.append(Series(label, method, each, rows, mine))
    if not series:
        raise UnembedError("the records hold no text yet; let unembed evaluate go on first.")
    suites = list(dict.fromkeys(row.suite for s in series for row in s.rows))
    return Story(title or TITLE, list(records), series, suites)


def spoken(method: Method) -> str:
    """Say what a method is.

    >>> spoken(Method("confidence-8", "confidence", 8, guidance=1.5)), spoken(Method("random", "random"))
    ('confidence, 8 passes, guidance 1.5', 'random tokens')
    """
    known = {"random": "random tokens", "nearest": "nearest passage"}
    if method.strategy in known:
        return known[method.strategy]
    if method.strategy == "unconditional":
        return "model without the vector"
    parts = [method.strategy, f"{method.steps} pass{'es' if method.steps != 1 else ''}"]
    parts += [f"guidance {method.guidance:g}"] if method.guidance != 1 else []
    parts += [f"temperature {method.temperature:g}"] if method.temperature is not None else []
    parts += [f"the best of {method.drafts} drafts"] if method.drafts != 1 else []
    if method.search:
        ranker = RANKERS[method.search["refine"]]
        budget = f", at most {method.search['budget']} calls" if method.search.get("budget") else ""
        parts.append(
            f"search with {ranker} ({method.search['rounds']} x {method.search['candidates']}{budget})"
        )
    return ", ".join(parts)


def examples(rows: Sequence[Row], *, count: int = EXAMPLES) -> list[Example]:
    """Choose the best, the median and the worst texts by token F1; of equals, those that come first."""
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].token_f1, i))
    count = min(count, max(1, len(rows) // 3))
    middle = max(0, (len(order) - count) // 2)
    # From the other end, of equals again the first.
    worst = sorted(range(len(rows)), key=lambda i: (rows[i].token_f1, i))
    chosen = {"best": order[:count], "median": order[middle : middle + count], "worst": worst[:count]}
    seen: set[int] = set()
    out = []
    for place, numbers in chosen.items():
        for i in numbers:
            if i not in seen:
                out.append(Example(place, rows[i]))
                seen.add(i)
    return out


def by_length(rows: Sequence[Row], *, seed: int) -> dict[int, tuple[float, metrics.Interval]]:
    """Token F1 with its interval for texts of like length; keys are the numbers of the bins."""
    bins: dict[int, list[float]] = {}
    for row in rows:
        bins.setdefault((max(row.tokens, 1) - 1) // BIN, []).append(row.token_f1)
    return {
        number: (sum(values) / len(values), metrics.bootstrap_interval(values, seed=seed))
        for number, values in sorted(bins.items())
        if len(values) >= BIN_TEXTS
    }


def marked(reference: str, recovered: str) -> tuple[list[tuple[str, Mark]], list[tuple[str, Mark]]]:
    """Mark each word of both texts: lost or new, moved, or at its place.

    >>> marked("the red cat", "cat the")
    ([('the', ''), ('red', 'lost'), ('cat', 'moved')], [('cat', 'moved'), ('the', '')])
    """
    left, right = reference.split(), recovered.split()
    # A comma more or less is not a word lost.
    bare = [[word.strip(".,;:!?…\"'()") or word for word in words] for words in (left, right)]
    blocks = difflib.SequenceMatcher(None, bare[0], bare[1], autojunk=False).get_matching_blocks()
    kept_left = {i for block in blocks for i in range(block.a, block.a + block.size)}
    kept_right = {i for block in blocks for i in range(block.b, block.b + block.size)}
    loose = [
        Counter(word for i, word in enumerate(words) if i not in kept)
        for words, kept in zip(bare, (kept_left, kept_right), strict=True)
    ]
    return (
        list(zip(left, _marks(bare[0], kept_left, loose[1], "lost"), strict=True)),
        list(zip(right, _marks(bare[1], kept_right, loose[0], "new"), strict=True)),
    )


def _marks(words: list[str], kept: set[int], elsewhere: Counter[str], gone: Mark) -> list[Mark]:
    """Mark the words of one text; a word that stands elsewhere in the other was moved, once each."""
    left, out = Counter(elsewhere), []
    for i, word in enumerate(words):
        mark: Mark = "" if i in kept else "moved" if left[word] > 0 else gone
        left[word] -= mark == "moved"
        out.append(mark)
    return out


def recovered_items(rows: Sequence[Row], *, count: int = 12) -> list[tuple[str, str]]:
    """The first personal items that came back, each once: kind and text."""
    found = [(item["kind"], item["text"]) for row in rows for item in row.personal if item["recovered"]]
    return list(dict.fromkeys(found))[:count]
