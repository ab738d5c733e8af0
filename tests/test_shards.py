"""shards: what is written is read back, and damage is said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unembed.errors import UnembedError
from unembed.shards import (
    MANIFEST,
    SETTINGS,
    file_hash,
    map_shard,
    read_manifest,
    write_manifest,
    write_shard,
)

IDS = np.arange(12, dtype=np.uint16).reshape(3, 4)
VECTORS = np.ones((3, 2), dtype=np.float16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one shard of three pairs."""
    settings: dict[str, Any] = dict.fromkeys(SETTINGS, 0) | {
        "kind": "pairs",
        "max_tokens": 4,
        "embedding_size": 2,
    }
    shard = write_shard(tmp_path, (IDS, VECTORS), kind="pairs", index=0, count=3, truncated=1, read=5)
    write_manifest(tmp_path, settings, [shard], exhausted=True)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest["count"], manifest["truncated"], manifest["exhausted"]) == (3, 1, True)
    (shard,) = manifest["shards"]
    assert shard["sha256"] == {
        name: file_hash(folder / name) for name in ("00000.ids.npy", "00000.vectors.npy")
    }
    ids, vectors = map_shard(folder, manifest, shard)
    assert (ids == IDS).all() and (vectors == VECTORS).all()
    assert sorted(path.name for path in folder.iterdir()) == [*sorted(shard["sha256"]), MANIFEST]


def test_passages_have_one_offset_more(tmp_path: Path) -> None:
    arrays = np.arange(7, dtype=np.uint16), np.array([0, 3, 7])
    shard = write_shard(tmp_path, arrays, kind="passages", index=12, count=2)
    assert shard["name"] == "00012"
    tokens, offsets = map_shard(tmp_path, {"kind": "passages"}, shard)
    assert len(tokens) == 7 and offsets.tolist() == [0, 3, 7]
    with pytest.raises(UnembedError, match="not of the shape"):
        map_shard(tmp_path, {"kind": "passages"}, shard | {"count": 3})


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    before = (folder / "00000.ids.npy").read_bytes()
    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_shard(folder, (IDS + 1, VECTORS), kind="pairs", index=0, count=3)
    assert (folder / "00000.ids.npy").read_bytes() == before


def test_damaged_manifests(folder: Path) -> None:
    manifest = read_manifest(folder)
    shard = manifest["shards"][0]
    for broken, message in [
        ("{", "is not JSON"),
        ("[]", "is not a manifest"),
        ("{}", "is not a manifest"),
        (json.dumps(manifest | {"format": 2}), "of format 2, expected 1"),
        (json.dumps(manifest | {"count": 10}), "is damaged"),
        (json.dumps(manifest | {"kind": "else"}), "is not a manifest"),
        (json.dumps(manifest | {"shards": [shard | {"name": "../00000"}]}), "is damaged"),
        (json.dumps({k: v for k, v in manifest.items() if k != "max_tokens"}), "is damaged"),
    ]:
        (folder / MANIFEST).write_text(broken)
        with pytest.raises(UnembedError, match=message):
            read_manifest(folder)
    with pytest.raises(UnembedError, match="no manifest.json"):
        read_manifest(folder / "nowhere")
