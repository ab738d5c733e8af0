"""Scripts and what is joined: what they ask for, means of weights, cards, published files."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.rehearsal import asked_by, open_inverter
from unembed.beam import BEAMS
from unembed.config import Config
from unembed.inverter import Inverter


def settings_of(recipe: Any, words: list[str], folder: Path) -> Config:
    """The settings that the words of a call change."""
    fields = [word for word in words if "=" in word]
    args = Namespace(fields=fields, data=folder / "data", tiny=False, preset="small", minutes=1.0)
    config, _, _ = recipe("compare").settings(args)
    return config


def test_depth_asks_for_what_there_is(recipe: Any, folder: Path, tmp_path: Path) -> None:
    assert len(asked_by("depth.sh", tmp_path)) == 4
    assert asked_by("depth.sh", tmp_path) == []  # all lines are there
    calls = asked_by("depth.sh", tmp_path, ENCODER="some/static", MINUTES="0.5", JOBS="3")
    assert sorted(call[1] for call in calls) == ["all", "backbone", "embeddings", "scratch"]
    assert all("some/static" in call and call[call.index("--minutes") + 1] == "0.5" for call in calls)
    assert {call[1] for call in calls if "all-MiniLM-L6-v2" in call} == {"all", "backbone", "embeddings"}
    shutil.rmtree(tmp_path / "out")
    configs = [settings_of(recipe, call, folder) for call in asked_by("depth.sh", tmp_path, ENCODER="x")]
    assert [c.model.layers for c in configs] == [2, 4, 8, 16, 8, 8, 8, 8]
    assert [c.model.freeze for c in configs][-4:] == ["none", "none", "embeddings", "backbone"]
    assert {(c.train.splice_share, c.train.swap_share, c.train.warmup) for c in configs} == {(0.0, 0.0, 100)}


@pytest.mark.parametrize("script", ["comparisons.sh", "ratios.sh"])
def test_variants_differ_from_each_other(recipe: Any, folder: Path, tmp_path: Path, script: str) -> None:
    calls = asked_by(script, tmp_path)
    names = [call[1] for call in calls]
    assert len(set(names)) == len(names) >= 9
    special = {call[1] for call in calls if call[0] == "recipes/variants.py"}
    assert special == (set(recipe("variants").VARIANTS) if script == "comparisons.sh" else set())
    configs = {settings_of(recipe, call, folder) for call in calls if call[1] not in special}
    assert len(configs) == len(calls) - len(special)


def test_a_variant_that_fails_is_asked_for_again(tmp_path: Path) -> None:
    assert len(asked_by("ratios.sh", tmp_path, fail="linear", JOBS="4")) == 9
    assert [call[1] for call in asked_by("ratios.sh", tmp_path)] == ["linear"]


def test_weights_are_averaged_by_their_shares(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    average, inverter = recipe("average"), open_inverter(causal=True)
    parts = []
    for name, value in (("one", 1.0), ("two", 3.0)):
        with torch.no_grad():
            for weights in inverter.model.parameters():
                weights.fill_(value)
        inverter.facts["training"] = {"stretch": name}
        inverter.save_pretrained(tmp_path / name)
        parts.append(tmp_path / name)
    out = tmp_path / "mean"
    monkeypatch.setattr(sys, "argv", ["average.py", str(out), f"{parts[0]}=0.25", f"{parts[1]}=0.75"])
    average.main()
    mean = Inverter.from_pretrained(out, device="cpu")
    assert all(bool((weights == 2.5).all()) for weights in mean.model.parameters())
    assert mean.facts["training"] == {"stretch": "two"} and mean.config == inverter.config
    monkeypatch.setattr(sys, "argv", ["average.py", str(out), f"{parts[0]}=0.5"])
    with pytest.raises(SystemExit):
        average.main()
    assert "shares must sum to one" in capsys.readouterr().err


def test_figures_of_a_card_are_the_latest(recipe: Any, tmp_path: Path) -> None:
    release = recipe("release")
    figures = {"token_f1": 0.5, "exact_match": 0.1, "token_accuracy": 0.2, "cosine": 0.9}
    rows = [
        {"set": name, "strategy": strategy, "steps": steps, **figures}
        for name in ("b", "a")
        for strategy, steps in (("confidence", 8), ("beam", 32))
    ]
    (tmp_path / "first.json").write_text(json.dumps({"records": rows}))
    better = {"values": {**figures, "token_f1": 0.6, "bleu": 20.0}, "suite": "a"}
    methods = [{**better, "method": method} for method in ("beam-32", "random", "unconditional-8", "euler-4")]
    (tmp_path / "then.json").write_text(json.dumps({"parts": [{"figures": methods}]}))
    found = release.joined([tmp_path / "first.json", tmp_path / "then.json"])
    assert [(row["set"], row["strategy"], row["steps"], row["token_f1"]) for row in found] == [
        ("a", "confidence", 8, 0.5),
        ("a", "beam", 32, 0.6),
        ("a", "euler", 4, 0.6),
        ("b", "confidence", 8, 0.5),
        ("b", "beam", 32, 0.5),
    ]
    assert {frozenset(row) for row in found} == {frozenset(rows[0])}


def test_what_runs_wrote_is_joined_with_what_is_published(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = recipe("publish")
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    publish.write("compare-h200.json", {"hardware": "H200", "rounds": [{"variants": []}]})
    (tmp_path / "line.json").write_text(json.dumps({"name": "base", "steps": 3}))
    publish.add_round(Namespace(lines=[tmp_path / "line.json"], minutes=0.5, note="alike"))
    rounds = publish.read("compare-h200.json")["rounds"]
    assert len(rounds) == 2 and rounds[1]["variants"] == [{"name": "base", "steps": 3}]

    publish.write("stretches-h200.json", {"stretches": [{"steps": 5}]})
    publish.write("heldout-h200.json", {"model": "a model", "records": ["old"], "unquantised": []})
    (tmp_path / publish.CURVE).write_text(json.dumps({"step": 5, "seconds": 2.5, "stretch": 1}) + "\n")
    run = tmp_path / "out" / "run"
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": n, "seconds": n / 4, "loss": 1.0} for n in range(1, 13)]
    rows[4] = {"step": 5, "seconds": 1.25, "validation_loss": 2.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = {"f1": 0.5, "exact": 0.1, "accuracy": 0.2, "cosine": 0.9}
    (run.parent / "figures.json").write_text(
        json.dumps({"start_from": "x", "sets": {"chat": {"c8": figures}}, "unquantised": {}})
    )
    publish.add_stretch(Namespace(out=run.parent, before="the first weights"))
    assert [s.get("start_from") for s in publish.read("stretches-h200.json")["stretches"]] == [
        None,
        "the first weights",
    ]
    held = publish.read("heldout-h200.json")
    assert (held["model"], held["beams"]) == ("a model", BEAMS) and held["records"] == [
        {"set": "chat", "strategy": "confidence", "steps": 8, "token_f1": 0.5, "exact_match": 0.1,
         "token_accuracy": 0.2, "cosine": 0.9}
    ]  # fmt: skip
    curve = [json.loads(line) for line in (tmp_path / publish.CURVE).read_text().splitlines()]
    assert [row["step"] for row in curve] == [5, 6, 10, 16]  # what was measured, and every tenth loss
    assert curve[-1] == {"step": 16, "seconds": 5.25, "loss": 1.0, "stretch": 2}

    (run.parent / "figures.json").write_text(json.dumps({"steps": 12}))  # of one that was not decoded
    publish.add_stretch(Namespace(out=run.parent, before="the second weights"))
    assert publish.read("stretches-h200.json")["stretches"][2] == {
        "steps": 12,
        "start_from": "the second weights",
    }
    assert publish.read("heldout-h200.json") == held
    assert json.loads((tmp_path / publish.CURVE).read_text().splitlines()[-1])["stretch"] == 3


def test_searches_of_several_sets_are_joined(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = recipe("publish")
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    common = dict.fromkeys(publish.ALIKE, "the same")
    files = [tmp_path / f"{name}.json" for name in ("tweets", "chat")]
    for path in files:
        found = common | {"file": f"{path.stem}.txt", "texts": 3, "search": {"f1": len(path.stem)}}
        path.write_text(json.dumps(found))
    publish.join_searches(Namespace(files=files, name="search.json"))
    assert publish.read("search.json") == common | {
        "sets": {
            name: {"file": f"{name}.txt", "texts": 3, "search": {"f1": len(name)}}
            for name in ("chat", "tweets")
        }
    }
    files[1].write_text(json.dumps({**json.loads(files[1].read_text()), "settings": "others"}))
    with pytest.raises(SystemExit, match=r"chat.json is of other settings .* than .*tweets.json"):
        publish.join_searches(Namespace(files=files, name="other.json"))
    assert not (tmp_path / "other.json").exists()
