"""What long work says of itself: lines of JSON in a file, and a bar on the terminal; and that it works alone.

Knows rows of numbers; nothing of models or data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unembed.errors import UnembedError
from unembed.whole import write_whole

try:
    import fcntl
except ImportError:  # not a Unix: there, nobody is kept out
    fcntl = None  # type: ignore[assignment]

Report = Callable[[dict[str, Any]], None]


class MetricsLog:
    """Lines of JSON, one a measurement; lines after the step resumed from are dropped."""

    def __init__(self, path: Path, *, last_step: int, write: bool) -> None:
        """Open the log, keeping what it says of steps up to `last_step`."""
        self.path, self.enabled = path, write
        kept = [row for row in self.rows() if row["step"] <= last_step] if path.exists() else []
        if write:
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        if self.enabled:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Read all lines; one that a kill cut short is dropped."""
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes out that would write to the same file or folder meanwhile."""
    held = os.open(path, os.O_RDONLY) if fcntl is not None else None
    try:
        if held is not None:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UnembedError(
                    f"{path} is being written by another run; wait until it is done, or choose another place."
                ) from error
            except OSError:  # a file system that knows no locks
                pass
        yield
    finally:
        if held is not None:
            os.close(held)


@contextmanager
def progress(what: str, *, total: int | None, done: int = 0, show: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr, where wanted; yield what moves it."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn(elapsed_when_finished=True))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count: bar.advance(task, count)


@contextmanager
def progress_bar(*, steps: int, done: int, show: bool) -> Iterator[Report]:
    """Give a function that shows the latest figures; without `show`, one that does nothing."""
    if not show:
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    shown: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps, completed=done, figures="")

        def report(row: dict[str, Any]) -> None:
            shown.update(row)
            names = [k for k in ("loss", "validation_loss", "token_f1") if k in shown]
            figures = "  ".join(f"{name.replace('_', ' ')} {shown[name]:.3f}" for name in names)
            bar.update(task, completed=shown.get("step", done), figures=figures)

        yield report
