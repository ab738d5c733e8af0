"""Texts -> a folder of ids and vectors to train on, and back.

Knows tokenizers and encoders as objects that turn text into ids and vectors. Must not know where the
texts come from, how a batch is drawn, nor any model. A folder is written shard by shard, the manifest
last, so a run may be killed at any moment and started again; one that is stopped writes what it has.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unembed.errors import UnembedError, unknown_name
from unembed.logbook import alone, progress
from unembed.shards import (
    ARRAYS,
    MANIFEST,
    PARTIAL,
    SETTINGS,
    Kind,
    file_hash,
    map_shard,
    read_manifest,
    write_manifest,
    write_shard,
)
from unembed.tokens import TextTokenizer

if TYPE_CHECKING:
    from unembed.encoders import Encoder

# Texts taken from the source at once: enough to keep the tokenizer's threads busy, few enough
# for the progress bar to move while a slow encoder works.
CHUNK = {"pairs": 2048, "passages": 16384}


# --- writing --------------------------------------------------------------------------------------


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
        shard_size: texts a shard; what is lost at most when a run is killed outright.
        batch_size: texts the encoder takes at once.
        source_names: where the texts come from, for the manifest; files are named with their hash.
        show_progress: draw a bar on stderr.
    """
    goal = sys.maxsize if limit is None else limit
    sizes = {"max_tokens": max_tokens, "min_tokens": min_tokens, "shard_size": shard_size}
    for name, value in {**sizes, "batch_size": batch_size, "limit": goal}.items():
        if value < 1:
            raise UnembedError(f"{name} must be at least 1, not {value}.")
    if kind not in ARRAYS:
        raise unknown_name("kind", kind, ARRAYS)
    if kind == "pairs" and isinstance(encoder, str):
        raise UnembedError(f"pairs need the encoder itself, not its name; pass load_encoder({encoder!r}).")
    encoder_name = encoder if isinstance(encoder, str) else encoder.name
    tokenizer = tokenizer or getattr(encoder, "tokenizer", None)
    if tokenizer is None:
        raise UnembedError(
            f"the encoder {encoder_name!r} brings no tokenizer; pass tokenizer= to say which vocabulary "
            "the texts are to be written in."
        )
    settings: dict[str, Any] = {
        "kind": kind,
        "encoder": encoder_name,
        "embedding_size": int(getattr(encoder, "size", 0)),
        **sizes,
        "vocab_size": tokenizer.size,
        "mask_id": tokenizer.mask_id,
        "end_id": tokenizer.end_id,
        "pad_id": tokenizer.pad_id,
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "sources": [_describe(source) for source in source_names],
    }
    common: dict[str, Any] = {"tokenizer": tokenizer, "min_tokens": min_tokens}
    if kind == "passages" or isinstance(encoder, str):
        make = partial(_passages, **common)
    else:
        make = partial(_pairs, encoder=encoder, max_tokens=max_tokens, batch_size=batch_size, **common)
    folder = Path(out)
    if not folder.exists():
        folder.mkdir(parents=True)
    with alone(folder):
        shards, finished = _resume(folder, settings, goal=goal)
        if not finished:
            tokenizer.save(folder)
            with progress("texts", total=limit, done=_count(shards), show=show_progress) as advance:
                _add_shards(folder, settings, shards, iter(sources), make, goal=goal, advance=advance)
        return PreparedData.open(folder)


@dataclass(frozen=True)
class _Rows:
    """Rows of a shard: ids and vectors, or the tokens of all passages and how many each has."""

    first: np.ndarray
    second: np.ndarray
    read: int  # texts of the source they were made of, those that were left out counted
    truncated: int = 0


def _pairs(
    texts: list[str],
    *,
    tokenizer: TextTokenizer,
    encoder: Encoder,
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
    return _Rows(ids, vectors, len(texts), truncated=int(encoded.truncated[keep].sum()))


def _passages(texts: list[str], *, tokenizer: TextTokenizer, min_tokens: int) -> _Rows:
    """Tokenise texts, whole."""
    spans = [span for span in tokenizer.spans(texts) if len(span) >= min_tokens]
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *spans]).astype(_id_type(tokenizer))
    return _Rows(tokens, np.array([len(span) for span in spans], dtype=np.int64), len(texts))


