"""What an evaluation leaves behind: a file of JSON lines that can be added to, killed, and gone on with.

The first line is the header (settings, versions, hardware), then comes a line for each text, and at the
end a summary with the figures. A run that was resumed has a line that says where. Knows files and plain
data; must not know models, metrics or how a record is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unembed.errors import UnembedError
from unembed.logbook import alone
from unembed.whole import write_whole

FORMAT = 1


@dataclass(frozen=True)
class Method:
    """One way to get from vectors to text, as it is measured: a strategy with its settings, or a baseline."""

    name: str  # unique in a file, and what `unembed compare FILE#NAME` takes
    strategy: str
    steps: int = 0
    guidance: float = 1.0
    temperature: float | None = None
    search: dict[str, Any] | None = None
    baseline: bool = False
    drafts: int = 1
    beams: int | None = None  # None: the strategy keeps none
    looks: int | None = None  # None: as above, or there was no looking ahead yet

    @property
    def knobs(self) -> dict[str, Any]:
        """What `invert` is told besides the strategy, its steps, guidance and temperature."""
        given = {"drafts": self.drafts, "beams": self.beams, "looks": self.looks}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """What came back of one text; the fields are the JSON keys."""

    method: str
    suite: str
    number: int  # of the text in its suite, which seeds its draws
    language: str | None
    key: str  # names the text as it was given, in whatever file
    text: str  # as it was embedded: cut, with its case
    reference: str  # read back from its tokens, as it could at best be recovered
    recovered: str
    tokens: int  # of the reference
    token_accuracy: float
    token_f1: float
    exact_match: float
    rouge_l: float
    cosine: float
    forward_passes: int
    encoder_calls: int
    seconds: float  # its share of its batch's
    unknown: int = 0  # tokens of the reference that stand for what the vocabulary cannot write
    believed_exact: bool | None = None  # by a search
    likeness: float | None = None  # the model's own guess of the cosine, if it made one
    personal: list[dict[str, Any]] = field(default_factory=list)  # kind, text, whether recovered


@dataclass(frozen=True)
class Records:
    """A file of records, read."""

    path: Path
    header: dict[str, Any]
    rows: list[Row]
    resumed: list[dict[str, Any]]  # versions and hardware of each time the run was gone on with
    summary: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any]:
        """What was to be done."""
        return self.header["settings"]

    @property
    def methods(self) -> list[Method]:
        """The ways that were measured, in order."""
        return [Method(**each) for each in self.settings["methods"]]

    @property
    def expected(self) -> int:
        """How many rows a finished file has."""
        return len(self.methods) * sum(suite["texts"] for suite in self.settings["suites"])


def read_records(path: str | Path) -> Records:
    """Read a file of records, finished or not."""
    path = Path(path)
    if not path.is_file():
        raise UnembedError(f"there is no file {path}; give the records that `unembed evaluate -o` wrote.")
    records, _ = _parse(path)
    if records is None:
        raise UnembedError(f"{path} holds no records; give a file that `unembed evaluate -o` wrote.")
    return records


class RecordFile:
    """A file of records that is being written, by one process at a time."""

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        """Start a file, or take up one whose settings are the same."""
        self.path, self._header = Path(path), header
        if self.path.exists() and not self.path.is_file():
            kind = "a folder" if self.path.is_dir() else "no file that can be gone on with"
            raise UnembedError(f"{self.path} is {kind}; give the name of a file for the records.")
        if not self.path.exists() or _parse(self.path)[0] is None:
            if self.path.exists() and self.path.stat().st_size and not _is_torn_header(self.path):
                raise UnembedError(f"{self.path} exists and holds no records; choose another file.")
            write_whole(self.path, _line("header", header))
        with contextlib.ExitStack() as held:
            held.enter_context(alone(self.path))
            known, self._ends = _parse(self.path)
            assert known is not None
            check_settings(self.path, known.settings, header["settings"])
            self._held = held.pop_all()  # where all was well, until the end
        self.known = known

    def __enter__(self) -> RecordFile:
        """Hold the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let others write to it."""
        self._held.close()

    def keep(self, count: int) -> None:
        """Keep the first rows only, and what stands before them; note that the run goes on from there."""
        with self.path.open("r+b") as file:
            file.truncate(self._ends[count])
        if count:
            facts = {key: self._header[key] for key in ("versions", "hardware", "started")}
            self._append(_line("resumed", {"rows": count, **facts}))

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows, all in one write."""
        self._append("".join(_line("text", asdict(row)) for row in rows))

    def finish(self, summary: dict[str, Any]) -> None:
        """Append the summary."""
        self._append(_line("summary", summary))

    def _append(self, text: str) -> None:
        """Write to the end of the file, and to the disk."""
        try:
            with self.path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnembedError(
                f"could not write {self.path}: {(error.strerror or str(error)).lower()}; "
                "what was there is kept, run the same command again to go on."
            ) from error


