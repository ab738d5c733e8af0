"""A recipe as it is found when it is run, and passages and texts for it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovering import WORDS

from recipes.rehearsal import RECIPES, OtherEncoder, SpanEncoder
from unembed import encoders
from unembed.corpus import prepare


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a recipe by its name, as it is found when it is run."""
    monkeypatch.syspath_prepend(str(RECIPES))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RECIPES)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Passages of few words to train on, and texts to measure on."""
    folder = tmp_path_factory.mktemp("variants")
    rng = np.random.default_rng(0)
    passages = [" ".join(rng.choice(WORDS, rng.integers(8, 40))) for _ in range(60)]
    prepare(passages, encoder=SpanEncoder(), out=folder / "data", max_tokens=32, kind="passages")
    (folder / "texts").mkdir()
    (folder / "texts" / "few.txt").write_text("the small cat sat on the mat\nthe old dog ran\n")
    return folder


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two encoders be found by their names."""
    found = {"fake": SpanEncoder, "other": OtherEncoder}
    monkeypatch.setattr(encoders, "load_encoder", lambda name, **_: found[name]())
