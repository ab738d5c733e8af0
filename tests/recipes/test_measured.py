"""What is measured of a model and of vectors, and what is written down of it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovering import WORDS, FakeEncoder

from recipes.rehearsal import open_inverter
from unembed.corpus import prepare
from unembed.encoders import load_encoder
from unembed.evaluate import evaluate_suites, plan
from unembed.inverter import Inverter
from unembed.metrics import token_f1
from unembed.records import read_records
from unembed.scoring import refer
from unembed.strategies import STRATEGIES
from unembed.suites import suite_of


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
        figures = encoders.measure(open_inverter(causal=causal), {"all": texts}, unknown=1)["all"]
        assert figures["texts"] == 3 and figures["without_vector"] == 0
        modes = figures.keys() & encoders.MODES.keys()
        assert modes == encoders.MODES.keys() - (set() if causal else left)
        names = {"f1", "exact", "accuracy", "same_tokens", "cosine", "f1_known", "rouge_l"}
        assert all(figures[mode].keys() == names for mode in modes)
        runs.append(tmp_path / f"run-{causal}")
        runs[-1].mkdir()
        row = {"encoder": f"causal {causal}", "kind": "fake", "size": 16, "sets": {"three": figures}}
        (runs[-1] / "figures.json").write_text(json.dumps(row))
    sets = {"first": texts[:1], "all": texts}
    both = encoders.measure(open_inverter(causal=True), sets, modes=("c8", "beam"))
    assert both["all"].keys() >= {"c8", "beam"} and "c32" not in both["all"]
    alone = encoders.measure(open_inverter(causal=True), {"first": texts[:1]}, modes=("c8", "beam"))
    assert both["first"] == alone["first"]

    encoders.make_table(Namespace(runs=runs, out=tmp_path / "table.json"))
    table = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in table}) == 1  # every row has all columns
    assert [sum(f"causal {causal}" in line for line in table) for causal in (True, False)] == [8, 6]
    assert len(json.loads((tmp_path / "table.json").read_text())["encoders"]) == 2


def test_terms_of_a_choice_are_added_one_after_the_other(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighing = recipe("choice")
    inverter = open_inverter(causal=True, embeds=True)
    with torch.no_grad():  # else the likeliest text is a single word again and again
        for p in inverter.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    inverter = Inverter(
        inverter.model,
        config=inverter.config.override(bag_weight=0.2, embed_share=0.1),
        tokenizer=inverter.tokenizer,
        device="cpu",
    )
    inverter._encoder = FakeEncoder()
    monkeypatch.setattr(weighing.Inverter, "from_pretrained", lambda name: inverter)
    words = "the small cat sat on the mat and a red bird ran to the old dog".split()
    texts = [" ".join(words[i : i + 5]) for i in range(10)]
    (tmp_path / "ten.txt").write_text("\n".join(texts) + "\n")
    out = tmp_path / "choice.json"
    monkeypatch.setattr(
        sys, "argv", ["choice.py", str(tmp_path / "ten.txt"), "--limit", "9", "--out", str(out)]
    )
    before = [getattr(weighing.choice, name) for name in weighing.TERMS]
    weighing.main()
    assert before == [getattr(weighing.choice, name) for name in weighing.TERMS]  # as they were
    figures = json.loads(out.read_text())["sets"]["ten"]
    assert list(figures) == ["likelihood", *(name.lower() for name in weighing.TERMS), "best"]
    assert weighing.TERMS == ("HEARING", "COVERAGE", "REPEATS", "AGREEMENT", "LIKENESS")
    assert figures["likelihood"]["more"] == 0 and len({each["f1"] for each in figures.values()}) > 2
    assert all(each["f1"] <= figures["best"]["f1"] for each in figures.values())
    found = inverter.invert(FakeEncoder().encode(texts[:9]), strategy="beam")
    truth = refer(
        texts[:9], tokenizer=inverter.tokenizer, encoder=FakeEncoder(), max_tokens=inverter.max_tokens
    ).ids
    f1 = np.mean([token_f1(a, b.ids) for a, b in zip(truth, found, strict=True)])
    assert figures["likeness"]["f1"] == pytest.approx(f1, abs=1e-4)  # all terms: as users have it
    assert figures["likeness"] != figures["agreement"]


def test_defences_change_vectors_as_they_say(recipe: Any) -> None:
    defences = recipe("defences")
    draws = np.random.default_rng(0)
    vectors = draws.standard_normal((50, 64)).astype(np.float32) * draws.uniform(0.5, 2, (50, 1))
    sizes = np.linalg.norm(vectors, axis=1)
    for share in (0.1, 1.0):
        noise = defences.add_noise(share, vectors, np.random.default_rng(1)) - vectors
        assert np.linalg.norm(noise, axis=1) / sizes == pytest.approx(share, rel=0.4)
        assert np.mean(np.linalg.norm(noise, axis=1) / sizes) == pytest.approx(share, rel=0.05)
    for bits in (1, 2, 4, 8):
        rounded = defences.keep_bits(bits, vectors, draws)
        largest = np.abs(vectors).max(1)
        assert np.abs(rounded).max(1) == pytest.approx(largest)
        assert max(len(np.unique(row)) for row in rounded) <= 2**bits
        step = largest / max(2 ** (bits - 1) - 1, 1)
        assert (np.abs(rounded - vectors).max(1) <= step / (2 if bits > 1 else 1) + 1e-6).all()
    assert (np.sign(defences.keep_bits(1, vectors, draws)) == np.sign(vectors)).all()
    dropped = defences.drop_numbers(0.25, vectors, np.random.default_rng(2))
    gone = (dropped == 0).all(0)
    assert gone.sum() == 16 and (dropped[:, ~gone] == vectors[:, ~gone]).all()
    assert list(defences.DEFENCES)[0] == "none"
    for name in ("none", "1 bit a number", "noise of 0.5 of its length", "75% of the numbers dropped"):
        changed = defences.DEFENCES[name](vectors, np.random.default_rng(0))
        assert changed.shape == vectors.shape and (changed == vectors).all() == (name == "none")


def test_neighbours_are_those_of_clean_queries(recipe: Any) -> None:
    kept = recipe("defences").neighbours_kept
    angles = np.linspace(0, 2 * np.pi, 41)[:-1]
    ring = np.stack((np.cos(angles), np.sin(angles)), 1)
    assert kept(ring, ring) == kept(ring, 3 * ring) == 1.0  # lengths do not matter
    # Every text is stored as its opposite: none of those nearest is found.
    assert kept(ring, -ring) == 0.0
    # All turned by two places: of five on either side, two are lost on one.
    assert kept(ring, np.roll(ring, -2, axis=0)) == pytest.approx(0.8)


def test_every_defence_is_measured_on_the_same_texts(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defences = recipe("defences")
    inverter = open_inverter(causal=True)
    monkeypatch.setattr(defences.Inverter, "from_pretrained", lambda name: inverter)
    asked: list[tuple[np.ndarray, int]] = []
    invert = inverter.invert

    def note(vectors: np.ndarray, **options: Any) -> Any:
        asked.append((vectors, options["beams"]))
        return invert(vectors, **options)

    monkeypatch.setattr(inverter, "invert", note)
    for name in ("one", "two"):
        rows = [" ".join(WORDS[i : i + 4]) for i in range(0, 12)]
        (tmp_path / f"{name}.txt").write_text("\n".join(rows) + "\n")
    out = tmp_path / "defences.json"
    files = [str(tmp_path / f"{name}.txt") for name in ("one", "two")]
    monkeypatch.setattr(
        sys, "argv", ["defences.py", *files, "--limit", "3", "--beams", "2", "--out", str(out)]
    )
    defences.main()
    found = json.loads(out.read_text())
    assert (found["texts"], found["stored"], found["beams"]) == (6, 24, 2)
    assert found["defences"].keys() == defences.DEFENCES.keys()
    assert found["defences"]["none"]["neighbours"] == 1.0
    assert all(each.keys() == {"f1", "exact", "cosine", "neighbours"} for each in found["defences"].values())
    clean = FakeEncoder().encode([" ".join(WORDS[i : i + 4]) for i in (0, 1, 2)] * 2)
    assert asked[0][0] == pytest.approx(clean) and {beams for _, beams in asked} == {2}
    assert len(asked) == len(defences.DEFENCES) and all(each.dtype == np.float32 for each, _ in asked)


def test_likeness_is_held_against_what_became_of_the_texts(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = recipe("likeness")
    inverter = open_inverter(causal=True, embeds=True)
    inverter = Inverter(
        inverter.model,
        config=inverter.config.override(embed_share=0.1),
        tokenizer=inverter.tokenizer,
        device="cpu",
    )
    texts = [" ".join(WORDS[i : i + 4]) for i in range(12)]
    records, out = tmp_path / "records.jsonl", tmp_path / "likeness.json"
    evaluate_suites(
        [suite_of(texts)],
        inverter=inverter,
        encoder=FakeEncoder(),
        methods=plan(["beam", "confidence"], config=inverter.config.model, beams=2),
        out=records,
    )
    monkeypatch.setattr(sys, "argv", ["likeness.py", str(records), "-o", str(out)])
    trust.main()
    found = json.loads(out.read_text())
    assert found["texts"] == 12 and found["methods"] == ["beam-32-beams-2"]  # the only one that guesses
    rows = [row for row in read_records(records).rows if row.likeness is not None]
    assert sum(part["texts"] for part in found["parts"]) == len(rows) == 12
    expected = np.corrcoef([row.likeness for row in rows], [row.cosine for row in rows])[0, 1]
    assert found["correlation"]["cosine"] == pytest.approx(expected, abs=1e-4)
    # An edge belongs to what lies above it; what has no likeness is left out.
    some = [replace(rows[0], likeness=value, token_f1=f1) for value, f1 in ((0.9, 0.4), (0.91, 0.6))]
    some += [replace(rows[0], likeness=0.8999, token_f1=0.1), replace(rows[0], likeness=None)]
    parts = trust.by_likeness(some)
    assert [(part["from"], part["texts"], part["token_f1"]) for part in parts] == [
        (0.85, 1, 0.1), (0.9, 2, 0.5),
    ]  # fmt: skip


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
