"""The command `unembed`: parse, call, print.

Knows every other module, and none knows it. Commands import what they need when they run, so that
`unembed --help` costs no torch. Results go to stdout, progress and notes to stderr.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    ValidationError,
    convert,
)

from unembed import __version__
from unembed.cli.terminal import STDIN, Stopped, say
from unembed.errors import UnembedError

__all__ = ["app", "main"]

# Which extra of the package brings a module that is not always installed.
EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "sentence_transformers": "encoders",
    "transformers": "encoders",
    "matplotlib": "eval",
    "sacrebleu": "eval",
    "huggingface_hub": "hub",
    "fastapi": "serve",
    "uvicorn": "serve",
}
WRONG, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Group, command, where it lives, what the list of commands says of it, what its own help adds.
# Said here and not in docstrings, because a module is imported only when its command is called.
COMMANDS = {
    "Recover text": {
        "reconstruct": (
            "recover",
            "Embed texts, forget them, recover them from the vectors alone.",
            "Shows what went in, what came back, and the cosine between the embeddings of the two. "
            "The colour of a recovered token is its confidence.",
        ),
        "invert": (
            "recover",
            "Turn a file of vectors into text.",
            "Writes a line a vector, or with --json a record a vector with the confidence of each token.",
        ),
        "serve": (
            "serve",
            "Show it on a page: watch a vector turn back into text.",
            "Answers on http://127.0.0.1:8000 and works offline; /docs lists the HTTP interface.",
        ),
    },
    "Train and measure": {
        "encode": (
            "data",
            "Embed a file of texts.",
            "Without --output the vectors go to stdout as JSON lines, which `unembed invert -` reads.",
        ),
        "prepare": (
            "data",
            "Turn text into data for training.",
            "Writes shards of ids and vectors with a manifest. Run again, it goes on where it was stopped.",
        ),
        "train": (
            "training",
            "Train an inverter on prepared data.",
            "A preset says what is to be done, and options change it; what the data fixes is taken from "
            "the data. The run's folder gets model/, state/ to go on from, metrics.jsonl and curves. "
            "For several processes: torchrun --nproc-per-node 2 -m unembed train ...",
        ),
        "train-encoder": (
            "training",
            "Train a small network to stand in for an encoder.",
            "It learns the vectors of the data's encoder, and then ranks the candidates of a search where "
            "the encoder is not at hand: --refine distilled. The run's folder gets model/, state/ to go on "
            "from, and metrics.jsonl.",
        ),
        "evaluate": (
            "measuring",
            "Measure how much of held-out text comes back.",
            "One row for each strategy and number of steps; --json adds 95 % intervals. With -o every text "
            "goes into a file of records; run again, it goes on where it was stopped.",
        ),
        "report": (
            "measuring",
            "Turn records into a page to show.",
            "Writes report.md and index.html: tables, plots, examples. The page needs nothing else.",
        ),
        "compare": (
            "measuring",
            "Say which of two records recovers more.",
            "The difference B - A on the texts that both have, with its 95 % interval. FILE#METHOD chooses "
            "one of several methods in a file.",
        ),
    },
    "What there is": {
        "presets": ("catalog", "Settings to train with, and their parameters.", ""),
        "strategies": ("catalog", "Ways to decode.", ""),
        "encoders": ("catalog", "Encoders known by name.", "Others go by folder, hub id or http address."),
        "models": ("catalog", "Models that come with the package.", ""),
        "doctor": ("doctor", "Versions, device, and a self-test.", "Exit code 1 if the self-test fails."),
    },
}


def _whole_numbers(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read a value as its kind; 2.5 is no whole number, and is not made one by rounding."""
    if {int} <= {*(get_args(kind) or (kind,))} <= {int, type(None)}:
        for token in tokens:
            if token.value.partition(".")[2].strip("0"):
                raise ValueError(f"must be a whole number, not {token.value}.")
    return convert(kind, tokens)


def _build_app() -> App:
    """Register the commands, none of them imported yet."""
    root = App(
        "unembed",
        help="Recover text from its embedding by masked diffusion.",
        version=f"unembed {__version__}",
        help_format="plaintext",  # Markdown would cost 60 ms to import
        help_epilogue="Results go to stdout, the rest to stderr; every command takes --json.",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(converter=_whole_numbers),
    )
    for number, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=number)
        for order, (name, (module, summary, more)) in enumerate(commands.items()):
            path = f"unembed.cli.{module}:{name.replace('-', '_')}"
            text = f"{summary}\n\n{more}".strip()
            root.command(path, name=name, help=text, help_epilogue="", group=group, sort_key=order)
    root["--help"].group = root["--version"].group = Group("Also", sort_key=len(COMMANDS))
    return root


app = _build_app()


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line; a mistake of the user's is one sentence on stderr and exit code 2."""
    tokens = [STDIN if token == "-" else token for token in (sys.argv[1:] if argv is None else argv)]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            code = app(tokens, exit_on_error=False, print_error=False)
            sys.stdout.flush()
        except UnembedError as error:
            _fail(str(error))
        except CycloptsError as error:
            _fail(_parse_error(error))
        except KeyboardInterrupt as error:
            say(str(error) if isinstance(error, Stopped) else "stopped.")
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            _drop_output()  # the reader has gone, as in `unembed ... | head`
            sys.exit(BROKEN_PIPE)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            _fail(f"this needs the package {error.name}: pip install 'unembed[{extra}]'.")
        except OSError as error:
            if error.errno is None:  # not from the system but from a library: a bug until proven otherwise
                raise
            _fail(_system_error(error))
    if code:
        sys.exit(code)


def _drop_output() -> None:
    """Forget what stdout could not take, lest the flush at exit complain of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(sentence: str) -> NoReturn:
    """Say what was wrong and end."""
    say(sentence)
    sys.exit(WRONG)


def _system_error(error: OSError) -> str:
    """Say what the system refused to do, and with what."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is None and error.errno in FULL:
        _drop_output()
        return f"could not write all of the output: {reason}; make room, or send it elsewhere."
    return f"{error.filename or 'a file'}: {reason}."


def _parse_error(error: CycloptsError) -> str:
    """Say what was wrong with a command line, and where to look."""
    command = " ".join(["unembed", *(error.command_chain or [])])
    sentence = " ".join(str(error).split())
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        sentence = f"{command} needs a value for {error.argument.name}."
    elif isinstance(error, ValidationError) and error.argument is not None:
        sentence = f"{error.argument.name} {error.exception_message}"
    elif isinstance(error, UnknownOptionError) and command == "unembed reconstruct" and sentence[-1] != "?":
        # It is like no option, or the sentence would end by asking whether that was meant.
        sentence += " Texts that begin with a dash go last, after --."
    return f"{sentence[:1].lower()}{sentence[1:]} See {command} --help."


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without the source of the one who warned."""
    say(f"note: {' '.join(str(message).split())}")
