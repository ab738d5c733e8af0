"""Text files and streams -> shards of ids and vectors with a manifest, and back.

Knows files, tokenizers and encoders as objects that turn text into ids and vectors. Must not know
how a batch is drawn, nor any model. A folder is written shard by shard, each file under a temporary
name first and the manifest last, so a run may be killed at any moment and started again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import numpy as np

from unembed.errors import UnembedError, unknown_name
from unembed.tokens import TextTokenizer

if TYPE_CHECKING:
    from unembed.encoders import Encoder

Kind = Literal["pairs", "passages"]

FORMAT = 1
MANIFEST = "manifest.json"
ENDINGS = (".txt", ".txt.gz", ".txt.xz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
# The ten languages of the paper's table 2.
LANGUAGES = ("en", "zh", "de", "ja", "fr", "es", "ko", "ru", "ar", "pt")
# Texts taken from the source at once: enough to keep the tokenizer's threads busy, few enough
# for the progress bar to move while a slow encoder works.
CHUNK = {"pairs": 2048, "passages": 16384}
FILES = {"pairs": ("ids", "vectors"), "passages": ("tokens", "offsets")}
# What must not change between the runs that fill one folder.
SETTINGS = (
    *("kind", "encoder", "embedding_size", "max_tokens", "min_tokens", "shard_size"),
    *("vocab_size", "mask_id", "end_id", "pad_id", "tokenizer", "sources"),
)


def read_texts(paths: str | Path | Iterable[str | Path], *, field: str = "text") -> Iterator[str]:
    """Read texts lazily: a line of a text file, or `field` of a JSON line or a Parquet row.

    A path `-` is standard input, one text a line. Blank texts are left out. Missing files and
    unknown endings are errors at once, bad content when it is reached.
    """
    names = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not names:
        raise UnembedError(f"no file to read; give one or more of {', '.join(ENDINGS)}, or - for stdin.")
    readers = [(name, _reader(name)) for name in names]
    return (text for name, read in readers for text in _nonempty(name, read(name, field)))


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
    streams = []
    for language in ["en"] if kind == "c4" else languages:
        # datasets and the hub raise a dozen unrelated types for one thing: it cannot be had.
        try:
            stream = datasets.load_dataset("allenai/c4", language, split="train", streaming=True)
        except Exception as error:
            raise _unreachable(spec, language, error) from error
        streams.append((language, iter(stream)))
    return _in_turn(spec, streams)


def prepare(
    sources: Iterable[str],
    *,
    encoder: Encoder | str,
    out: str | Path,
    tokenizer: TextTokenizer | None = None,
    max_tokens: int = 32,
    min_tokens: int = 1,
    kind: Kind = "pairs",
    limit: int | None = None,
    shard_size: int = 65_536,
    batch_size: int = 256,
    source_names: Sequence[str | Path] = (),
    show_progress: bool = False,
) -> PreparedData:
    """Turn texts into a folder of shards for training; run again, it goes on where it was stopped.

    Args:
        sources: the texts, in the same order at every run.
        encoder: what embeds them; for passages, which hold no vectors, its name will do.
        out: the folder, which is made.
        tokenizer: the vocabulary, where the encoder does not bring its own.
        max_tokens: longest text; pairs are cut to it and embedded as cut, passages stay whole.
        min_tokens: texts of fewer tokens are left out.
        kind: `pairs` of ids and vectors, or `passages` to cut spans from while training.
        limit: texts to keep at most; a larger limit later adds to the folder.
        shard_size: texts a shard; what is lost at most when a run is killed.
        batch_size: texts the encoder takes at once.
        source_names: where the texts come from, for the manifest; files are named with their hash.
        show_progress: draw a bar on stderr.
    """
    _check_request(
        kind,
        encoder,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        shard_size=shard_size,
        batch_size=batch_size,
        limit=1 if limit is None else limit,
    )
    tokenizer = tokenizer or getattr(encoder, "tokenizer", None)
    if tokenizer is None:
        raise UnembedError(
            f"the encoder {_name(encoder)!r} brings no tokenizer; pass tokenizer= to say which vocabulary "
            "the texts are to be written in."
        )
    sizes = {"max_tokens": max_tokens, "min_tokens": min_tokens, "shard_size": shard_size}
    settings = _settings(kind, encoder, tokenizer, sizes, source_names)
    folder = Path(out)
    shards, finished = _resume(folder, settings, limit=limit)
    if finished:
        return PreparedData.open(folder)
    tokenizer.save(folder)
    make: Callable[[list[str]], _Rows]
    if kind == "passages":
        make = partial(_passages, tokenizer=tokenizer, min_tokens=min_tokens)
    else:
        make = partial(
            _pairs,
            tokenizer=tokenizer,
            encoder=cast("Encoder", encoder),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            batch_size=batch_size,
        )

    texts = iter(sources)
    read = shards[-1]["read"] if shards else 0  # texts, those left out included
    done = sum(shard["count"] for shard in shards)
    exhausted = False
    _skip(texts, read, folder)
    with _progress(show_progress, done=done, total=limit) as advance:
        while not exhausted and (limit is None or done < limit):
            wanted = shard_size if limit is None else min(shard_size, limit - done)
            rows, taken = _fill(texts, make, wanted=wanted, chunk=CHUNK[kind], advance=advance)
            exhausted = rows.count < wanted
            read += taken
            done += rows.count
            if rows.count:
                shards.append(_write_shard(folder, len(shards), rows, kind=kind, read=read))
            if not done:
                named = _listed(settings["sources"])
                raise UnembedError(
                    f"no text of at least {min_tokens} tokens in {named}; give files with text."
                )
            complete = exhausted or done == limit
            _write_manifest(folder, settings, shards, exhausted=exhausted, complete=complete)
    return PreparedData.open(folder)


class PreparedData:
    """A folder that `prepare` wrote, memory-mapped."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """Use `PreparedData.open`, which checks what it finds."""
        self.path = path
        self.manifest = manifest
        self.kind: Kind = manifest["kind"]
        self.encoder_name: str = manifest["encoder"]
        self.embedding_size: int = manifest["embedding_size"]  # 0 where only the encoder's name was known
        self.max_tokens: int = manifest["max_tokens"]
        self.count: int = manifest["count"]
        self.complete: bool = manifest["complete"]  # False while a run has yet to be finished
        sizes = [shard["count"] for shard in manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._arrays = {
            file: [self._map(shard, file) for shard in manifest["shards"]] for file in self._files
        }
        self._check_shapes()

    @staticmethod
    def open(path: str | Path) -> PreparedData:
        """Open a prepared folder; a damaged or unfinished one is an error that says what to do."""
        folder = Path(path)
        manifest = _read_manifest(folder)
        if not manifest["shards"]:
            raise UnembedError(
                f"{folder} holds no finished shard yet; run the same preparation again to go on."
            )
        return PreparedData(folder, manifest)

    def __len__(self) -> int:
        """Count the texts."""
        return self.count

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The vocabulary of the ids."""
        return TextTokenizer.load(self.path)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids of some pairs: (len(rows), max_tokens) int64."""
        return self._gather("ids", rows, np.int64)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of some pairs: (len(rows), embedding_size) float32."""
        return self._gather("vectors", rows, np.float32)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids of all passages, one after the other: uint16 or uint32."""
        self._require("passages", "tokens")
        return np.concatenate(self._arrays["tokens"])

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each passage begins in `tokens`, and the end: (count + 1,) int64."""
        self._require("passages", "offsets")
        parts, base = [np.zeros(1, dtype=np.int64)], 0
        for offsets in self._arrays["offsets"]:
            parts.append(offsets[1:] + base)
            base += int(offsets[-1])
        return np.concatenate(parts)

    def verify(self) -> None:
        """Check every file against the hash in the manifest."""
        expected = {"tokenizer.json": self.manifest["tokenizer"]}
        for shard in self.manifest["shards"]:
            expected |= shard["sha256"]
        for name, digest in expected.items():
            if not (self.path / name).is_file() or _sha256(self.path / name) != digest:
                raise UnembedError(
                    f"{self.path / name} is not the file that was written (its hash differs); "
                    "prepare the data again in another folder."
                )

    @property
    def _files(self) -> tuple[str, str]:
        """The two arrays of a shard."""
        return FILES[self.kind]

    def _map(self, shard: dict[str, Any], file: str) -> np.ndarray:
        """Map one array of a shard into memory."""
        path = self.path / _file(shard["name"], file)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UnembedError(
                f"{path} is missing or damaged ({error}); prepare the data again in another folder."
            ) from error

    def _check_shapes(self) -> None:
        """Raise where an array is not of the shape the manifest promises."""
        for k, shard in enumerate(self.manifest["shards"]):
            n, first, second = shard["count"], *(self._arrays[file][k] for file in self._files)
            if self.kind == "pairs":
                good = first.shape == (n, self.max_tokens) and second.shape == (n, self.embedding_size)
            else:
                good = second.shape == (n + 1,) and first.shape == (int(second[-1]),)
            if not good:
                raise UnembedError(
                    f"shard {shard['name']} of {self.path} is not of the shape its manifest says; "
                    "prepare the data again in another folder."
                )

    def _gather(self, file: str, rows: np.ndarray, dtype: type) -> np.ndarray:
        """Collect rows of an array across the shards."""
        self._require("pairs", file)
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise UnembedError(f"rows must lie between 0 and {self.count - 1} in {self.path}.")
        arrays = self._arrays[file]
        result: np.ndarray = np.empty((len(rows), arrays[0].shape[1]), dtype=dtype)
        home = np.searchsorted(self._starts, rows, side="right") - 1
        for k in np.unique(home):
            here = home == k
            result[here] = arrays[k][rows[here] - self._starts[k]]
        return result

    def _require(self, kind: Kind, what: str) -> None:
        """Raise where data of the other kind is asked for."""
        if self.kind != kind:
            raise UnembedError(
                f"{self.path} holds {self.kind}, which have no {what}; prepare {kind} instead."
            )


