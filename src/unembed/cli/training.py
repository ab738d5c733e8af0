"""`train` and `evaluate`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from unembed.cli.options import (
    BatchSize,
    Device,
    EncoderName,
    Field,
    Model,
    Search,
    Trust,
    encoder_of,
    open_inverter,
)
from unembed.cli.terminal import (
    FLAG,
    Json,
    Stopped,
    at_terminal,
    dashed,
    leads,
    say,
    show_table,
    write,
    write_json,
)
from unembed.config import PRESETS, Config, DiffusionConfig, ModelConfig, TrainConfig, preset
from unembed.errors import UnembedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from unembed.evaluate import Record

DRAFT = Search()


def _settings_class() -> type:
    """Make a class whose fields are all settings, each None until its option is given."""
    fields: list[tuple[str, Any, Any]] = []
    for order, (title, section) in enumerate(
        {"Model": ModelConfig, "Diffusion": DiffusionConfig, "Training": TrainConfig}.items(), 2
    ):
        group, hints = Group(title, sort_key=order), get_type_hints(section)
        for f in dataclasses.fields(section):
            option = Parameter(help=f.metadata["help"], group=group)
            fields.append((f.name, Annotated[hints[f.name] | None, option], dataclasses.field(default=None)))
    # The parser resolves the annotations in the module that the class says it is from.
    return dataclasses.make_dataclass("Settings", fields, frozen=True, namespace={"__module__": __name__})


if TYPE_CHECKING:
    Settings = Any
else:
    Settings = _settings_class()
NONE_GIVEN = None if TYPE_CHECKING else Settings()


def train(
    *,
    preset: Annotated[str | None, Parameter(help=f"Where settings start: {', '.join(PRESETS)}.")] = None,
    data: Annotated[Path, Parameter(help="A folder that `unembed prepare` filled.")],
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The run's folder.")],
    resume: Annotated[
        bool, FLAG, Parameter(help="Go on with the run in that folder; its settings are known.")
    ] = False,
    start_from: Annotated[
        str | None, Parameter(help="A trained model to take the first weights from.")
    ] = None,
    settings: Annotated[Settings, Parameter(name="*")] = NONE_GIVEN,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Train an inverter on prepared data."""
    from unembed.train import train as run

    given = {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    config = _starting_point(preset, output, resume=resume).override(**given)
    if "pairs" not in given:
        config = config.override(pairs=_pairs_of(data))
    result = run(
        config,
        data=data,
        out=output,
        resume=resume,
        start_from=start_from,
        trust_remote_code=trust_remote_code,
        show_progress=at_terminal(),
    )
    if result.interrupted:
        again = shlex.join(["unembed", "train", "--data", str(data), "-o", str(output), "--resume"])
        raise Stopped(f"stopped at step {result.steps}, all saved; go on with: {again}")
    if json:
        write_json({**dataclasses.asdict(result), "model": str(result.model)})
    elif leads():
        loss = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f}"
        write(f"{result.model}: {result.steps} steps in {result.seconds / 60:.1f} minutes{loss}")
        say(f"try it: {shlex.join(['unembed', 'reconstruct', '--model', str(result.model), 'Some text.'])}")


def _starting_point(name: str | None, out: Path, *, resume: bool) -> Config:
    """The settings of the preset; on resuming without one, those that the run began with."""
    if name is None and resume:
        import json

        from unembed.train import STATE

        try:
            saved = json.loads((out / STATE / "progress.json").read_text(encoding="utf-8"))
            return Config.from_json(json.dumps(saved["config"]))
        except FileNotFoundError as error:
            raise UnembedError(f"{out} holds no run to resume; leave out --resume to start one.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UnembedError(f"the state in {out / STATE} is damaged ({error}).") from error
    return preset(name or "small")


def _pairs_of(data: Path) -> str:
    """How training takes its pairs from this data: there is only one way for each kind."""
    from unembed.corpus import PreparedData

    return "fresh" if PreparedData.open(data).kind == "passages" else "cached"


def evaluate(
    *files: Annotated[
        str,
        Parameter(
            help=".txt (a text a line), .jsonl or .parquet, not seen in training; - for standard input."
        ),
    ],
    strategy: Annotated[
        str, Parameter(help="One or more of `unembed strategies`, with commas between.")
    ] = "confidence",
    steps: Annotated[str, Parameter(help="One or more numbers of passes, with commas between.")] = "8",
    limit: Annotated[int | None, Parameter(help="Take the first so many texts.")] = None,
    model: Model = None,
    encoder: EncoderName = None,
    temperature: Annotated[
        float | None, Parameter(help="0 takes the likeliest tokens; each strategy's own by default.")
    ] = None,
    guidance: Annotated[
        float, Parameter(help="1 is the model as it is; more leans harder on the vector.")
    ] = 1.0,
    search: Search = DRAFT,
    seed: Annotated[int, Parameter(help="Of everything that is drawn.")] = 0,
    field: Field = "text",
    batch_size: BatchSize = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Measure how much of held-out text comes back from its vectors."""
    from unembed.evaluate import evaluate as measure
    from unembed.sources import read_texts
    from unembed.strategies import find_strategy

    search.check()
    strategies = [find_strategy(name).name for name in _listed(strategy, "strategy", str)]
    counts = _listed(steps, "steps", int)
    texts = read_texts([dashed(name) for name in files], field=field)
    inverter = open_inverter(model, device=device, encoder=encoder)
    records = measure(
        texts,
        inverter=inverter,
        encoder=encoder_of(inverter, encoder, device=device, trust=trust_remote_code),
        strategies=strategies,
        steps=counts,
        guidance=guidance,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        limit=limit,
        show_progress=at_terminal(),
        **search.options(),
    )
    if json:
        write_json([dataclasses.asdict(record) for record in records])
    else:
        _show_records(records)


def _listed(value: str, name: str, kind: Callable[[str], Any]) -> list[Any]:
    """Split what was given with commas."""
    try:
        return [kind(part.strip()) for part in value.split(",")]
    except ValueError as error:
        raise UnembedError(f"{name} must be whole numbers with commas between, not {value!r}.") from error


def _show_records(records: list[Record]) -> None:
    """Draw the figures of each strategy and number of steps."""
    columns = {
        "acc.": "token_accuracy", "F1": "token_f1", "exact": "exact_match", "BLEU": "bleu",
        "ROUGE": "rouge_l", "cosine": "cosine", "passes": "forward_passes", "texts/s": "texts_per_second",
    }  # fmt: skip
    if any(r.encoder_calls for r in records):
        columns["calls"] = "encoder_calls"
    digits = {"bleu": 1, "forward_passes": 1, "texts_per_second": 1, "encoder_calls": 1}
    rows = [
        [r.strategy, r.steps, *(f"{getattr(r, key):.{digits.get(key, 3)}f}" for key in columns.values())]
        for r in records
    ]
    show_table(["strategy", "steps", *columns], rows, numbers=["steps", *columns])
    say(f"note: {records[0].texts} texts; --json adds 95 % intervals")
