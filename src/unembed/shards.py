"""The files of a prepared folder: a manifest, and two arrays a shard.

Knows names, shapes and hashes, and that a file is whole or not there: each is written under a temporary
name first. Must not know how rows are made, nor how they are drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from unembed.errors import UnembedError

Kind = Literal["pairs", "passages"]
Arrays = tuple[np.ndarray, np.ndarray]

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ends the name of a file that is not yet whole
ARRAYS = {"pairs": ("ids", "vectors"), "passages": ("tokens", "offsets")}
# What must not change between the runs that fill one folder.
SETTINGS = (
    *("kind", "encoder", "embedding_size", "max_tokens", "min_tokens", "shard_size"),
    *("vocab_size", "mask_id", "end_id", "pad_id", "tokenizer", "sources"),
)


def write_manifest(
    folder: Path, settings: dict[str, Any], shards: list[dict[str, Any]], *, exhausted: bool
) -> None:
    """Replace the manifest in one step; `exhausted` says that the source has no more texts."""
    manifest = {
        "format": FORMAT,
        **settings,
        "count": sum(shard["count"] for shard in shards),
        "truncated": sum(shard["truncated"] for shard in shards),
        "exhausted": exhausted,
        "shards": shards,
    }
    with _replacing(folder / MANIFEST) as out:
        out.write((json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest and check it."""
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
        shards, kind = manifest["shards"], manifest["kind"]
        good = (
            manifest.keys() >= {*SETTINGS, "truncated", "exhausted"}
            and sum(shard["count"] for shard in shards) == manifest["count"]
            # A name becomes a path: digits only.
            and all(re.fullmatch(r"\d{5,}", shard["name"]) for shard in shards)
            and all(set(shard["sha256"]) == set(_files(kind, shard["name"])) for shard in shards)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UnembedError(
            f"{path} is not a manifest of prepared data ({error}); prepare it again."
        ) from error
    if not good:
        raise UnembedError(f"{path} is damaged; prepare the data again in another folder.")
    return manifest


def write_shard(folder: Path, arrays: Arrays, *, kind: Kind, index: int, **facts: int) -> dict[str, Any]:
    """Write the two arrays of a shard and return its entry in the manifest: its name, facts and hashes."""
    name, hashes = f"{index:05d}", {}
    for file, array in zip(_files(kind, name), arrays, strict=True):
        with _replacing(folder / file) as out:
            np.save(out, array, allow_pickle=False)
        hashes[file] = file_hash(folder / file)
    return {"name": name, **facts, "sha256": hashes}


def map_shard(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> Arrays:
    """Map the two arrays of a shard into memory; they must be of the shape the manifest promises."""
    kind, name, n = manifest["kind"], shard["name"], shard["count"]
    try:
        files = [folder / file for file in _files(kind, name)]
        first, second = (np.load(file, mmap_mode="r", allow_pickle=False) for file in files)
    except (OSError, ValueError, EOFError) as error:
        raise UnembedError(
            f"shard {name} of {folder} is missing or damaged ({error}); "
            "prepare the data again in another folder."
        ) from error
    if kind == "pairs":
        good = first.shape == (n, manifest["max_tokens"]) and second.shape == (n, manifest["embedding_size"])
    else:
        good = second.shape == (n + 1,) and first.shape == (int(second[-1]),)
    if not good:
        raise UnembedError(
            f"shard {name} of {folder} is not of the shape its manifest says; "
            "prepare the data again in another folder."
        )
    return first, second


def file_hash(path: Path) -> str:
    """Hash a file with SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(kind: str, shard: str) -> list[str]:
    """Name the two files of a shard."""
    return [f"{shard}.{array}.npy" for array in ARRAYS[kind]]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file under a temporary name and give it its own when it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