# --- reading --------------------------------------------------------------------------------------


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


def _nonempty(name: str, texts: Iterator[str]) -> Iterator[str]:
    """Pass on the texts that are not blank; a source without any is an error."""
    found = False
    for text in texts:
        if text := text.strip():
            found = True
            yield text
    if not found:
        raise UnembedError(f"{_shown(name)} is empty; expected at least one text.")


def _lines(name: str) -> Iterator[tuple[int, str]]:
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


def _read_lines(name: str, field: str) -> Iterator[str]:
    """Read a text file: a text a line. The field has no meaning here."""
    return (line for _, line in _lines(name))


def _read_jsonl(name: str, field: str) -> Iterator[str]:
    """Read a field of each JSON line."""
    for number, line in _lines(name):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UnembedError(
                f"{name}, line {number} is not JSON ({error}); expected an object a line."
            ) from error
        if not isinstance(record, dict):
            raise UnembedError(f"{name}, line {number} is not a JSON object; expected an object a line.")
        if field not in record:
            raise UnembedError(
                f"{name}, line {number} has no field {field!r}; it has {', '.join(record) or 'none'}; "
                "choose one of them."
            )
        if not isinstance(record[field], str):
            raise UnembedError(
                f"{name}, line {number}: field {field!r} is not a string; choose another field."
            )
        # JSON can escape half of a surrogate pair, which no tokenizer takes.
        yield record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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