def _id_type(tokenizer: TextTokenizer) -> type[np.unsignedinteger]:
    """Choose the smallest type that holds every id."""
    return np.uint16 if tokenizer.size <= 65_536 else np.uint32


def _add_shards(
    folder: Path,
    settings: dict[str, Any],
    shards: list[dict[str, Any]],
    texts: Iterator[str],
    make: Callable[[list[str]], _Rows],
    *,
    goal: int,
    advance: Callable[[int], None],
) -> None:
    """Write shards behind those there are, until there are `goal` texts or the source ends.

    Stopped half way, by Ctrl-C or an error, it writes the shard as far as it has come; the next run fills it.
    """
    read = shards[-1]["read"] if shards else 0
    if sum(1 for _ in islice(texts, read)) < read:
        raise UnembedError(
            f"the source ends before the {read} texts that {folder} was made of; "
            "give the same source, or choose another folder."
        )
    kind, size, exhausted = settings["kind"], settings["shard_size"], False
    parts: list[_Rows] = []
    if shards and shards[-1]["count"] < size:
        parts, shards = [_read_rows(folder, settings, shards)], shards[:-1]
    while not exhausted and _count(shards) < goal:
        wanted = min(size, goal - _count(shards))
        try:
            while missing := wanted - sum(len(part.second) for part in parts):
                if not (taken := list(islice(texts, min(CHUNK[kind], missing)))):
                    break
                parts.append(make(taken))
                advance(len(parts[-1].second))
            exhausted = missing > 0
            written = _write_rows(folder, settings, shards, parts, exhausted=exhausted)
        except BaseException:  # a writing that was torn is done once more
            _write_rows(folder, settings, shards, parts, exhausted=False)
            raise
        shards, parts = written, []
    if not shards:
        raise UnembedError(
            f"no text of at least {settings['min_tokens']} tokens in {_listed(settings['sources'])}; "
            "give files with text."
        )


def _count(shards: list[dict[str, Any]]) -> int:
    """Count the texts of shards."""
    return sum(shard["count"] for shard in shards)


def _write_rows(
    folder: Path,
    settings: dict[str, Any],
    shards: list[dict[str, Any]],
    parts: list[_Rows],
    *,
    exhausted: bool,
) -> list[dict[str, Any]]:
    """Write a shard of the rows gathered, if any, behind those there are; return all of them."""
    if any(len(part.second) for part in parts):
        first = np.concatenate([part.first for part in parts])
        second = np.concatenate([part.second for part in parts])
        facts = {
            "count": len(second),
            "truncated": sum(part.truncated for part in parts),
            "read": sum(part.read for part in parts) + (shards[-1]["read"] if shards else 0),
        }
        if settings["kind"] == "passages":
            second = np.concatenate([[0], np.cumsum(second)])
        # A file that the manifest lists is never written over.
        write_manifest(folder, settings, shards, exhausted=False)
        shard = write_shard(folder, (first, second), kind=settings["kind"], index=len(shards), **facts)
        shards = [*shards, shard]
    write_manifest(folder, settings, shards, exhausted=exhausted)
    return shards


def _read_rows(folder: Path, settings: dict[str, Any], shards: list[dict[str, Any]]) -> _Rows:
    """Read the rows of the last shard, to go on with it."""
    *before, last = shards
    first, second = map(np.array, map_shard(folder, settings, last))  # copies: the files will be replaced
    if settings["kind"] == "passages":
        second = np.diff(second)
    return _Rows(first, second, last["read"] - (before[-1]["read"] if before else 0), last["truncated"])


