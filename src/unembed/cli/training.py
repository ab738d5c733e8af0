"""`train` and `train-encoder`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from unembed.cli.options import Trust, writable_folder
from unembed.cli.terminal import FLAG, Json, Stopped, at_terminal, leads, say, write, write_json
from unembed.config import PRESETS, Config, DiffusionConfig, ModelConfig, TrainConfig
from unembed.config import preset as find_preset
from unembed.errors import UnembedError
from unembed.whole import standing_folder

RunFolder = Annotated[
    Path, Parameter(name=["--output", "-o"], help="The run's folder.", validator=writable_folder)
]
# Of the settings, those that mean something to a distilled encoder.
OF_ENCODERS = (
    "layers", "hidden", "heads", "ffn", "pairs", "splice_share", "swap_share", "batch_size", "steps",
    "minutes", "optimizer", "learning_rate", "muon_rate", "weight_decay", "warmup", "decay", "decay_start",
    "clip", "ema", "precision", "compile", "seed", "validation", "evaluate_every", "save_every", "patience",
)  # fmt: skip


def _settings_class(kept: Container[str] | None = None) -> type:
    """Make a class whose fields are settings, all or those kept, each None until its option is given."""
    fields: list[tuple[str, Any, Any]] = []
    for order, (title, section) in enumerate(
        {"Model": ModelConfig, "Diffusion": DiffusionConfig, "Training": TrainConfig}.items(), 2
    ):
        group, hints = Group(title, sort_key=order), get_type_hints(section)
        for f in dataclasses.fields(section):
            if kept is not None and f.name not in kept:
                continue
            option = Parameter(help=f.metadata["help"], group=group)
            fields.append((f.name, Annotated[hints[f.name] | None, option], dataclasses.field(default=None)))
    # The parser resolves the annotations in the module that the class says it is from.
    return dataclasses.make_dataclass("Settings", fields, frozen=True, namespace={"__module__": __name__})


if TYPE_CHECKING:
    from collections.abc import Container

    Settings = Any
    EncoderSettings = Any
else:
    Settings, EncoderSettings = _settings_class(), _settings_class(OF_ENCODERS)
NONE_GIVEN = None if TYPE_CHECKING else Settings()
NOTHING_GIVEN = None if TYPE_CHECKING else EncoderSettings()


def train(
    *,
    preset: Annotated[str | None, Parameter(help=f"Where settings start: {', '.join(PRESETS)}.")] = None,
    data: Annotated[Path, Parameter(help="A folder that `unembed prepare` filled.")],
    output: RunFolder,
    resume: Annotated[
        bool, FLAG, Parameter(help="Go on with the run in that folder; its settings are known.")
    ] = False,
    start_from: Annotated[
        str | None,
        Parameter(help="A trained model to take the first weights from; its encoder may be another one."),
    ] = None,
    settings: Annotated[Settings, Parameter(name="*")] = NONE_GIVEN,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Train an inverter on prepared data."""
    from unembed.train import train as run

    given = {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    known = resume and preset is None
    config = (_saved_settings(output) if known else find_preset(preset or "small")).override(**given)
    result = run(
        _fit(config, given, data),
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


def train_encoder(
    data: Annotated[Path, Parameter(help="A folder that `unembed prepare` filled.")],
    /,
    *,
    output: RunFolder,
    resume: Annotated[
        bool, FLAG, Parameter(help="Go on with the run in that folder; its settings are known.")
    ] = False,
    settings: Annotated[EncoderSettings, Parameter(name="*")] = NOTHING_GIVEN,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Train a small network to give the vectors of the data's encoder."""
    from unembed.distill import DISTILLED
    from unembed.distill import train_encoder as run

    given = {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    config = (_saved_settings(output) if resume else DISTILLED).override(**given)
    result = run(
        _fit(config, given, data),
        data=data,
        out=output,
        resume=resume,
        trust_remote_code=trust_remote_code,
        show_progress=at_terminal(),
    )
    if result.interrupted:
        again = shlex.join(["unembed", "train-encoder", str(data), "-o", str(output), "--resume"])
        raise Stopped(f"stopped at step {result.steps}, all saved; go on with: {again}")
    if json:
        write_json({**dataclasses.asdict(result), "model": str(result.model)})
    elif leads():
        cosine = "" if result.validation_loss is None else f", cosine {1 - result.validation_loss:.4f}"
        write(f"{result.model}: {result.steps} steps in {result.seconds / 60:.1f} minutes{cosine}")
        use = ["unembed", "invert", "VECTORS", "--refine", "distilled", "--distilled", str(result.model)]
        say(f"use it: {shlex.join(use)}")


def _saved_settings(out: Path) -> Config:
    """The settings that the run in a folder began with."""
    import json

    from unembed.train import STATE

    # Only read: the run itself mends its folder, once it has it to itself.
    state = standing_folder(out / STATE)
    try:
        saved = json.loads((state / "progress.json").read_text(encoding="utf-8"))
        return Config.from_json(json.dumps(saved["config"]))
    except FileNotFoundError as error:
        raise UnembedError(f"{out} holds no run to resume; leave out --resume to start one.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnembedError(f"the state in {out / STATE} is damaged ({error}).") from error


def _fit(config: Config, given: dict[str, Any], data: Path) -> Config:
    """Take from the data what it fixes; an option that says otherwise is refused."""
    from unembed.corpus import PreparedData
    from unembed.train import fit_to_data

    prepared = PreparedData.open(data)
    if "pairs" not in given:  # there is only one way for each kind
        config = config.override(pairs="fresh" if prepared.kind == "passages" else "cached")
    fitted = fit_to_data(config, prepared)
    for name, value in given.items():
        if (fixed := getattr(fitted.model, name, value)) != value:
            raise UnembedError(
                f"{data} was prepared with {name} {fixed}, not {value}; "
                f"leave --{name.replace('_', '-')} out, or prepare other data."
            )
    return fitted