def _in_turn(spec: str, streams: list[tuple[str, Iterator[Any]]]) -> Iterator[str]:
    """Take one text of each stream in turn; a stream that ends drops out."""
    while streams:
        for language, stream in list(streams):
            try:
                record = next(stream)
            except StopIteration:
                streams = [pair for pair in streams if pair[1] is not stream]
                continue
            except Exception as error:
                raise _unreachable(spec, language, error) from error
            yield record["text"]


def _unreachable(spec: str, language: str, error: Exception) -> UnembedError:
    """Build the error for a dataset that cannot be had."""
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return UnembedError(
        f"cannot stream {spec} ({language}) from the hub: {reason}; check the network and the language, "
        "then run again, or use local files."
    )


def _shown(name: str) -> str:
    """Name a source in a message."""
    return "standard input" if name == "-" else name


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Rows of a shard: (ids, vectors) or (tokens, lengths)."""

    first: np.ndarray
    second: np.ndarray
    count: int
    truncated: int


def _pairs(
    texts: list[str],
    tokenizer: TextTokenizer,
    encoder: Encoder,
    *,
    max_tokens: int,
    min_tokens: int,
    batch_size: int,
) -> _Rows:
    """Tokenise texts and embed them as cut."""
    encoded = tokenizer.encode(texts, max_tokens=max_tokens, allow_empty=True)
    keep = np.flatnonzero(encoded.lengths >= min(min_tokens, max_tokens))
    cut = [encoded.texts[i] for i in keep]
    vectors = np.empty((0, encoder.size), dtype=np.float16)
    if cut:
        raw = np.asarray(encoder.encode(cut, batch_size=batch_size))
        if raw.shape != (len(cut), encoder.size):
            raise UnembedError(
                f"the encoder {encoder.name!r} returned shape {raw.shape}; "
                f"expected {(len(cut), encoder.size)}; check its size."
            )
        with np.errstate(over="ignore"):
            vectors = raw.astype(np.float16)
        if not np.isfinite(vectors).all():
            index = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise UnembedError(
                f"the encoder {encoder.name!r} returned NaN, or a number too large for 16 bits, "
                f"for {cut[index][:60]!r}; check the encoder's precision."
            )
    ids = encoded.ids[keep].astype(_id_type(tokenizer))
    return _Rows(ids, vectors, len(cut), int(encoded.truncated[keep].sum()))


def _passages(texts: list[str], tokenizer: TextTokenizer, *, min_tokens: int) -> _Rows:
    """Tokenise texts, whole."""
    spans = [span for span in tokenizer.spans(texts) if len(span) >= min_tokens]
    flat = np.concatenate([np.empty(0, dtype=np.int64), *spans]).astype(_id_type(tokenizer))
    lengths = np.fromiter(map(len, spans), dtype=np.int64, count=len(spans))
    return _Rows(flat, lengths, len(spans), 0)


def _check_request(kind: str, encoder: Encoder | str, **numbers: int) -> None:
    """Raise on what cannot be prepared, before anything is written."""
    if kind not in FILES:
        raise unknown_name("kind", kind, FILES)
    for name, value in numbers.items():
        if value < 1:
            raise UnembedError(f"{name} must be at least 1, not {value}.")
    if kind == "pairs" and isinstance(encoder, str):
        raise UnembedError(f"pairs need the encoder itself, not its name; pass load_encoder({encoder!r}).")


def _settings(
    kind: Kind,
    encoder: Encoder | str,
    tokenizer: TextTokenizer,
    sizes: dict[str, int],
    source_names: Sequence[str | Path],
) -> dict[str, Any]:
    """Collect what the manifest says of a run, in the order of `SETTINGS`."""
    return {
        "kind": kind,
        "encoder": _name(encoder),
        "embedding_size": int(getattr(encoder, "size", 0)),
        **sizes,
        "vocab_size": tokenizer.size,
        "mask_id": tokenizer.mask_id,
        "end_id": tokenizer.end_id,
        "pad_id": tokenizer.pad_id,
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "sources": [_describe(source) for source in source_names],
    }


def _fill(
    texts: Iterator[str],
    make: Callable[[list[str]], _Rows],
    *,
    wanted: int,
    chunk: int,
    advance: Callable[[int], None],
) -> tuple[_Rows, int]:
    """Read until `wanted` rows are made or the source ends; return them and the texts read."""
    parts: list[_Rows] = []
    count = read = 0
    while count < wanted and (taken := list(islice(texts, min(chunk, wanted - count)))):
        part = make(taken)
        parts.append(part)
        read += len(taken)
        count += part.count
        advance(part.count)
    if not count:
        return _Rows(np.empty(0), np.empty(0), 0, 0), read
    first = np.concatenate([part.first for part in parts])
    second = np.concatenate([part.second for part in parts])
    return _Rows(first, second, count, sum(part.truncated for part in parts)), read


def _skip(texts: Iterator[str], count: int, folder: Path) -> None:
    """Step over the texts that finished shards were made of."""
    if sum(1 for _ in islice(texts, count)) < count:
        raise UnembedError(
            f"the source ends before the {count} texts that {folder} was made of; "
            "give the same source, or choose another folder."
        )


def _id_type(tokenizer: TextTokenizer) -> type[np.unsignedinteger]:
    """Choose the smallest type that holds every id."""
    return np.uint16 if tokenizer.size <= 65_536 else np.uint32


def _name(encoder: Encoder | str) -> str:
    """Name an encoder that may be just a name."""
    return encoder if isinstance(encoder, str) else encoder.name


@contextlib.contextmanager
def _progress(show: bool, *, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr, where wanted; yield what moves it."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("texts", total=total, completed=done)
        yield lambda count: bar.advance(task, count)


# --- the folder -----------------------------------------------------------------------------------


def _resume(
    folder: Path, settings: dict[str, Any], *, limit: int | None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the shards to keep in a new or started folder, and whether nothing is left to do."""
    if not (folder / MANIFEST).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UnembedError(
                f"{folder} exists and is not a prepared folder; choose another or an empty one."
            )
        folder.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, settings, [], exhausted=False, complete=False)
        return [], False

    manifest = _read_manifest(folder)
    if differing := [key for key in SETTINGS if manifest[key] != settings[key]]:
        changes = "; ".join(_change(key, manifest[key], settings[key]) for key in differing)
        raise UnembedError(f"{folder} was prepared with other settings ({changes}); choose another folder.")
    PreparedData(folder, manifest)  # its shards are there and whole
    if limit is not None and limit < manifest["count"]:
        raise UnembedError(
            f"{folder} already holds {manifest['count']} texts, more than the limit {limit}; "
            "raise the limit or choose another folder."
        )
    if manifest["complete"] and (manifest["exhausted"] or limit == manifest["count"]):
        return manifest["shards"], True
    shards = manifest["shards"]
    if shards and shards[-1]["count"] < settings["shard_size"]:
        # The end of a shorter run is made again, so that shards are as if there had been one run.
        shards = shards[:-1]
        _write_manifest(folder, settings, shards, exhausted=False, complete=False)
    return shards, False


