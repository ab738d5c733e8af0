"""Methods on suites -> rows, chunk after chunk, less the chunks that are there already.

Knows what an inverter and an encoder offer, the baselines and how rows are measured. Must not know how
a strategy decodes, or where rows are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from unembed import personal
from unembed.baselines import nearest, random_tokens
from unembed.inverter import Inverter
from unembed.logbook import progress
from unembed.records import Method, Row
from unembed.scoring import Hypotheses, References, cut, measure
from unembed.suites import Suite

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder

# What the model says when it is shown no vector has to be drawn: its likeliest text is one and the same.
UNCONDITIONAL = "euler"
WARM_CANDIDATES = 4  # of a search that is not timed


class CutSuite:
    """A suite cut to what an inverter holds; its vectors are made when they are needed, and kept."""

    def __init__(
        self, suite: Suite, inverter: Inverter, encoder: Encoder, batch_size: int, chunk: int | None
    ) -> None:
        """Cut the texts, with a warning."""
        self.suite, self.encoder, self.batch_size = suite, encoder, batch_size
        self.cut = cut(
            [s.text for s in suite.samples], tokenizer=inverter.tokenizer, max_tokens=inverter.max_tokens
        )
        # What was cut off is not in the vector, so it cannot be given away.
        self.items = [
            personal.within(s.items(), t) for s, t in zip(suite.samples, self.cut.given, strict=True)
        ]
        self.chunk = len(suite.samples) if chunk is None else chunk
        self._vectors: dict[int, np.ndarray] = {}

    def starts(self) -> range:
        """Where the chunks begin."""
        return range(0, len(self.suite.samples), self.chunk)

    def references(self, start: int) -> References:
        """The chunk that begins at a text."""
        rows = slice(start, start + self.chunk)
        if start not in self._vectors:
            self._vectors[start] = self.encoder.encode(self.cut.given[rows], batch_size=self.batch_size)
        return References(self.cut.ids[rows], self.cut.texts[rows], self._vectors[start])

    def whole(self) -> References:
        """All of it."""
        parts = [self.references(start) for start in self.starts()]
        return References(self.cut.ids, self.cut.texts, np.concatenate([part.vectors for part in parts]))


@dataclass(frozen=True)
class Job:
    """Methods to run on suites, method after method, suite after suite, chunk after chunk."""

    suites: list[CutSuite]
    inverter: Inverter
    encoder: Encoder
    methods: list[Method]
    seed: int
    data: PreparedData | None
    data_limit: int | None
    unknown: int | None
    show_progress: bool

    @property
    def texts(self) -> int:
        """Texts of all suites."""
        return sum(len(each.suite.samples) for each in self.suites)

    @property
    def total(self) -> int:
        """Rows of the finished job."""
        return len(self.methods) * self.texts

    def whole(self, rows: Sequence[Row]) -> int:
        """How many rows of an unfinished file make whole chunks."""
        count = 0
        for method in self.methods:
            for each in self.suites:
                size = len(each.suite.samples)
                left = rows[count : count + size]
                mine = sum(row.method == method.name and row.suite == each.suite.name for row in left)
                if mine < size:
                    return count + mine // each.chunk * each.chunk
                count += size
        return count

    def run(self, done: int) -> Iterator[list[Row]]:
        """Yield the rows of one chunk after the other; the first `done` rows are there already."""
        for number, method in enumerate(self.methods):
            before = max(0, done - number * self.texts)
            if before >= self.texts:
                continue
            found: dict[str, Hypotheses] = {}
            if method.strategy == "nearest":
                found = self._nearest()
            elif method.strategy != "random":
                self._warm_up(method)
            with progress(method.name, total=self.texts, done=before, show=self.show_progress) as advance:
                for each in self.suites:
                    for start in each.starts():
                        size = min(each.chunk, len(each.suite.samples) - start)
                        before -= size
                        if before < 0:
                            yield self._chunk(method, each, start, size, found)
                            advance(size)

    def _warm_up(self, method: Method) -> None:
        """Let a method load what it first needs before it is timed, on one vector; a search in one round."""
        if method.search is not None:
            few = min(method.search["candidates"], WARM_CANDIDATES)
            method = replace(method, search=method.search | {"rounds": 1, "candidates": few})
        vectors = np.ones((1, self.inverter.size), np.float32)
        _invert(vectors, self.inverter, self.encoder, method, seed=self.seed, first=0, batch_size=1)

    def _chunk(
        self, method: Method, each: CutSuite, start: int, size: int, found: dict[str, Hypotheses]
    ) -> list[Row]:
        """Recover and measure the texts of one chunk."""
        references = each.references(start)
        if method.strategy == "random":
            tokenizer = self.inverter.tokenizer
            hypotheses = random_tokens(references, tokenizer=tokenizer, seed=self.seed, first=start)
        elif method.strategy == "nearest":
            hypotheses = _slice(found[each.suite.name], start, size)
        else:
            hypotheses = _invert(
                references.vectors, self.inverter, self.encoder, method, seed=self.seed, first=start,
                batch_size=each.batch_size,
            )  # fmt: skip
        rows = slice(start, start + size)
        return measure(
            references,
            hypotheses,
            encoder=self.encoder,
            samples=each.suite.samples[rows],
            given=each.cut.given[rows],
            items=each.items[rows],
            unknown=self.unknown,
            method=method.name,
            suite=each.suite.name,
            first=start,
        )

    def _nearest(self) -> dict[str, Hypotheses]:
        """Find the nearest passages for all suites in one pass over the data."""
        assert self.data is not None
        parts = [each.whole() for each in self.suites]
        every = References(
            [ids for part in parts for ids in part.ids],
            [text for part in parts for text in part.texts],
            np.concatenate([part.vectors for part in parts]),
        )
        found = nearest(
            every,
            data=self.data,
            encoder=self.encoder,
            limit=self.data_limit,
            show_progress=self.show_progress,
        )
        out, start = {}, 0
        for each in self.suites:
            out[each.suite.name] = _slice(found, start, len(each.suite.samples))
            start += len(each.suite.samples)
        return out


def _invert(
    vectors: np.ndarray,
    inverter: Inverter,
    encoder: Encoder,
    method: Method,
    *,
    seed: int,
    first: int,
    batch_size: int,
) -> Hypotheses:
    """Recover texts by a strategy, or by the model that is shown no vector."""
    search = dict(method.search or {})
    if search.get("refine") == "encoder":
        search["encoder"] = encoder
    start = time.perf_counter()
    inversions = inverter.invert(
        vectors,
        strategy=UNCONDITIONAL if method.strategy == "unconditional" else method.strategy,
        steps=method.steps,
        guidance=method.guidance,
        temperature=method.temperature,
        seed=seed,
        batch_size=batch_size,
        first=first,
        **method.knobs,
        **search,
    )
    return Hypotheses(
        ids=[np.array(i.ids, dtype=np.int64) for i in inversions],
        texts=[i.text for i in inversions],
        seconds=time.perf_counter() - start,
        forward_passes=[i.forward_passes for i in inversions],
        encoder_calls=[i.encoder_calls for i in inversions],
        believed_exact=[i.exact for i in inversions],
        likeness=[i.likeness for i in inversions],
    )


def _slice(found: Hypotheses, start: int, count: int) -> Hypotheses:
    """Take some of the texts, with their share of the time."""
    seconds = found.seconds * count / len(found.texts)
    return Hypotheses(found.ids[start : start + count], found.texts[start : start + count], seconds)
