"""`reconstruct` and `invert`: from vectors back to text."""

from __future__ import annotations

import sys
from collections.abc import Sized
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from unembed.cli.files import read_vectors
from unembed.cli.options import (
    BatchSize,
    Decoding,
    Device,
    EncoderName,
    Model,
    Search,
    Trust,
    encoder_of,
    open_inverter,
    writable_file,
)
from unembed.cli.terminal import (
    FLAG,
    STDIN,
    Json,
    Stopped,
    at_terminal,
    dashed,
    say,
    show,
    to_json,
    waiting,
    write,
    write_json,
)
from unembed.errors import UnembedError
from unembed.whole import whole_file

if TYPE_CHECKING:
    from unembed.results import Inversion, Reconstruction

PLAIN, DRAFT = Decoding(), Search()
PACE = 0.15


def _seconds(_: Any, time: float) -> None:
    """Refuse a time that nobody can wait for."""
    if not 0 <= time < float("inf"):
        raise ValueError(f"must be a number of seconds, 0 or more, not {time}.")


def reconstruct(
    *texts: Annotated[
        str, Parameter(help="The texts, each in quotes; lines of standard input for - or none at all.")
    ],
    live: Annotated[bool, FLAG, Parameter(help="Show the text unmask, step by step.")] = False,
    pace: Annotated[
        float, Parameter(help="Seconds that --live rests on each step.", validator=_seconds)
    ] = PACE,
    model: Model = None,
    encoder: EncoderName = None,
    decoding: Decoding = PLAIN,
    search: Search = DRAFT,
    batch_size: BatchSize = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Embed texts, forget them, recover them from the vectors alone."""
    if live and json:
        raise UnembedError("--live is for people and --json for programs; choose one of them.")
    if pace != PACE and not live:
        raise UnembedError("--pace concerns --live; add --live, or leave it out.")
    decoding.check()
    search.check()
    chosen = _texts(texts)
    inverter = open_inverter(model, device=device, encoder=encoder, search=search)
    reader = encoder_of(inverter, encoder, device=device, trust=trust_remote_code)
    options = decoding.options() | search.options()
    if live:
        from unembed.cli.live import play

        play(chosen, inverter=inverter, encoder=reader, options=options, pace=pace)
        return
    long = _is_long(chosen, batch_size, search)
    with nullcontext() if long else waiting("recovering"):
        found = inverter.reconstruct(
            chosen, encoder=reader, batch_size=batch_size, show_progress=at_terminal() and long, **options
        )
    if json:
        write_json([_reconstruction_record(each) for each in found])
    else:
        from unembed.cli.shades import comparison

        show(comparison(found, tokenizer=inverter.tokenizer))


def invert(
    file: Annotated[
        str, Parameter(help=".npy, .npz, .parquet or .jsonl; - for standard input (JSON lines or .npy).")
    ],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="Write there, whole or not at all, instead of to stdout.",
            validator=writable_file,
        ),
    ] = None,
    key: Annotated[str | None, Parameter(help="Array of an .npz; its only 2-D floats by default.")] = None,
    column: Annotated[
        str | None,
        Parameter(help="Column of a .parquet or field of a .jsonl; vector or embedding by default."),
    ] = None,
    model: Model = None,
    decoding: Decoding = PLAIN,
    search: Search = DRAFT,
    batch_size: BatchSize = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Turn a file of vectors into text, one line a vector."""
    decoding.check()
    search.check()
    output = None if str(output) == STDIN else output
    vectors = read_vectors(file, key=key, column=column)
    if output is not None and file != STDIN and output.exists() and output.samefile(file):
        raise UnembedError(f"{output} holds the vectors; choose another file for the texts.")
    inverter = open_inverter(model, device=device, search=search)
    options = decoding.options() | search.options()
    if search.refine == "encoder":
        options["encoder"] = encoder_of(inverter, None, device=device, trust=trust_remote_code)
    long = _is_long(vectors, batch_size, search)
    found: list[Inversion] = []
    try:
        with nullcontext() if long else waiting("inverting"):
            inverter.invert(
                vectors, batch_size=batch_size, show_progress=at_terminal() and long, on_batch=found.extend,
                **options,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        if not found:
            raise
        _write_texts(found, output, as_json=json)
        raise Stopped(
            f"stopped: {output or 'stdout'} holds the first {len(found)} of {len(vectors)} texts; "
            "for the others, invert the vectors after them."
        ) from error
    _write_texts(found, output, as_json=json)
    if output is not None:
        say(f"wrote {len(found)} texts to {output}")


def _is_long(given: Sized, batch_size: int, search: Search) -> bool:
    """Whether the work has steps enough for a bar: several batches, or the rounds of a search."""
    return len(given) > batch_size or search.refine is not None


def _write_texts(found: list[Inversion], output: Path | None, *, as_json: bool) -> None:
    """Write what was found to a file, whole or not at all, or to stdout."""
    text = to_json([asdict(each) for each in found]) if as_json else "\n".join(map(_line, found))
    if output is None:
        write(text)
        sys.stdout.flush()  # before anyone is told that it is there
        return
    with whole_file(output) as out:
        out.write(f"{text}\n".encode())


def _texts(given: tuple[str, ...]) -> list[str]:
    """The texts of the command line, with the lines of standard input in the place of a dash."""
    from unembed.sources import read_texts

    chosen: list[str] = []
    for text in given or (STDIN,):
        if text == STDIN:
            chosen += read_texts(dashed(text))
        else:
            chosen.append(text)
    return chosen


def _line(inversion: Inversion) -> str:
    """The text on one line, whatever it holds."""
    return " ".join(inversion.text.splitlines())


def _reconstruction_record(found: Reconstruction) -> dict[str, Any]:
    """What `reconstruct --json` says of a text."""
    from unembed.cli.shades import mean_confidence

    return {
        "original": found.original,
        "recovered": found.text,
        "cosine": round(found.cosine, 6),
        "likeness": found.inversion.likeness,
        "confidence": round(mean_confidence(found.inversion.confidences), 6),
        "confidences": found.inversion.confidences,
        "strategy": found.inversion.strategy,
        "forward_passes": found.inversion.forward_passes,
        "encoder_calls": found.inversion.encoder_calls,
        "exact": found.inversion.exact,
        "ranked_by": found.inversion.ranked_by,
    }