def _change(key: str, before: Any, now: Any) -> str:
    """Say how one setting differs."""
    if key == "sources":
        return f"sources {_listed(before)}, now {_listed(now)}"
    if key == "tokenizer":
        return "another tokenizer"
    return f"{key} {before!r}, now {now!r}"


def _listed(sources: list[dict[str, Any]]) -> str:
    """Name sources in a message, with their sizes, which may be all that differs."""
    named = [s["name"] + (f" of {s['bytes']} bytes" if "bytes" in s else "") for s in sources]
    return ", ".join(named) or "the source"


def _describe(source: str | Path) -> dict[str, Any]:
    """Describe a source for the manifest: by name, and a file by size and hash too."""
    path = Path(source)
    if not path.is_file():
        return {"name": str(source)}
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_shard(folder: Path, index: int, rows: _Rows, *, kind: Kind, read: int) -> dict[str, Any]:
    """Write the two arrays of a shard and return its entry in the manifest."""
    name = f"{index:05d}"
    second = rows.second
    if kind == "passages":
        second = np.concatenate([[0], np.cumsum(rows.second)]).astype(np.int64)
    hashes = {}
    for file, array in zip(FILES[kind], (rows.first, second), strict=True):
        target = folder / _file(name, file)
        with _replacing(target) as out:
            np.save(out, array, allow_pickle=False)
        hashes[target.name] = _sha256(target)
    return {"name": name, "count": rows.count, "truncated": rows.truncated, "read": read, "sha256": hashes}