def _resume(folder: Path, settings: dict[str, Any], *, goal: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the shards to keep in a new or started folder, and whether nothing is left to do."""
    known = (folder / MANIFEST).exists()
    # A kill may have left a manifest that was not yet whole, and nothing else.
    if not known and (not folder.is_dir() or any(p.suffix != PARTIAL for p in folder.iterdir())):
        raise UnembedError(f"{folder} exists and is not a prepared folder; choose another or an empty one.")
    manifest = read_manifest(folder) if known else {"shards": []}
    shards = manifest["shards"]
    if shards:
        changes = [_change(k, manifest[k], settings[k]) for k in SETTINGS if manifest[k] != settings[k]]
        if changes:
            raise UnembedError(
                f"{folder} was prepared with other settings ({'; '.join(changes)}); choose another folder."
            )
        PreparedData(folder, manifest)  # its shards are there and whole
        if goal < manifest["count"]:
            raise UnembedError(
                f"{folder} already holds {manifest['count']} texts, more than the limit {goal}; "
                "raise the limit or choose another folder."
            )
        return shards, manifest["exhausted"] or goal == manifest["count"]
    # A folder without a shard is new, whatever its manifest says.
    write_manifest(folder, settings, [], exhausted=False)
    return [], False


def _change(key: str, before: Any, now: Any) -> str:
    """Say how one setting differs."""
    if key == "sources":
        return f"sources {_listed(before)}, now {_listed(now)}"
    return "another tokenizer" if key == "tokenizer" else f"{key} {before!r}, now {now!r}"


def _listed(sources: list[dict[str, Any]]) -> str:
    """Name sources in a message, with their sizes, which may be all that differs."""
    named = [s["name"] + (f" of {s['bytes']} bytes" if "bytes" in s else "") for s in sources]
    return ", ".join(named) or "the source"


def _describe(source: str | Path) -> dict[str, Any]:
    """Describe a source for the manifest: by name, and a file by size and hash too."""
    path = Path(source)
    if not path.is_file():
        return {"name": str(source)}
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}


# --- reading --------------------------------------------------------------------------------------


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
        self._starts = np.cumsum([0, *(shard["count"] for shard in manifest["shards"])], dtype=np.int64)
        self._shards = [map_shard(path, manifest, shard) for shard in manifest["shards"]]

    @staticmethod
    def open(path: str | Path) -> PreparedData:
        """Open a prepared folder; a damaged or unfinished one is an error that says what to do."""
        folder = Path(path)
        manifest = read_manifest(folder)
        if not manifest["shards"]:
            raise UnembedError(
                f"{folder} holds no finished shard yet; run the same preparation again to go on."
            )
        return PreparedData(folder, manifest)

    def __len__(self) -> int:
        """Count the texts."""
        return self.count

    @cached_property
    def digest(self) -> str:
        """A hash that tells it from other data: of encoder, vocabulary and rows, wherever they lie."""
        rows = [shard["sha256"] for shard in self.manifest["shards"]]
        known = json.dumps([self.encoder_name, self.manifest["tokenizer"], rows], sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The vocabulary of the ids."""
        return TextTokenizer.load(self.path)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids of some pairs: (len(rows), max_tokens) int64."""
        return self._gather(rows, self._column("ids"), np.int64)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of some pairs: (len(rows), embedding_size) float32."""
        return self._gather(rows, self._column("vectors"), np.float32)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids of all passages, one after the other: uint16 or uint32."""
        return np.concatenate(self._column("tokens"))

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each passage begins in `tokens`, and the end: (count + 1,) int64."""
        lengths = [np.diff(offsets) for offsets in self._column("offsets")]
        return np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)

    def verify(self) -> None:
        """Check every file against the hash in the manifest."""
        expected = {"tokenizer.json": self.manifest["tokenizer"]}
        for shard in self.manifest["shards"]:
            expected |= shard["sha256"]
        for name, digest in expected.items():
            if not (self.path / name).is_file() or file_hash(self.path / name) != digest:
                raise UnembedError(
                    f"{self.path / name} is not the file that was written (its hash differs); "
                    "prepare the data again in another folder."
                )

    def _column(self, file: str) -> list[np.ndarray]:
        """Return one of the two arrays of every shard."""
        if file not in ARRAYS[self.kind]:
            other = "passages" if self.kind == "pairs" else "pairs"
            raise UnembedError(
                f"{self.path} holds {self.kind}, which have no {file}; prepare {other} instead."
            )
        return [shard[ARRAYS[self.kind].index(file)] for shard in self._shards]

    def _gather(self, rows: np.ndarray, arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        """Collect rows of an array across the shards."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise UnembedError(f"rows must lie between 0 and {self.count - 1} in {self.path}.")
        result: np.ndarray = np.empty((len(rows), arrays[0].shape[1]), dtype=dtype)
        home = np.searchsorted(self._starts, rows, side="right") - 1
        for k in np.unique(home):
            here = home == k
            result[here] = arrays[k][rows[here] - self._starts[k]]
        return result
