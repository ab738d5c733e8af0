"""`evaluate`, `report` and `compare`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from unembed.cli.options import (
    BatchSize,
    Device,
    EncoderName,
    Field,
    Model,
    Search,
    Trust,
    check_concern,
    encoder_of,
    open_inverter,
    writable_folder,
)
from unembed.cli.terminal import STDIN, Json, Stopped, at_terminal, dashed, say, show_table, write, write_json
from unembed.errors import UnembedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from unembed.figures import Comparison, Difference, Figures
    from unembed.records import Method, Records, Row
    from unembed.suites import Suite

DRAFT = Search()
TEXTS = Group("Texts", sort_key=1)
BASELINES = Group("Baselines", sort_key=4)
# What the columns of a table are called, and how many digits they get.
COLUMNS = {
    "acc.": "token_accuracy", "F1": "token_f1", "exact": "exact_match", "BLEU": "bleu",
    "ROUGE": "rouge_l", "cosine": "cosine", "passes": "forward_passes", "per s": "texts_per_second",
}  # fmt: skip
DIGITS = {"bleu": 1, "forward_passes": 1, "texts_per_second": 1, "encoder_calls": 1}


def evaluate(
    *files: Annotated[
        str,
        Parameter(
            help=".txt (a text a line), .jsonl or .parquet, not seen in training; - for standard input. "
            "Each file is a suite of its own."
        ),
    ],
    builtin: Annotated[
        str | None,
        Parameter(
            help="Sentences that come with the package: english and parallel (ten languages), one or both.",
            group=TEXTS,
        ),
    ] = None,
    strategy: Annotated[
        str,
        Parameter(
            help="One or more of `unembed strategies`, with commas between; auto for the model's best, "
            "none for baselines alone."
        ),
    ] = "auto",
    steps: Annotated[
        str | None,
        Parameter(help="One or more numbers of passes, with commas between; the strategy's own by default."),
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="Where to write a record of every text (.jsonl); a file that is there is gone on with.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        Parameter(help="Take the first so many texts of each suite and language.", group=TEXTS),
    ] = None,
    field: Annotated[Field, Parameter(group=TEXTS)] = "text",
    language_field: Annotated[
        str, Parameter(help="Field of JSON lines that holds the text's language.", group=TEXTS)
    ] = "language",
    languages: Annotated[
        str | None, Parameter(help="Keep these languages only, such as en,de.", group=TEXTS)
    ] = None,
    baseline: Annotated[
        str | None,
        Parameter(
            help="Measure beside them random (tokens), unconditional (the model without the vector), "
            "nearest (passage of --data), with commas between.",
            group=BASELINES,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        Parameter(help="A folder that `unembed prepare` filled, for the nearest passage.", group=BASELINES),
    ] = None,
    data_limit: Annotated[
        int | None, Parameter(help="Look at its first so many passages only.", group=BASELINES)
    ] = None,
    model: Model = None,
    encoder: EncoderName = None,
    temperature: Annotated[
        float | None, Parameter(help="0 takes the likeliest tokens; each strategy's own by default.")
    ] = None,
    guidance: Annotated[
        float, Parameter(help="1 is the model as it is; more leans harder on the vector.")
    ] = 1.0,
    drafts: Annotated[
        int, Parameter(help="Texts drawn for a vector, of which one is chosen, from 1 to 64; not with beam.")
    ] = 1,
    beams: Annotated[
        int | None, Parameter(help="Beginnings of a text that beam keeps, from 1 to 128; 32 by default.")
    ] = None,
    looks: Annotated[
        int | None,
        Parameter(help="How often beam looks where its beginnings lead, from 0 to 8; 4 by default."),
    ] = None,
    search: Search = DRAFT,
    seed: Annotated[int, Parameter(help="Of everything that is drawn.")] = 0,
    batch_size: BatchSize = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Measure how much of held-out text comes back from its vectors."""
    from unembed import metrics
    from unembed.evaluate import evaluate_suites, plan
    from unembed.figures import as_record, figures_of

    search.check()
    strategies = _strategies(strategy, beams=beams, looks=looks)
    if output is not None and str(output) == STDIN:
        raise UnembedError("records are read again, and stdout cannot be; give -o the name of a file.")
    counts = _listed(steps, "steps", int) if steps is not None else None
    baselines = _listed(baseline, "baseline", str) if baseline else []
    suites = _suites(files, builtin, field, language_field, languages, limit)
    prepared = _open_data(data, data_limit, baselines)
    if output is None:
        metrics.check_extra()
    elif not metrics.has_bleu():
        say("note: sacrebleu is not installed, so BLEU is left out; run again where it is to fill it in.")
    inverter = open_inverter(model, device=device, encoder=encoder, search=search)
    methods = plan(
        strategies,
        counts,
        config=inverter.config.model,
        baselines=baselines,
        guidance=guidance,
        temperature=temperature,
        drafts=drafts,
        beams=beams,
        looks=looks,
        **search.options(),
    )
    try:
        records = evaluate_suites(
            suites,
            inverter=inverter,
            methods=methods,
            encoder=encoder_of(inverter, encoder, device=device, trust=trust_remote_code),
            out=output,
            seed=seed,
            batch_size=batch_size,
            data=prepared,
            data_limit=data_limit,
            model_name="/".join(Path(model).parts[-2:]) if model else "",
            show_progress=at_terminal(),
        )
    except KeyboardInterrupt as error:
        if output is None:
            raise
        raise Stopped("stopped, what is done is saved; run the same command again to go on.") from error
    found = figures_of(records)
    by_name = {method.name: method for method in records.methods}
    if json:
        write_json([as_record(each, by_name[each.method]) for each in found])
    else:
        _show_figures(found, by_name)
        if output is not None:
            again = shlex.join(["unembed", "report", str(output), "-o", "FOLDER"])
            say(f"note: {len(records.rows)} records in {output}; make a page of them: {again}")


