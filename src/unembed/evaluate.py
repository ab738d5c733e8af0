"""Held-out text -> records: embed, forget, invert, measure.

Knows what an inverter and an encoder offer, and the metrics. Must not know how a strategy decodes,
or how a record is printed or drawn.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from unembed import __version__, metrics, personal
from unembed.baselines import nearest, random_tokens
from unembed.config import ModelConfig
from unembed.decode import DecodeOptions
from unembed.errors import UnembedError, unknown_name
from unembed.figures import Figures, figures, figures_of
from unembed.inverter import Inverter
from unembed.logbook import progress
from unembed.records import FORMAT, Method, RecordFile, Records, Row, read_records
from unembed.scoring import Hypotheses, References, cut, measure, unknown_id
from unembed.search import Refine, SearchOptions
from unembed.strategies import AUTO, check_steps, resolve
from unembed.suites import Suite, check_limit, suite_of

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder

Baseline = Literal["random", "unconditional", "nearest"]
BASELINES: tuple[str, ...] = get_args(Baseline)
# What the model says when it is shown no vector has to be drawn: its likeliest text is one and the same.
UNCONDITIONAL = "euler"
PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "numpy", "sacrebleu")


@dataclass(frozen=True)
class Record:
    """What one strategy in one number of steps recovers of a set of texts; the fields are the JSON keys.

    Metrics are means over the texts, except `bleu`, which is of the corpus, from 0 to 100.
    """

    strategy: str
    steps: int
    texts: int
    token_accuracy: float
    token_f1: float
    exact_match: float
    bleu: float
    rouge_l: float
    cosine: float
    forward_passes: float  # mean a text
    encoder_calls: float  # mean a text, spent on inverting, not on measuring `cosine`
    texts_per_second: float  # of inverting alone
    intervals: dict[str, metrics.Interval]  # 95 % bootstrap interval of each metric


def evaluate(
    texts: Iterable[str],
    *,
    inverter: Inverter,
    encoder: Encoder | None = None,
    strategies: Sequence[str] = (AUTO,),
    steps: Sequence[int] | None = None,
    guidance: float = 1.0,
    temperature: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
    limit: int | None = None,
    show_progress: bool = False,
    refine: Refine | None = None,
    rounds: int = SearchOptions.rounds,
    candidates: int = SearchOptions.candidates,
    pool: int = SearchOptions.pool,
    budget: int | None = None,
) -> list[Record]:
    """Measure an inverter on texts it has not seen: one record for each strategy and number of steps.

    Texts are cut to what the inverter holds and embedded as cut, by `encoder` or the one that the
    inverter was trained against. `limit` takes the first so many texts. Strategies, steps, `refine` and
    what follows it are those of `Inverter.invert`; with `refine` a search is measured instead of a draft.
    """
    metrics.check_extra()
    check_limit(limit)
    methods = plan(
        strategies,
        steps,
        config=inverter.config.model,
        guidance=guidance,
        temperature=temperature,
        refine=refine,
        rounds=rounds,
        candidates=candidates,
        pool=pool,
        budget=budget,
    )
    texts = texts if limit is None or isinstance(texts, str) else islice(texts, limit)
    records = evaluate_suites(
        [suite_of(texts)],
        inverter=inverter,
        encoder=encoder,
        methods=methods,
        seed=seed,
        batch_size=batch_size,
        # Nothing is written in between, so all texts may go at once.
        chunk=None,
        show_progress=show_progress,
    )
    by_name = {method.name: method for method in methods}
    return [_record(each, by_name[each.method]) for each in figures_of(records)]


def plan(
    strategies: Sequence[str] = (AUTO,),
    steps: Sequence[int] | None = None,
    *,
    config: ModelConfig,
    baselines: Sequence[str] = (),
    guidance: float = 1.0,
    temperature: float | None = None,
    refine: Refine | None = None,
    rounds: int = SearchOptions.rounds,
    candidates: int = SearchOptions.candidates,
    pool: int = SearchOptions.pool,
    budget: int | None = None,
) -> list[Method]:
    """List what is to be measured: each strategy in each number of steps, then the baselines.

    A method is called by the strategy that decodes, never `auto`. Without `steps` a strategy takes its own
    number, and one that reads left to right takes a pass for each place, whatever is asked for.
    """
    search = None
    if refine is not None:
        SearchOptions(refine, rounds, candidates, pool, budget)  # names a bad setting
        search = dict(refine=refine, rounds=rounds, candidates=candidates, pool=pool, budget=budget)
    for count in steps or ():
        check_steps(count, config.max_tokens)
    methods = []
    for asked in strategies:
        first = steps[0] if steps else None
        strategy = resolve(asked, causal=config.causal, steps=first, temperature=temperature)
        for each in (None,) if strategy.causal else steps or (None,):
            count = DecodeOptions(strategy.name, each, temperature, guidance).fit(config).steps
            name = f"{strategy.name}-{count}"
            name += f"-guidance-{guidance:g}" if guidance != 1 else ""
            name += f"-temperature-{temperature:g}" if temperature is not None else ""
            name += f"-{refine}-{rounds}x{candidates}" if refine is not None else ""
            name += f"-budget-{budget}" if refine is not None and budget is not None else ""
            methods.append(Method(name, strategy.name, count, guidance, temperature, search))
    for name in baselines:
        if name not in BASELINES:
            raise unknown_name("baseline", name, BASELINES)
        if name == "unconditional":
            count = DecodeOptions(UNCONDITIONAL, max(steps) if steps else None).fit(config).steps
            methods.append(Method(f"unconditional-{count}", name, count, guidance=0.0, baseline=True))
        else:
            methods.append(Method(name, name, baseline=True))
    names = [method.name for method in methods]
    if not names:
        raise UnembedError("there is nothing to measure; give a strategy or a baseline.")
    if len(set(names)) < len(names):
        raise UnembedError(f"{max(names, key=names.count)} is asked for twice; name each once.")
    return methods


def evaluate_suites(
    suites: Sequence[Suite],
    *,
    inverter: Inverter,
    methods: Sequence[Method],
    encoder: Encoder | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    batch_size: int = 64,
    chunk: int | None = 0,
    data: PreparedData | None = None,
    data_limit: int | None = None,
    model_name: str = "",
    show_progress: bool = False,
) -> Records:
    """Measure methods on suites, text by text; with `out`, into a file that a later call goes on with.

    Args:
        suites: The texts; see `suites`.
        inverter: Whose vectors they become.
        methods: What to measure; see `plan`.
        encoder: Embeds texts and what was recovered; the one the inverter belongs to by default.
        out: A file of JSON lines; a file that was begun with the same settings is gone on with, and
            what it holds is not computed again.
        seed: Of everything that is drawn; each text's draws depend on its number in its suite too.
        batch_size: Texts that go through the model together.
        chunk: Texts that are inverted and written at once; a batch by default, None for all of a suite.
        data: Prepared data for the baseline `nearest`.
        data_limit: Look for the nearest among the first so many of its passages only.
        model_name: What the records call the model; the name of its encoder by default.
        show_progress: Show a bar on stderr.
    """
    if batch_size < 1:
        raise UnembedError(f"batch_size must be at least 1, not {batch_size}.")
    _check_suites(suites)
    _check_methods(methods, inverter, data)
    encoder = inverter.encoder() if encoder is None else encoder
    inverter.check_encoder(encoder)
    held = [
        _Held(suite, inverter, encoder, batch_size, batch_size if chunk == 0 else chunk) for suite in suites
    ]
    header = describe(suites, inverter, encoder, methods, seed, batch_size, data, data_limit, model_name)
    unknown = unknown_id(inverter.tokenizer)
    job = _Job(held, inverter, encoder, list(methods), seed, data, data_limit, unknown, show_progress)
    if out is None:
        rows = [row for batch in job.run(0) for row in batch]
        return Records(Path(), header, rows, [], None)
    file = RecordFile(out, header)
    known, summary = len(file.known.rows), file.known.summary
    if summary is not None and known == job.total and (summary["bleu"] or not metrics.has_bleu()):
        return file.known
    done = job.whole(file.known.rows)
    if known or summary:
        file.keep(done)
    for batch in job.run(done):
        file.add(batch)
    figures_now = figures_of(read_records(out))
    file.finish({"bleu": metrics.has_bleu(), "figures": [asdict(each) for each in figures_now]})
    return read_records(out)


def _check_suites(suites: Sequence[Suite]) -> None:
    """Refuse no suites, and two of one name."""
    if not suites:
        raise UnembedError("there is no text to evaluate; give at least one.")
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise UnembedError(f"two suites are called {max(names, key=names.count)!r}; give each its own name.")


def _check_methods(methods: Sequence[Method], inverter: Inverter, data: PreparedData | None) -> None:
    """Refuse what this model, or a lack of data, makes impossible, before anything is written."""
    for method in methods:
        if not method.baseline:
            options = DecodeOptions(method.strategy, method.steps, method.temperature, method.guidance)
            options.fit(inverter.config.model)
        elif method.strategy == "nearest" and data is None:
            raise UnembedError("the baseline nearest needs the text it may choose from; give prepared data.")


def describe(
    suites: Sequence[Suite],
    inverter: Inverter,
    encoder: Encoder,
    methods: Sequence[Method],
    seed: int,
    batch_size: int,
    data: PreparedData | None,
    data_limit: int | None,
    model_name: str,
) -> dict[str, Any]:
    """Write the header of a run: all that decides its results, and where it ran."""
    guessed = any((method.search or {}).get("refine") == "distilled" for method in methods)
    distilled = weights_digest(inverter.distilled().model) if guessed else None
    nearest_from = None
    if data is not None:
        nearest_from = {
            "name": Path(data.path).name,
            "sha256": hashlib.sha256(str(data.manifest["shards"]).encode()).hexdigest(),
            "limit": data_limit,
        }
    return {
        "format": FORMAT,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {
            "model": model_name or inverter.encoder_name,
            "weights": weights_digest(inverter.model),
            "encoder": encoder.name,
            "distilled": distilled,
            "max_tokens": inverter.max_tokens,
            "methods": [asdict(method) for method in methods],
            "suites": [
                {
                    "name": suite.name,
                    "texts": len(suite.samples),
                    "languages": suite.languages,
                    "sha256": suite.digest,
                }
                for suite in suites
            ],
            "seed": seed,
            "batch_size": batch_size,
            "nearest_from": nearest_from,
        },
        "versions": {"unembed": __version__, "python": platform.python_version(), **_versions()},
        "hardware": {
            "device": torch.cuda.get_device_name(inverter.device)
            if inverter.device.type == "cuda"
            else "cpu",
            "precision": inverter.numbers,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def weights_digest(model: torch.nn.Module) -> str:
    """A hash of all weights with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    """Versions of the packages that may change a figure; None where one is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


class _Held:
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
class _Job:
    """Methods to run on suites, method after method, suite after suite, chunk after chunk."""

    held: list[_Held]
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
        return sum(len(each.suite.samples) for each in self.held)

    @property
    def total(self) -> int:
        """Rows of the finished job."""
        return len(self.methods) * self.texts

    def whole(self, rows: Sequence[Row]) -> int:
        """How many rows of an unfinished file make whole chunks."""
        count = 0
        for method in self.methods:
            for each in self.held:
                size = len(each.suite.samples)
                left = rows[count : count + size]
                mine = sum(row.method == method.name and row.suite == each.suite.name for row in left)
                if mine < size:
                    return count + mine // each.chunk * each.chunk
                count += size
        return count

    def run(self, done: int) -> Iterator[list[Row]]:
        """Yield the rows of one chunk after the other; the first `done` rows are there already."""
        warm = False
        for number, method in enumerate(self.methods):
            before = max(0, done - number * self.texts)
            if before >= self.texts:
                continue
            found: dict[str, Hypotheses] = {}
            if method.strategy == "nearest":
                found = self._nearest()
            elif method.strategy != "random" and not warm:
                # The first call pays for what is loaded and compiled on first use; it is not timed.
                self.inverter.invert(np.ones((1, self.inverter.size), np.float32), steps=1, seed=self.seed)
                warm = True
            with progress(method.name, total=self.texts, done=before, show=self.show_progress) as advance:
                for each in self.held:
                    for start in each.starts():
                        size = min(each.chunk, len(each.suite.samples) - start)
                        before -= size
                        if before < 0:
                            yield self._chunk(method, each, start, size, found)
                            advance(size)

    def _chunk(
        self, method: Method, each: _Held, start: int, size: int, found: dict[str, Hypotheses]
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
                references, self.inverter, self.encoder, method, seed=self.seed, first=start,
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
        parts = [each.whole() for each in self.held]
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
        for each in self.held:
            out[each.suite.name] = _slice(found, start, len(each.suite.samples))
            start += len(each.suite.samples)
        return out


def _invert(
    references: References,
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
        references.vectors,
        strategy=UNCONDITIONAL if method.strategy == "unconditional" else method.strategy,
        steps=method.steps,
        guidance=method.guidance,
        temperature=method.temperature,
        seed=seed,
        batch_size=batch_size,
        first=first,
        **search,
    )
    return Hypotheses(
        ids=[np.array(i.ids, dtype=np.int64) for i in inversions],
        texts=[i.text for i in inversions],
        seconds=time.perf_counter() - start,
        forward_passes=[i.forward_passes for i in inversions],
        encoder_calls=[i.encoder_calls for i in inversions],
        believed_exact=[i.exact for i in inversions],
    )


def _slice(found: Hypotheses, start: int, count: int) -> Hypotheses:
    """Take some of the texts, with their share of the time."""
    seconds = found.seconds * count / len(found.texts)
    return Hypotheses(found.ids[start : start + count], found.texts[start : start + count], seconds)


def score(
    references: References,
    hypotheses: Hypotheses,
    *,
    encoder: Encoder,
    strategy: str,
    steps: int = 0,
    seed: int = 0,
) -> Record:
    """Measure hypotheses against references as a whole."""
    rows = measure(references, hypotheses, encoder=encoder, method=strategy)
    return _record(figures(rows, seed=seed), Method(strategy, strategy, steps))


def _record(each: Figures, method: Method) -> Record:
    """Lay the figures of a suite out flat."""
    return Record(
        strategy=method.strategy,
        steps=method.steps,
        texts=each.texts,
        **each.values,
        forward_passes=each.forward_passes,
        encoder_calls=each.encoder_calls,
        texts_per_second=each.texts_per_second,
        intervals=each.intervals,
    )
