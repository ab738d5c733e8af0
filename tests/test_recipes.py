"""Recipes that measure: what they write down, and that a model is asked for no more than it can do."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovering import FakeEncoder, make_tokenizer

from unembed.config import Config
from unembed.corpus import prepare
from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.strategies import STRATEGIES

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a recipe by its name, as it is found when it is run."""
    monkeypatch.syspath_prepend(str(RECIPES))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RECIPES)):
            del sys.modules[name]


def open_inverter(*, causal: bool) -> Inverter:
    """An inverter that has learnt nothing, for an encoder that is at hand."""
    tokenizer = make_tokenizer()
    config = Config().override(
        encoder="fake", layers=1, hidden=16, heads=2, ffn=16, adaln_rank=0, max_tokens=32, causal=causal,
        vocab_size=tokenizer.size, mask_id=tokenizer.mask_id, end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id, embedding_size=FakeEncoder.size,
    )  # fmt: skip
    torch.manual_seed(0)
    inverter = Inverter(Denoiser(config.model), config=config, tokenizer=tokenizer, device="cpu")
    inverter._encoder = FakeEncoder()
    return inverter


def test_encoders_are_measured_in_the_ways_that_a_model_has(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoders = recipe("encoders")
    assert {strategy for strategy, _ in encoders.MODES.values()} == STRATEGIES.keys()
    texts = ["the small cat sat on the mat", "the old dog ran", "a red bird"]
    left = {mode for mode, (strategy, _) in encoders.MODES.items() if STRATEGIES[strategy].causal}
    assert left == {"causal", "beam"}
    runs = []
    for causal in (True, False):
        figures = encoders.measure(open_inverter(causal=causal), texts, unknown=1)
        assert figures["texts"] == 3 and figures["without_vector"] == 0
        modes = figures.keys() & encoders.MODES.keys()
        assert modes == encoders.MODES.keys() - (set() if causal else left)
        names = {"f1", "exact", "accuracy", "same_tokens", "cosine", "f1_known"}
        assert all(figures[mode].keys() == names for mode in modes)
        runs.append(tmp_path / f"run-{causal}")
        runs[-1].mkdir()
        row = {"encoder": f"causal {causal}", "kind": "fake", "size": 16, "sets": {"three": figures}}
        (runs[-1] / "figures.json").write_text(json.dumps(row))
    assert encoders.measure(open_inverter(causal=True), texts, modes=("c8", "beam")).keys() >= {"c8", "beam"}
    assert "c32" not in encoders.measure(open_inverter(causal=True), texts, modes=("c8", "beam"))

    encoders.make_table(Namespace(runs=runs, out=tmp_path / "table.json"))
    table = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in table}) == 1  # every row has all columns
    assert [sum(f"causal {causal}" in line for line in table) for causal in (True, False)] == [8, 6]
    assert len(json.loads((tmp_path / "table.json").read_text())["encoders"]) == 2


def test_nearest_counts_file_by_file(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    known = ["The night train crossed the border.", "Her accountant found fourteen transactions."]
    (texts / "known.txt").write_text("\n".join(known) + "\n")
    (texts / "new.txt").write_text("A bakery opens at dawn.\nTwo rivers meet below the town.\nIt rained.\n")
    encoder = load_encoder("all-MiniLM-L6-v2", device="cpu")
    passages = ["The photosynthesis experiment outperformed the other one.", *known, "Nobody came."]
    prepare(passages, encoder=encoder, out=tmp_path / "data", max_tokens=16, kind="passages")

    def run(*more: str) -> dict[str, Any]:
        out = tmp_path / "nearest.json"
        arguments = ["--data", str(tmp_path / "data"), "--texts", str(texts), "--out", str(out), *more]
        monkeypatch.setattr(sys, "argv", ["nearest.py", *arguments])
        recipe("nearest").main()
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    record = run()
    assert (record["passages"], record["encoder"]) == (4, "all-MiniLM-L6-v2")
    assert list(record["sets"]) == ["known", "new"]
    full, new = record["sets"]["known"], record["sets"]["new"]
    assert [full[name] for name in ("texts", "f1", "exact", "accuracy")] == [2, 1, 1, 1]
    assert full["cosine"] == pytest.approx(1, abs=1e-3)
    assert new["texts"] == 3 and new["exact"] == 0 and new["f1"] < 0.5 and new["cosine"] < 0.9
    few = run("--limit", "2")  # without the second of the known ones
    assert few["passages"] == 2 and few["sets"]["known"]["exact"] == 0.5
    assert np.isfinite(few["sets"]["new"]["f1"])
