"""What is said on the terminal: JSON and tables to stdout, notes to stderr.

Knows rich and the two streams; must not know what a result means.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# What a lone "-" becomes before parsing, because to the parser a dash begins an option.
STDIN = "<stdin>"
# A flag that is off unless named: no --no-flag, no default in the help.
FLAG = Parameter(negative="", show_default=False)
Json = Annotated[bool, FLAG, Parameter(name="--json", help="Print JSON.")]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says how to go on."""


def dashed(name: str) -> str:
    """Turn what stands for standard input, about to be read, back into the dash that other modules expect."""
    if name != STDIN:
        return name
    invite("texts")
    return "-"


def invite(what: str) -> None:
    """Say that standard input is waited for, where someone has to type it."""
    if sys.stdin.isatty():
        say(f"reading {what} from here, one a line, until Ctrl-D")


def leads() -> bool:
    """Whether this process speaks; under torchrun only the first does."""
    return os.environ.get("RANK", "0") == "0"


def say(sentence: str) -> None:
    """Write one line to stderr."""
    if leads():
        sys.stderr.write(f"unembed: {sentence}\n")
        sys.stderr.flush()


def write(text: str) -> None:
    """Write a line to stdout."""
    if leads():
        sys.stdout.write(f"{text}\n")


def write_json(value: Any) -> None:
    """Write JSON to stdout; of a list, a record a line."""
    write(to_json(value))


def to_json(value: Any) -> str:
    """Write JSON, of a list a record a line, so that both people and line tools can read it.

    >>> print(to_json([{"a": 1}, {"b": "é"}]))
    [
    {"a": 1},
    {"b": "é"}
    ]
    """
    if isinstance(value, list) and value:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in value)
        return f"[\n{rows}\n]"
    return json.dumps(value, ensure_ascii=False, indent=2)


def console(*, stderr: bool = False) -> Console:
    """Make a console on a stream as it is now."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def show(*things: RenderableType) -> None:
    """Draw things on stdout."""
    if leads():
        console().print(*things, sep="\n")


def show_table(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: Sequence[str] = (), wrap: str = ""
) -> None:
    """Draw a table on stdout.

    Args:
        heads: Names of the columns.
        rows: Cells, shown as they print.
        numbers: Columns to align to the right.
        wrap: The column that gives way where the terminal is narrow.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), show_header=any(heads)
    )
    for i, head in enumerate(heads):
        table.add_column(
            head,
            justify="right" if head in numbers else "left",
            no_wrap=head != wrap,
            style="cyan" if i == 0 else None,
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    show(table)


def at_terminal() -> bool:
    """Whether someone sees stderr, so that a progress bar makes sense."""
    return sys.stderr.isatty() and leads()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Turn a spinner on stderr while something takes its time."""
    if not at_terminal():
        yield
        return
    with console(stderr=True).status(f"{what} …"):
        yield