def check_settings(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to add to a file that was begun with other settings."""
    # Through JSON, because a tuple comes back from a file as a list.
    before, now = _filled(before), _filled(json.loads(json.dumps(now)))
    if _shown(before["methods"]) == _shown(now["methods"]):
        before, now = _spread(before), _spread(now)
    changes = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changes:
        shown = "; ".join(f"{key} {_shown(before.get(key))}, now {_shown(now.get(key))}" for key in changes)
        raise UnembedError(
            f"{path} was begun with other settings ({shown}); choose another file, or delete this one to "
            "start anew."
        )


def _filled(settings: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a version that did not know a setting of methods has not written of them."""
    usual = asdict(Method("", ""))
    return settings | {"methods": [usual | each for each in settings.get("methods", [])]}


def _spread(settings: dict[str, Any]) -> dict[str, Any]:
    """Make each setting of each method one of its own, so that it is named if it alone has changed."""
    each = {f"{m['name']}'s {key}": value for m in settings["methods"] for key, value in m.items()}
    return settings | {"methods": None} | each


def _shown(value: Any) -> str:
    """Show a setting in a message: lists of methods or suites by their names."""
    if isinstance(value, list):
        return ", ".join(_shown(each) for each in value) or "none"
    if isinstance(value, dict):
        named = value.get("name", "")
        return f"{named} ({value['sha256'][:8]})" if "sha256" in value else named or json.dumps(value)
    return repr(value)[:60]


def _line(kind: str, content: dict[str, Any]) -> str:
    """Make a line of JSON."""
    return json.dumps({"record": kind, **content}, ensure_ascii=False) + "\n"


def _parse(path: Path) -> tuple[Records | None, list[int]]:
    """Read a file, dropping a torn last line; and where each count of rows ends, in bytes.

    Nothing is returned for a file whose first line is not a header.
    """
    lines = _contents(path)
    position, content = next(lines, (0, {}))
    header = _check_header(path, content)
    if header is None:
        return None, []
    summary: dict[str, Any] | None = None
    rows: list[Row] = []
    resumed: list[dict[str, Any]] = []
    ends = [position]
    for number, (position, content) in enumerate(lines, 2):
        kind = content.pop("record", None)
        if kind == "text":
            rows.append(_row(path, number, content))
            ends.append(position)
        elif kind == "resumed":
            resumed.append(content)
            ends[-1] = position
        elif kind == "summary":
            summary = content
    return Records(path, header, rows, resumed, summary), ends


def _contents(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read whole lines, each with the place in bytes where it ends; a file of something else has none."""
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            position += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                content = json.loads(line)
            except ValueError as error:
                if number == 1:
                    return
                raise UnembedError(
                    f"{path}, line {number} is damaged ({error}); restore the file, or delete that line and "
                    "what follows."
                ) from error
            if not isinstance(content, dict):
                return
            yield position, content


def _check_header(path: Path, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return a header that this version can read, None if it is none at all."""
    if content.pop("record", None) != "header" or "settings" not in content:
        return None
    if content.get("format") != FORMAT:
        raise UnembedError(
            f"{path} is of format {content.get('format')}, expected {FORMAT}; evaluate again with this "
            "version of unembed."
        )
    return content


def _row(path: Path, number: int, content: dict[str, Any]) -> Row:
    """Make a row of a line's content; fields that a later version may add are passed over."""
    known = {f.name for f in fields(Row)}
    try:
        return Row(**{key: value for key, value in content.items() if key in known})
    except TypeError as error:
        raise UnembedError(f"{path}, line {number} is not a whole record ({error}).") from error


def _is_torn_header(path: Path) -> bool:
    """Whether a file holds no more than the beginning of a header."""
    content, start = path.read_bytes(), b'{"record": "header"'
    return b"\n" not in content and start.startswith(content[: len(start)])