def _write_manifest(
    folder: Path, settings: dict[str, Any], shards: list[dict[str, Any]], *, exhausted: bool, complete: bool
) -> None:
    """Replace the manifest in one step."""
    manifest = {
        "format": FORMAT,
        **settings,
        "count": sum(shard["count"] for shard in shards),
        "truncated": sum(shard["truncated"] for shard in shards),
        "complete": complete,
        "exhausted": exhausted,
        "shards": shards,
    }
    with _replacing(folder / MANIFEST) as out:
        out.write((json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a manifest."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnembedError(
            f"no {MANIFEST} in {folder}; expected a folder that unembed prepared; check the path."
        ) from error
    except ValueError as error:
        raise UnembedError(f"{path} is not JSON ({error}); prepare the data again.") from error
    try:
        if manifest["format"] != FORMAT:
            raise UnembedError(
                f"{path} is of format {manifest['format']}, expected {FORMAT}; prepare the data again."
            )
        missing = {*SETTINGS, "count", "truncated", "complete", "exhausted"} - manifest.keys()
        shards = manifest["shards"]
        # A name becomes a path: digits only.
        files = FILES[manifest["kind"]]
        named = all(re.fullmatch(r"\d{5,}", shard["name"]) for shard in shards)
        hashed = all(set(s["sha256"]) == {_file(s["name"], file) for file in files} for s in shards)
        counted = sum(shard["count"] for shard in shards) == manifest["count"]
        good = not missing and named and hashed and counted
    except (KeyError, TypeError, AttributeError) as error:
        raise UnembedError(
            f"{path} is not a manifest of prepared data ({error}); prepare it again."
        ) from error
    if not good:
        raise UnembedError(f"{path} is damaged; prepare the data again in another folder.")
    return manifest


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file under a temporary name and give it its own when it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _file(shard: str, file: str) -> str:
    """Name an array of a shard."""
    return f"{shard}.{file}.npy"


def _sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