def _strategies(given: str, **knobs: int | None) -> list[str]:
    """The strategies that were named; a bad name, or a knob of none of them, is refused early."""
    from unembed.strategies import AUTO, find_strategy

    strategies = [] if given == "none" else _listed(given, "strategy", str)
    for name in strategies:
        if name != AUTO:
            find_strategy(name)
    for name, value in knobs.items():
        if value is not None:
            check_concern(name, strategies)
    return strategies


def _suites(
    files: tuple[str, ...],
    builtin: str | None,
    field: str,
    language_field: str,
    languages: str | None,
    limit: int | None,
) -> list[Suite]:
    """Read the files and the built-in sentences that were named."""
    from unembed.suites import builtin_suite, read_suites

    if not files and builtin is None:
        raise UnembedError("there is no text to evaluate; give a file of texts, or --builtin english.")
    wanted = _listed(languages, "languages", str) if languages else []
    names = [dashed(name) for name in files]
    builtins = _listed(builtin, "builtin", str) if builtin else []
    suites = [builtin_suite(name, languages=wanted, limit=limit) for name in builtins]
    suites += read_suites(names, field=field, language_field=language_field, languages=wanted, limit=limit)
    missing = set(wanted) - {language for suite in suites for language in suite.languages}
    if missing:
        raise UnembedError(f"there is no text in {', '.join(sorted(missing))}; leave it out of --languages.")
    return suites


def _open_data(data: Path | None, limit: int | None, baselines: list[str]) -> Any:
    """Open the prepared data for the nearest passage, if it is asked for."""
    from unembed.corpus import PreparedData

    if "nearest" not in baselines:
        if data is not None or limit is not None:
            raise UnembedError("--data is for the nearest passage; add --baseline nearest, or leave it out.")
        return None
    if data is None:
        raise UnembedError("the baseline nearest needs the text it may choose from; add --data FOLDER.")
    if limit is not None and limit < 1:
        raise UnembedError(f"data-limit must be at least 1, not {limit}.")
    return PreparedData.open(data)


def _listed(value: str, name: str, kind: Callable[[str], Any]) -> list[Any]:
    """Split what was given with commas."""
    try:
        return [kind(part.strip()) for part in value.split(",")]
    except ValueError as error:
        raise UnembedError(f"{name} must be whole numbers with commas between, not {value!r}.") from error


def _show_figures(found: list[Figures], methods: dict[str, Method]) -> None:
    """Draw the figures of each method, a table for each suite."""
    columns = dict(COLUMNS)
    if any(each.encoder_calls for each in found):
        # 80 places hold no more; ROUGE says least that the others do not.
        del columns["ROUGE"]
        columns["calls"] = "encoder_calls"
    suites = list(dict.fromkeys(each.suite for each in found))
    for suite in suites:
        here = [each for each in found if each.suite == suite]
        if len(suites) > 1:
            write(f"\n{suite}, {here[0].texts} texts")
        if any(each.language for each in here):
            # Passes and speed are no matter of languages, and 80 places hold no more.
            heads, shown = ["method", "language"], dict(list(columns.items())[:6])
            first = [[each.method, each.language or "all"] for each in here]
        else:
            heads, shown = ["strategy", "steps"], columns
            shown_methods = [methods[each.method] for each in here]
            first = [[method.strategy, str(method.steps or "–")] for method in shown_methods]
        rows = []
        for names, each in zip(first, here, strict=True):
            figures = vars(each) | each.values
            rows.append([*names, *(_digits(figures.get(key), DIGITS.get(key, 3)) for key in shown.values())])
        show_table([*heads, *shown], rows, numbers=["steps", *shown])
    texts = sum(e.texts for e in found if e.language is None and e.method == found[0].method)
    say(f"note: {texts} text{'s' if texts != 1 else ''}; --json adds 95 % intervals")


