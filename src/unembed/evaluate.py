"""Held-out text -> records: what to measure, whether it can be, and the file it goes to.

Knows methods, suites and records. Must not know how a strategy decodes, how a text is measured, or how
a record is printed or drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from unembed import metrics
from unembed.config import ModelConfig
from unembed.decode import DecodeOptions
from unembed.errors import UnembedError, check_batch_size, unknown_name
from unembed.figures import Figures, figures, figures_of
from unembed.inverter import Inverter
from unembed.job import UNCONDITIONAL, CutSuite, Job
from unembed.provenance import describe
from unembed.records import Method, RecordFile, Records, read_records
from unembed.scoring import Hypotheses, References, measure, unknown_id
from unembed.search import Refine, SearchOptions
from unembed.strategies import AUTO, check_steps, find_strategy, resolve
from unembed.suites import Suite, check_limit, suite_of

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder

Baseline = Literal["random", "unconditional", "nearest"]
BASELINES: tuple[str, ...] = get_args(Baseline)


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
    drafts: int = 1,
    beams: int | None = None,
    looks: int | None = None,
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
        drafts=drafts,
        beams=beams,
        looks=looks,
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
    drafts: int = 1,
    beams: int | None = None,
    looks: int | None = None,
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
    methods, usual = [], {"beams": DecodeOptions.beams, "looks": DecodeOptions.looks}
    given = {"beams": beams, "looks": looks}
    knobs = {name: usual[name] if value is None else value for name, value in given.items()}
    for asked in strategies:
        fixed = asked != AUTO and find_strategy(asked).causal  # it takes a step a token, whatever is asked
        for each in (None,) if fixed else steps or (None,):
            strategy = resolve(asked, config=config, steps=each, temperature=temperature, drafts=drafts)
            own: dict[str, Any] = knobs if strategy.beams else {}
            method = Method("", strategy.name, 0, guidance, temperature, search, drafts=drafts, **own)
            options = DecodeOptions(strategy.name, each, temperature, guidance, **method.knobs)
            fitted = options.fit(config)
            count = fitted.steps
            name = f"{strategy.name}-{count}"
            name += f"-guidance-{guidance:g}" if guidance != 1 else ""
            name += f"-temperature-{temperature:g}" if temperature is not None else ""
            name += f"-drafts-{drafts}" if drafts != 1 else ""
            name += "".join(f"-{knob}-{value}" for knob, value in own.items() if value != usual[knob])
            name += f"-{refine}-{rounds}x{candidates}" if refine is not None else ""
            name += f"-budget-{budget}" if refine is not None and budget is not None else ""
            looked = fitted.looks if strategy.beams else None
            methods.append(replace(method, name=name, steps=count, looks=looked))
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
    check_batch_size(batch_size)
    _check_suites(suites)
    _check_methods(methods, inverter, data)
    encoder = inverter.encoder() if encoder is None else encoder
    inverter.check_encoder(encoder)
    chunk = batch_size if chunk == 0 else chunk
    cut = [CutSuite(suite, inverter, encoder, batch_size, chunk) for suite in suites]
    header = describe(suites, inverter, encoder, methods, seed, batch_size, data, data_limit, model_name)
    unknown = unknown_id(inverter.tokenizer)
    job = Job(cut, inverter, encoder, list(methods), seed, data, data_limit, unknown, show_progress)
    if out is None:
        rows = [row for batch in job.run(0) for row in batch]
        return Records(Path(), header, rows, [], None)
    with RecordFile(out, header) as file:
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
            options = DecodeOptions(
                method.strategy, method.steps, method.temperature, method.guidance, **method.knobs
            )
            options.fit(inverter.config.model)
        elif method.strategy == "nearest" and data is None:
            raise UnembedError("the baseline nearest needs the text it may choose from; give prepared data.")


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
