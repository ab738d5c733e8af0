"""What holds for every test: no hub, and one thread: two that wait for each other on busy cores crawl.

Set in the environment before torch or the tokenizers are imported, so that subprocesses inherit it
and a test that needs no torch does not pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ARCHITECTURES

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a checkpoint once and return its folder."""
    import torch

    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            torch.manual_seed(0)
            written[name] = ARCHITECTURES[name](tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 pairs of made-up words."""
    from syllables import prepare_pairs

    return prepare_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Passages of made-up words, for spans."""
    from syllables import prepare_passages

    return prepare_passages(tmp_path_factory.mktemp("passages"))


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `fake` be an encoder that is found by its name; the names that were asked for."""
    from syllables import FakeEncoder

    asked: list[str] = []

    def find(name: str, *, device: str | None = None, **options: Any) -> FakeEncoder:
        asked.append(name)
        assert device == "cpu"
        assert not any(options.values())  # neither half precision nor trust unless asked
        return FakeEncoder()

    monkeypatch.setattr("unembed.encoders.load_encoder", find)
    return asked
