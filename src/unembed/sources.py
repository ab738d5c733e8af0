"""Where text comes from: text, JSON and Parquet files, standard input, datasets of the hub.

Knows file formats and gives plain strings, lazily and in a fixed order. Must not know tokens, vectors
or what the texts are for. pyarrow and datasets are imported when a source needs them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from unembed.errors import UnembedError, first_line

ENDINGS = (".txt", ".txt.gz", ".txt.xz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
# The ten languages of the paper's table 2.
LANGUAGES = ("en", "zh", "de", "ja", "fr", "es", "ko", "ru", "ar", "pt")


def read_texts(
    paths: str | Path | Iterable[str | Path],
    *,
    field: str = "text",
    on_blank: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Read texts lazily: a line of a text file, or `field` of a JSON line or a Parquet row.

    A path `-` is standard input, one text a line. Blank texts are left out, and given to `on_blank`.
    Missing files and unknown endings are errors at once, bad content when it is reached.
    """
    names = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not names:
        raise UnembedError(f"no file to read; give one or more of {', '.join(ENDINGS)}, or - for stdin.")
    readers = [(name, _reader(name)) for name in names]
    return (text for name, read in readers for text in _nonempty(name, read(name, field), on_blank))


def stream_dataset(spec: str) -> Iterator[str]:
    """Stream texts of C4 (`c4`) or of languages of mC4 in turn (`mc4`, `mc4:en,zh`) from the hub."""
    kind, _, listed = spec.partition(":")
    languages = [language.strip() for language in listed.split(",")] if listed else list(LANGUAGES)
    if kind not in ("c4", "mc4") or (kind == "c4" and listed) or not all(languages):
        raise UnembedError(f"unknown dataset {spec!r}; expected c4, mc4, or mc4: and languages (mc4:en,zh).")
    try:
        import datasets
    except ImportError as error:
        raise UnembedError(
            f"{spec} needs the package datasets; install it with: pip install 'unembed[data]'."
        ) from error
    streams = {}
    for language in ["en"] if kind == "c4" else languages:
        with _reaching(spec, language):
            stream = datasets.load_dataset("allenai/c4", language, split="train", streaming=True)
            streams[language] = iter(stream)
    return _in_turn(spec, streams)


# --- files ----------------------------------------------------------------------------------------


def _reader(name: str) -> Callable[[str, str], Iterator[str]]:
    """Choose how to read a file by its ending, and check that it is there."""
    if name == "-":
        return _read_lines
    ending = next((e for e in ENDINGS if name.lower().endswith(e)), None)
    if not Path(name).exists():
        raise UnembedError(f"there is no file {name}; check the path.")
    if ending is None or not Path(name).is_file():
        raise UnembedError(f"cannot read {name}; expected a file ending in {', '.join(ENDINGS)}.")
    if ending == ".parquet":
        return _read_parquet
    return _read_jsonl if ending.startswith(".jsonl") else _read_lines


def _nonempty(name: str, texts: Iterator[str], on_blank: Callable[[str], object] | None) -> Iterator[str]:
    """Pass on the texts that are not blank; a source without any is an error."""
    found = False
    for text in texts:
        if text := text.strip():
            found = True
            yield text
        elif on_blank is not None:
            on_blank(text)
    if not found:
        raise UnembedError(f"{_shown(name)} is empty; expected at least one text.")


def _read_lines(name: str, field: str) -> Iterator[str]:
    """Read a text file: a text a line. The field has no meaning here."""
    return (line for _, line in _numbered_lines(name))


def _read_jsonl(name: str, field: str) -> Iterator[str]:
    """Read a field of each JSON line; a blank line is a blank text."""
    return (text_field(record, field, at) if record is not None else "" for at, record in _read_json(name))


def read_objects(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the JSON objects of a file, one a line, each with its place, to be named in a message."""
    return ((place, record) for place, record in _read_json(name) if record is not None)


def _read_json(name: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Read the JSON object of each line, None where it is blank."""
    for number, line in _numbered_lines(name):
        place = f"{name}, line {number}"
        if not line.strip():
            yield place, None
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UnembedError(f"{place} is not JSON ({error}); expected an object a line.") from error
        if not isinstance(record, dict):
            raise UnembedError(f"{place} is not a JSON object; expected an object a line.")
        yield place, record


def text_field(record: dict[str, Any], field: str, place: str) -> str:
    """Take a string out of a JSON object."""
    if field not in record:
        fields = ", ".join(record) or "none"
        raise UnembedError(f"{place} has no field {field!r}; it has {fields}; choose one of them.")
    if not isinstance(record[field], str):
        raise UnembedError(f"{place}: field {field!r} is not a string; choose another field.")
    # JSON can escape half of a surrogate pair, which no tokenizer takes.
    return record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_parquet(name: str, field: str) -> Iterator[str]:
    """Read a column of a Parquet file, batch by batch."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnembedError(
            f"{name} needs the package pyarrow; install it with: pip install 'unembed[data]'."
        ) from error
    try:
        with parquet.ParquetFile(name) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise UnembedError(
                    f"{name} has no column {field!r}; it has {', '.join(columns)}; choose one of them."
                )
            for batch in file.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise UnembedError(
                            f"column {field!r} of {name} does not hold strings; choose another column."
                        )
                    yield text or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise UnembedError(f"{name} is not a Parquet file ({error}); check the file.") from error


def _numbered_lines(name: str) -> Iterator[tuple[int, str]]:
    """Read the numbered lines of a file that may be compressed."""
    openers: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open}  # type: ignore[dict-item]
    try:
        if name == "-":
            source: Any = contextlib.nullcontext(sys.stdin.buffer)
        else:
            source = openers.get(Path(name).suffix.lower(), open)(name, "rb")
        with source as file:
            for number, line in enumerate(file, start=1):
                # A zero byte is valid UTF-8 but in no text: this is UTF-16 or a binary file.
                if b"\0" in line:
                    raise UnicodeDecodeError("utf-8", line, 0, 1, "zero byte")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UnembedError(
            f"{_shown(name)} is not UTF-8 text (line {number}: {error.reason}); convert it first."
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UnembedError(
            f"{name} is not a whole compressed file ({error}); fetch or compress it again."
        ) from error
    except OSError as error:
        raise UnembedError(f"cannot read {name} ({error.strerror or error}); check the file.") from error


def _shown(name: str) -> str:
    """Name a source in a message."""
    return "standard input" if name == "-" else name


# --- the hub --------------------------------------------------------------------------------------


def _in_turn(spec: str, streams: dict[str, Iterator[Any]]) -> Iterator[str]:
    """Take one text of each stream in turn; a stream that ends drops out."""
    while streams:
        for language in list(streams):
            with _reaching(spec, language):
                record = next(streams[language], None)
            if record is None:
                del streams[language]
            else:
                yield record["text"]


@contextlib.contextmanager
def _reaching(spec: str, language: str) -> Iterator[None]:
    """Say in one sentence that a dataset cannot be had; the libraries raise a dozen unrelated types."""
    try:
        yield
    except Exception as error:
        raise UnembedError(
            f"cannot stream {spec} ({language}) from the hub: {first_line(error)}; "
            "check the network and the language, then run again, or use local files."
        ) from error