def _digits(value: float | None, digits: int) -> str:
    """Show a figure, or a dash where there is none; a large one without digits behind the point."""
    return "–" if value is None else f"{value:.{0 if value > 100 else digits}f}"


# --- report and compare ---------------------------------------------------------------------------


def report(
    *records: Annotated[Path, Parameter(help="Files that `unembed evaluate -o` wrote.")],
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            help="The folder to write report.md and index.html to.",
            validator=writable_folder,
        ),
    ],
    title: Annotated[str | None, Parameter(help="What the page is called.")] = None,
    json: Json = False,
) -> None:
    """Turn records into Markdown and one self-contained page."""
    from unembed.records import read_records
    from unembed.report import write_report

    if not records:
        raise UnembedError("there are no records to report on; give files that unembed evaluate -o wrote.")
    written = write_report([read_records(path) for path in records], output, title=title)
    if json:
        write_json({path.suffix[1:]: str(path) for path in written})
    else:
        for path in written:
            write(str(path))


def compare(
    a: Annotated[str, Parameter(help="Records, or FILE#METHOD.")],
    b: Annotated[str, Parameter(help="Records to compare them with, or FILE#METHOD.")],
    /,
    *,
    seed: Annotated[int, Parameter(help="Of the resampling.")] = 0,
    json: Json = False,
) -> None:
    """Give the paired difference of each metric, with its interval and a verdict."""
    found = _comparisons(a, b, seed=seed)
    if json:
        write_json([dataclasses.asdict(each) for each in found])
        return
    for each in found:
        _show_comparison(each)


def _comparisons(a: str, b: str, *, seed: int) -> list[Comparison]:
    """Compare the methods that were named, else the only ones, else those that both files have."""
    from unembed import figures

    (left_file, left), (right_file, right) = _rows(a), _rows(b)
    if len(left) == len(right) == 1:
        pairs = [(next(iter(left)), next(iter(right)))]
    else:
        pairs = [(name, name) for name in left if name in right]
        if a == b or not pairs:
            files = {left_file.path: left, right_file.path: right}
            has = ", ".join(f"{path} has {', '.join(methods)}" for path, methods in files.items())
            raise UnembedError(f"say which methods to compare, FILE#METHOD; {has}.")
    return [
        figures.compare(left[x], right[y], names=(f"{_stem(a)}#{x}", f"{_stem(b)}#{y}"), seed=seed)
        for x, y in pairs
    ]


def _rows(name: str) -> tuple[Records, dict[str, list[Row]]]:
    """Read the records of FILE or FILE#METHOD."""
    from unembed.figures import select
    from unembed.records import read_records

    path, mark, method = (name, "", "") if Path(name).is_file() else name.rpartition("#")
    records = read_records(path or name)
    return records, select(records, method if mark else None)


def _stem(name: str) -> str:
    """The name of a file without folders, endings and method."""
    return Path(name.partition("#")[0]).stem


def _show_comparison(each: Comparison) -> None:
    """Draw the differences, then say what they amount to."""
    from unembed.report.story import NAMES

    say(f"A is {each.a}, B is {each.b}")
    rows = [[NAMES[d.metric], *_difference(d), "" if d.clear else "within chance"] for d in each.differences]
    heads = ["metric", "A", "B", "B - A", "95 % interval"]
    show_table([*heads, ""], rows, numbers=heads[1:])
    if each.only_a or each.only_b:
        say(f"note: {each.only_a} texts of A and {each.only_b} of B are not in the other and were left out")
    if each.cut_differently:
        say(f"note: {each.cut_differently} of the texts were cut or spelt differently in A and B")
    write(each.verdict)


def _difference(each: Difference) -> list[str]:
    """Show the two figures, their difference and its interval."""
    digits = 1 if each.metric == "bleu" else 3
    low, high = each.interval
    return [
        f"{each.a:.{digits}f}",
        f"{each.b:.{digits}f}",
        f"{each.difference:+.{digits}f}",
        f"{low:+.{digits}f} to {high:+.{digits}f}",
    ]
