"""Recipes that measure: what they write down, and that a model is asked for no more than it can do."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CORPUS, TEXTS, add_code
from recovering import WORDS, FakeEncoder, make_tokenizer
from torch import Tensor

from unembed import encoders
from unembed.beam import BEAMS
from unembed.checkpoint import read_weights
from unembed.config import Config
from unembed.corpus import PreparedData, prepare
from unembed.diffusion import causal_rows
from unembed.encoders import load_encoder
from unembed.evaluate import evaluate_suites, plan
from unembed.inverter import Inverter
from unembed.metrics import token_f1
from unembed.model import Denoiser
from unembed.records import read_records
from unembed.run import Run
from unembed.scoring import refer
from unembed.step import masked_loss
from unembed.strategies import STRATEGIES
from unembed.suites import suite_of
from unembed.validation import causal_loss

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


def open_inverter(*, causal: bool, embeds: bool = False) -> Inverter:
    """An inverter that has learnt nothing, for an encoder that is at hand."""
    tokenizer = make_tokenizer()
    config = Config().override(
        encoder="fake", layers=1, hidden=16, heads=2, ffn=16, adaln_rank=0, max_tokens=32, causal=causal,
        embeds=embeds, vocab_size=tokenizer.size, mask_id=tokenizer.mask_id, end_id=tokenizer.end_id,
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


# --- variants of the model ------------------------------------------------------------------------


class SpanEncoder(FakeEncoder):
    """Embeds the spans of passages, too."""

    tokenizer = make_tokenizer()

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = zip(ids.tolist(), lengths.tolist(), strict=True)
        return torch.from_numpy(self.encode(self.tokenizer.decode([row[:n] for row, n in rows])))


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


MASKED, LEFT = {"c8", "c32", "s32"}, {"causal", "beam"}
GROWN = {f"{pace}{steps}" for pace in ("c", "grow", "slow") for steps in (8, 32)}
NEITHER = ("causal=False", "causal_share=0.0")


@pytest.mark.parametrize(
    ("script", "name", "fields", "modes"),
    [
        ("compare", "base", (), MASKED | LEFT),
        ("compare", "shape", ("positions=learned", "adaln_rank=0", "time_conditioning=True"), MASKED | LEFT),
        ("compare", "paper", ("schedule=exponential", "weight=inverse-t", "stratified=False"), MASKED | LEFT),
        ("compare", "fixed", (*NEITHER, "schedule=fixed", "mask_ratio=0.8"), MASKED),
        ("variants", "self-conditioning", (), MASKED | LEFT),
        ("variants", "self-conditioning", NEITHER, MASKED),
        ("variants", "drafts", (), MASKED | LEFT),
        ("variants", "drafts", NEITHER, MASKED),
        ("variants", "cached", (), MASKED | LEFT),
        ("variants", "prefix", (), MASKED | LEFT),
        ("variants", "prefix", NEITHER, MASKED),
        ("flexible", "flexible", (), GROWN | LEFT),
        ("flexible", "flexible", NEITHER, GROWN),
        ("peer", "gpt2", (), {"greedy"}),
    ],
)
def test_every_variant_trains_and_is_measured(
    recipe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    script: str, name: str, fields: tuple[str, ...], modes: set[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(encoders, "load_encoder", lambda *_, **__: SpanEncoder())
    where = ["--data", str(folder / "data"), "--texts", str(folder / "texts"), "--lock", str(folder / "lock")]
    given = ["steps=12", "validation=8", "warmup=2", "learning_rate=0.01", *fields]
    quick = ["--tiny", *(["--batches", "2"] if script == "peer" else [])]
    monkeypatch.setattr(sys, "argv", [script, name, *given, *where, *quick])
    recipe(script).main()
    line = json.loads(capsys.readouterr().out)
    assert (line["name"], line["steps"]) == (name, 12)
    assert line["sets"]["few"].keys() == modes
    figures = {figure for mode in line["sets"]["few"].values() for figure in mode}
    assert figures == {"f1", "exact", "accuracy", "cosine"}
    reads = script in ("compare", "variants") and modes >= LEFT
    assert ("causal_loss" in line) == reads
    assert line.get("reading_losses", {}).keys() == ({"few"} if reads else set())
    assert line.get("guess_cosines", {}).keys() == ({"few"} if script == "compare" else set())
    kinds = ("causal_loss", "token_loss", "cross_entropy", "validation_loss")
    loss = next(line[kind] for kind in kinds if kind in line)
    assert loss < math.log(SpanEncoder.tokenizer.size) - 0.05  # better than drawing tokens evenly


def test_losses_and_guesses_are_those_of_whole_texts_set_by_set(
    recipe: Any, folder: Path, tmp_path: Path
) -> None:
    compare = recipe("compare")
    data, encoder = PreparedData.open(folder / "data"), OtherEncoder()
    config = open_inverter(causal=True, embeds=True).config.override(embedding_size=encoder.size)
    run = Run(config, group=compare.alone())
    long = " ".join(WORDS[:20] * 2)  # cut where rows end, so without an end
    sets = {"short": ["the old dog ran", "roof", "a red bird"], "long": [long, "the small cat"]}
    for name, texts in sets.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(texts) + "\n")
    every = compare.refer_sets(tmp_path, data=data, encoder=encoder)
    model: Any = run.average
    losses, cosines = compare.reading_losses(model, every), compare.guess_cosines(model, every)
    for found in (losses, cosines):
        assert found.keys() == sets.keys() and len(set(found.values())) == 2
    for name, texts in sets.items():
        known = [text for text in texts if text != "roof"]  # which has no vector
        encoded = data.tokenizer.encode(known, max_tokens=32)
        vectors = encoder.encode(data.tokenizer.decode(encoded.ids))
        with torch.inference_mode(), run.half():
            loss = causal_loss(model, torch.from_numpy(encoded.ids), torch.from_numpy(vectors))
            guesses = model.embed(torch.from_numpy(encoded.ids))
        assert losses[name] == pytest.approx(loss, abs=1e-4)
        likeness = torch.nn.functional.cosine_similarity(guesses, torch.from_numpy(vectors)).mean()
        assert cosines[name] == pytest.approx(float(likeness), abs=1e-4)
    few = compare.refer_sets(tmp_path, data=data, encoder=encoder, limit=1)
    assert [len(references.ids) for references in few.values()] == [1, 1]


@pytest.mark.parametrize("network", ["SelfConditioned", "Prefixed"])
def test_variants_see_nothing_ahead_where_they_read_left_to_right(recipe: Any, network: str) -> None:
    config = open_inverter(causal=True).config.model
    torch.manual_seed(0)
    model = getattr(recipe("variants"), network)(config).eval()
    for p in model.parameters():  # what is zero at first, too
        torch.nn.init.normal_(p, std=0.1)
    ids, e = torch.randint(4, config.vocab_size, (2, 32)), torch.randn(2, config.embedding_size)
    causal = torch.tensor([True, False])
    other = torch.where(torch.arange(32) < 5, ids, (ids - 3) % (config.vocab_size - 4) + 4)
    here, there = (model.hidden(x, e, causal=causal) for x in (ids, other))
    same = (here - there).abs().amax(2) < 1e-6
    assert same[0].tolist() == [place <= 5 for place in range(32)] and not same[1].any()
    if network == "SelfConditioned":  # not told anything, it is the preset's network
        torch.testing.assert_close(here, Denoiser.hidden(model, ids, e, causal=causal))
        told = model.hidden(ids, e, causal=causal, previous=torch.randn(2, 32, config.hidden))
        assert not torch.allclose(told, here)


@pytest.mark.parametrize(("name", "share"), [("self-conditioning", 0.5), ("drafts", 1.0)])
def test_variants_of_the_loss_leave_rows_read_left_to_right_alone(
    recipe: Any, name: str, share: float
) -> None:
    variant = recipe("variants").VARIANTS[name]
    torch.manual_seed(0)

    def losses(share: float, masks: float) -> list[float]:
        config = open_inverter(causal=True).config.override(causal_share=share)
        model = variant.get("network", Denoiser)(config.model)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        x0, e, t = torch.randint(4, config.model.vocab_size, (8, 32)), torch.randn(8, 16), torch.ones(8)
        causal = causal_rows(8, config.diffusion, device="cpu")
        masked, hidden = causal[:, None] | (torch.rand(8, 32) < masks), torch.rand(8, 32) < 0.1
        more: dict[str, Any] = {"config": config, "count": 256, "causal": causal, "hidden": hidden}
        given = model, x0, e, t, masked, t < 0
        return [loss(*given, **more).item() for loss in (masked_loss, variant["loss"])]

    usual, own = losses(share, masks=0.0)
    assert own == pytest.approx(usual)
    usual, own = losses(0.5, masks=0.5)
    assert own != pytest.approx(usual)


def test_cached_spans_come_once_an_epoch(recipe: Any, folder: Path) -> None:
    data = PreparedData.open(folder / "data")
    pairs = recipe("variants").FixedSpans(
        data, encoder=SpanEncoder(), batch_size=26, validation=8, seed=0, device="cpu"
    )
    first, second, third = (pairs.batch(step, slice(None))[0] for step in range(3))
    passages = [data.tokens[a:b][:32].tolist() for a, b in pairwise(data.offsets[:53])]
    ends = [[*ids, pairs.end_id][:32] for ids in passages]
    whole = sorted(ids + [pairs.pad_id] * (32 - len(ids)) for ids in ends)
    assert sorted(torch.cat((first, second)).tolist()) == whole
    assert not torch.equal(first, third)
    assert pairs.most_tokens(52) >= int((torch.cat((first, second)) != pairs.pad_id).sum())


class OtherEncoder(SpanEncoder):
    """Another encoder of the same vocabulary: it does not know one word, and has a size of its own."""

    name = "other"
    size = 12

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        known = [[text.strip() != "roof"] for text in texts]
        return super().encode(texts) * np.array(known, np.float32)


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two encoders be found by their names."""
    found = {"fake": SpanEncoder, "other": OtherEncoder}
    monkeypatch.setattr(encoders, "load_encoder", lambda name, **_: found[name]())


def run_recipe(
    module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    """Run a recipe at sizes for a rehearsal; return the line that it prints."""
    where = ["--data", str(folder / "data"), "--texts", str(folder / "texts"), "--lock", str(folder / "lock")]
    given = ["steps=12", "validation=8", "warmup=2", "learning_rate=0.003", "--tiny"]
    monkeypatch.setattr(sys, "argv", [module.__name__, *more, *where, *given])
    module.main()
    line: dict[str, Any] = json.loads(capsys.readouterr().out)
    return line


def test_a_stretch_trains_saves_and_measures_and_the_next_one_goes_on(
    recipe: Any, folder: Path, tmp_path: Path, at_hand: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def stretch(name: str, *more: str) -> dict[str, Any]:
        out = str(tmp_path / name)
        return run_recipe(recipe("stretch"), folder, monkeypatch, capsys, out, *more)

    first = stretch("first")
    assert (first["steps"], first["passages"], first["start_from"]) == (12, 12 * 16, None)
    assert first["sets"]["few"].keys() == MASKED | LEFT and first["unquantised"]["few"].keys() == {
        "c8",
        "beam",
    }
    assert json.loads((tmp_path / "first" / "figures.json").read_text()) == first
    model = tmp_path / "first" / "int8"
    second = stretch("second", "--start-from", str(model), "causal=True")
    assert second["start_from"] == str(model) and second["fields"]["causal"] == "True"
    assert second["validation_loss"] < first["validation_loss"]

    third = stretch("third", "--limit", "0")
    assert "sets" not in third and (tmp_path / "third" / "int8" / "config.json").is_file()

    beams, out = recipe("beams"), tmp_path / "beams.json"
    where = ["--data", str(folder / "data"), "--texts", str(folder / "texts"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["beams.py", str(model), *where, "--beams", "2", "32"])
    beams.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["beams"], row["looks"]) for row in rows] == [(2, 4), (32, 4)]
    assert rows[1]["sets"]["few"] == {
        beams.NAMES[name]: value for name, value in first["sets"]["few"]["beam"].items()
    }

    models = [str(tmp_path / name / "int8") for name in ("first", "second")]
    monkeypatch.setattr(sys, "argv", ["mixes.py", *models, *where, "--shares", "0", "0.5", "1"])
    recipe("mixes").main()
    means = json.loads(out.read_text())["means"]
    assert [row["share"] for row in means] == [0, 0.5, 1]
    compare = recipe("compare")
    for each, row in ((models[0], means[0]), (models[1], means[2])):
        inverter = Inverter.from_pretrained(each, precision="fp32")
        sets = compare.refer_sets(
            folder / "texts", data=PreparedData.open(folder / "data"), encoder=inverter.encoder()
        )
        assert row == {"share": row["share"], **compare.read_sets(inverter.model, sets, inverter.config)}
    assert means[1]["reading_losses"] != means[0]["reading_losses"]


def test_compare_starts_from_a_model_and_trains_for_another_encoder(
    recipe: Any, folder: Path, tmp_path: Path, at_hand: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "few.txt").write_text("the small cat sat on the mat\nroof\n")
    (tmp_path / "data").symlink_to(folder / "data")
    run_recipe(recipe("stretch"), tmp_path, monkeypatch, capsys, str(tmp_path / "start"))
    start = ["--start-from", str(tmp_path / "start" / "int8")]
    compare, runs = recipe("compare"), []

    class Seen(compare.Run):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            runs.append(self)

    monkeypatch.setattr(compare, "Run", Seen)
    lines = {
        name: run_recipe(compare, tmp_path, monkeypatch, capsys, name, "--encoder", "other", *more)
        for name, more in {
            "scratch": [],
            "all": start,
            "embeddings": [*start, "freeze=embeddings"],
            "backbone": [*start, "freeze=backbone"],
        }.items()
    }
    assert [run.config.encoder for run in runs] == ["other"] * 4
    assert [run.config.model.embedding_size for run in runs] == [12] * 4
    assert [line["fields"].get("start_from") for line in lines.values()] == [None, "int8", "int8", "int8"]
    assert all(line["fields"]["encoder"] == "other" for line in lines.values())
    given = read_weights(tmp_path / "start" / "int8")
    kept = {
        name: {key for key, w in run.model.state_dict().items() if torch.equal(w, given[key])}
        for name, run in zip(lines, runs, strict=True)
    }
    assert kept["scratch"] == kept["all"] == set() and kept["embeddings"] == {"tokens.weight", "bias"}
    assert kept["backbone"] > {"tokens.weight", "bias", "blocks.1.up.weight"}
    trainable = [lines[name]["trainable"] for name in ("all", "embeddings", "backbone")]
    assert trainable == sorted(set(trainable), reverse=True) and trainable[0] == lines["all"]["parameters"]
    few = lines["all"]["sets"]["few"]["c8"]
    assert few["f1"] <= 0.5 and few["cosine"] <= 0.5  # one of the two has no vector


def test_compare_measures_the_ways_that_are_asked_for(
    recipe: Any, folder: Path, tmp_path: Path, at_hand: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "few.txt").write_text("the small cat sat on the mat\n")
    (tmp_path / "data").symlink_to(folder / "data")
    compare = recipe("compare")
    line = run_recipe(compare, tmp_path, monkeypatch, capsys, "some", "--modes", "c8,causal")
    assert set(line["sets"]["few"]) == {"c8", "causal"}
    with pytest.raises(SystemExit):  # before anything is trained
        run_recipe(compare, tmp_path, monkeypatch, capsys, "none", "--modes", "c8,c9")
    assert "unknown c9; there are c8" in capsys.readouterr().err


# --- ten languages --------------------------------------------------------------------------------


TINY = "steps=2 validation=8 batch_size=16 warmup=1 layers=1 hidden=16 heads=2 ffn=16 adaln_rank=0".split()


def speak(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, script: str, *words: object, fields: Sequence[str] = ()
) -> None:
    """Call a recipe as from a command line."""
    more = ["--set", *fields, "compile=False"] if fields else []
    monkeypatch.setattr(sys, "argv", [script, *map(str, words), *more])
    recipe(script).main()


def write_parallel(path: Path, **languages: list[str]) -> Path:
    """Write parallel texts, a line for each text in all languages."""
    rows = [dict(zip(languages, texts, strict=True)) for texts in zip(*languages.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_ten_languages_for_another_encoder(
    recipe: Any, folder: Path, tmp_path: Path, at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = write_parallel(
        tmp_path / "parallel.jsonl",
        en=["the small cat sat", "the old dog ran"],
        zh=["the 猫", "roof"],
        xx=["roof", "roof"],
    )
    where = ["--data", folder / "data", "--parallel", parallel, "--lock", tmp_path / "lock"]
    run = tmp_path / "run"
    speak(recipe, monkeypatch, "languages", "train", "--encoder", "other", *where, "--out", run, fields=TINY)
    figures = json.loads((run / "figures.json").read_text())
    assert [figures[key] for key in ("encoder", "kind", "size", "steps")] == ["other", "transformer", 12, 2]
    inverter = Inverter.from_pretrained(run / "run" / "model", device="cpu")
    assert (inverter.encoder_name, inverter.config.model.embedding_size) == ("other", 12)
    found = {name: row["all"] for name, row in figures["languages"].items()}
    assert {name: each["without_vector"] for name, each in found.items()} == {"en": 0, "zh": 1, "xx": 2}
    modes = recipe("encoders").MODES
    for each in found.values():
        assert all(math.isfinite(value) for mode in modes for value in each[mode].values())
    assert {value for mode in modes for value in found["xx"][mode].values()} == {0.0}
    assert recipe("encoders").PreparedData.open(folder / "data").encoder_name == "fake"  # as it was


def test_between_which_cosines_answers_lie(
    recipe: Any, tmp_path: Path, at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"en": ["The small cat sat", "the old dog ran", "roof"], "zh": ["the 猫", "the 犬", "the 鳥"]}
    parallel = write_parallel(tmp_path / "parallel.jsonl", **texts)
    out = tmp_path / "facts.json"
    monkeypatch.setattr(recipe("languages"), "ENCODER", "fake")
    where = ["facts", "--parallel", parallel, "--out", out]
    speak(recipe, monkeypatch, "languages", *where)
    without = json.loads(out.read_text())
    assert set(without) == {"encoder", "languages"}
    speak(recipe, monkeypatch, "languages", *where, "--encoder", "fake", "other")
    found = json.loads(out.read_text())
    cosines = found.pop("cosines")
    assert found == without and set(cosines) == {"fake", "other"}
    unit = SpanEncoder().encode(texts["en"])
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    another = float((unit * np.roll(unit, 1, 0)).sum(1).mean())
    expected = {"of_another_text": another, "of_the_tokens_sought": 1}
    assert cosines["fake"]["en"] == pytest.approx(expected, abs=1e-4)
    # One text of three has no vector by this encoder; what cannot be spelt is missing in an answer.
    assert cosines["other"]["en"]["of_the_tokens_sought"] == pytest.approx(2 / 3, abs=1e-4)
    assert cosines["fake"]["zh"]["of_the_tokens_sought"] < 0.9


def test_texts_without_a_vector_count_as_not_recovered(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inverter, encoder = open_inverter(causal=True), OtherEncoder()
    encoder.size = inverter.size
    inverter._encoder = encoder
    texts = ["the old dog ran", "roof", "a red bird", "roof", "猫"]
    spans = inverter.tokenizer.spans(texts)
    by_heart = {
        v.tobytes(): (span, t) for v, span, t in zip(encoder.encode(texts), spans, texts, strict=True)
    }

    def invert(vectors: np.ndarray, **_: Any) -> list[Namespace]:
        assert np.abs(vectors).sum(1).all()  # zeros are refused
        return [Namespace(ids=ids, text=text) for ids, text in (by_heart[v.tobytes()] for v in vectors)]

    measure = recipe("encoders").measure
    sets = {"half": texts[:4], "none": texts[1:2], "unknown": texts[4:]}
    with monkeypatch.context() as patch:
        patch.setattr(inverter, "invert", invert)
        found = measure(inverter, sets, modes=["c8"], unknown=1)
    assert [each["without_vector"] for each in found.values()] == [2, 1, 0]
    for name, share in (("half", 0.5), ("none", 0.0)):
        assert found[name]["c8"] == dict.fromkeys(found[name]["c8"], pytest.approx(share))
    blank = found["unknown"]["c8"]
    assert (blank["f1"], blank["f1_known"]) == (1.0, 0.0)  # not a word that the vocabulary has
    alone = measure(inverter, {"none": texts[1:2]}, modes=["c8", "beam"])[
        "none"
    ]  # not one vector in all sets
    assert set(alone["beam"].values()) == set(alone["c8"].values()) == {0.0}


@pytest.mark.filterwarnings("ignore:.* texts are longer than")
def test_ten_languages_from_text_to_a_table_of_encoders(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "en": "The night train crossed the border before anyone awoke.",
        "de": "Der Nachtzug fuhr über die Grenze, bevor jemand erwachte.",
        "ru": "Ночной поезд пересёк границу, прежде чем кто-либо проснулся.",
    }
    for name, text in texts.items():
        words = text.split()
        turned = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(12)]
        (tmp_path / f"{name}.txt").write_text("\n".join(turned) + "\n", encoding="utf-8")
    parallel = write_parallel(
        tmp_path / "parallel.jsonl", **{name: [text] * 2 for name, text in texts.items()}
    )
    data, lsa = tmp_path / "data", tmp_path / "encoders" / "ten-lsa"
    lsa.parent.mkdir()
    speak(recipe, monkeypatch, "languages", "prepare", *tmp_path.glob("*.txt"), "--out", data)
    speak(recipe, monkeypatch, "encoders", "lsa", "--data", data, "--out", lsa, "--size", 8)
    encoder = load_encoder(lsa, device="cpu")
    assert (np.linalg.norm(encoder.encode(list(texts.values())), axis=1) > 0.99).all()
    where = ["--data", data, "--parallel", parallel, "--lock", tmp_path / "lock"]
    runs = {"lsa": ["--encoder", lsa], "usual": []}
    # With a vocabulary of this size, all of them take long.
    monkeypatch.setattr(recipe("languages"), "MODES", ["c8", "causal"])
    for name, chosen in runs.items():
        speak(
            recipe, monkeypatch, "languages", "train", *chosen, *where, "--out", tmp_path / name, fields=TINY
        )
    capsys.readouterr()
    joined = tmp_path / "ten.json"
    speak(recipe, monkeypatch, "languages", "table", *(tmp_path / name for name in runs), "--out", joined)
    rows = json.loads(joined.read_text())["encoders"]
    assert [(row["encoder"], row["kind"]) for row in rows] == [
        ("ten-lsa", "lsa"),
        ("all-MiniLM-L6-v2", "transformer"),
    ]
    assert [list(row["languages"]) for row in rows] == [["en", "de", "ru"]] * 2
    assert str(tmp_path) not in joined.read_text()
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| encoder | mode | en | de | ru | mean F1 | mean cosine |"
    assert {line.count("|") for line in table} == {8}
    assert [line.split()[1:4:2] for line in table[2:]] == [
        [name, mode] for name in ("ten-lsa", "all-MiniLM-L6-v2") for mode in ("c8", "causal")
    ]


def test_figures_of_ten_languages_are_asked_for_once_an_encoder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "encoders" / "static").mkdir(parents=True)
    assert not any("languages.py" in call[0] for call in asked_by("figures.sh", tmp_path, TEN=""))
    calls = [c for c in asked_by("figures.sh", tmp_path, TEN="ten") if "ten" in c or "languages.py" in c[0]]
    assert [call[1] for call in calls] == ["lsa", "train", "train", "train", "table"]
    lsa, *trained, table = calls
    assert lsa[lsa.index("--out") + 1] == f"{out}/ten-lsa"
    chosen = [call[call.index("--encoder") + 1] for call in trained]
    assert chosen == ["all-MiniLM-L6-v2", f"{out}/encoders/static", f"{out}/ten-lsa"]
    runs = [call[call.index("--out") + 1] for call in trained]
    assert runs == [f"{out}/ten-{Path(name).name}" for name in chosen] and table[2:5] == runs
    assert ["--beside" in call for call in trained] == [True, False, False]


# --- encoders with a vocabulary of their own ------------------------------------------------------


@pytest.fixture(scope="module")
def own_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to prepare for each encoder, passages of other settings than usual, texts to measure on."""
    folder = tmp_path_factory.mktemp("own-words")
    prepare(TEXTS, encoder=SpanEncoder(), out=folder / "data", max_tokens=36, min_tokens=2, kind="passages")
    for i in range(2):
        (folder / f"text{i}.txt").write_text("\n".join(text.replace("\n", " ") for text in CORPUS[i::2]))
    (folder / "texts").mkdir()
    (folder / "texts" / "few.txt").write_text("hello world\nthe old captain and the lazy dog\n")
    return folder


def test_more_encoders_have_a_row_each_in_the_same_table(
    recipe: Any, own_words: Path, checkpoint: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    qwen, gemma = ((tmp_path / name) for name in ("qwen", "gemma"))
    qwen.symlink_to(checkpoint("qwen3"))
    gemma.symlink_to(checkpoint("gemma3"))
    jina = add_code(checkpoint("xlm-roberta"), tmp_path / "jina")
    chosen = [f"{qwen}", f"{gemma}#document", f"{jina}#text-matching"]
    names = ["qwen", "gemma#document", "jina#text-matching"]
    out = tmp_path / "out"
    (out / "static").mkdir(parents=True)
    settings: dict[str, Any] = {
        "where": (own_words / "data", own_words / "texts"), "MORE": " ".join(chosen), "TRUST": "1",
        "CORPUS": f"{own_words}/text*.txt", "FIELDS": " ".join([*TINY, "compile=False"]),
    }  # fmt: skip
    calls = [call for call in asked_by("encoders.sh", tmp_path, **settings) if call[1] != "lsa"]
    usual = ["all-MiniLM-L6-v2", f"{out}/static", f"{out}/lsa"]
    more = [(verb, name) for name in chosen for verb in ("prepare", "train")]
    assert [tuple(call[1:3]) for call in calls[:-1]] == [("train", name) for name in usual] + more
    assert ["--trust-remote-code" in call for call in calls] == [False] * 3 + [True] * 6 + [False]
    runs = [out / f"run-{Path(name).name}" for name in [*usual, *chosen]]
    assert calls[-1][1:-2] == ["table", *map(str, runs)]

    # What the script asked for, done.
    for run in runs[:3]:
        row = {"encoder": run.name, "kind": "another", "size": 3, "sets": {}}
        (run / "figures.json").write_text(json.dumps(row))
    for run in runs[3:]:
        shutil.rmtree(run)
    for script, verb, *words in calls[3:]:
        lock = ["--lock", tmp_path / "lock"] if verb == "train" else []
        speak(recipe, monkeypatch, Path(script).stem, verb, *words, *lock)
    rows = json.loads((out / "encoders.json").read_text())["encoders"]
    assert [row["encoder"] for row in rows[3:]] == names
    for row, name, size in zip(rows[3:], names, (32, 24, 32), strict=True):
        data = PreparedData.open(out / f"data-{name}")
        assert (row["size"], row["vocabulary"], row["steps"]) == (size, data.tokenizer.size, 2)
        assert (data.max_tokens, data.manifest["min_tokens"]) == (36, 2)  # those of the data
        inverter = Inverter.from_pretrained(out / f"run-{name}" / "run" / "model", device="cpu")
        assert inverter.config.model.vocab_size == inverter.tokenizer.size == row["vocabulary"]
        assert row["sets"]["few"].keys() >= {"texts", "characters", *recipe("encoders").MODES}
    assert len({row["vocabulary"] for row in rows[3:]}) == 3
    table = capsys.readouterr().out.splitlines()
    assert sum(f"| qwen | transformer | 32 | {rows[3]['vocabulary']} |" in line for line in table) == 8
    assert str(tmp_path) not in (out / "encoders.json").read_text()


def test_more_encoders_are_refused_in_one_sentence(
    recipe: Any, own_words: Path, checkpoint: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(verb: str, encoder: object, said: str, *words: object) -> None:
        where = ["--data", own_words / "data", "--out", tmp_path / "refused"]
        with pytest.raises(SystemExit, match=said):
            speak(recipe, monkeypatch, "encoders", verb, encoder, *words, *where)

    text, qwen = own_words / "text0.txt", checkpoint("qwen3")
    fails("prepare", add_code(checkpoint("xlm-roberta"), tmp_path / "jina"), "add --trust-remote-code", text)
    fails("prepare", "jinaai/jina-embeddings-v3", "add --trust-remote-code", text)
    fails("prepare", f"{qwen}#query", "joins its prompt .* with the text's first token", text)
    assert not (tmp_path / "refused").exists()
    fails("train", qwen, "see encoders.py prepare", "--texts", own_words / "texts")

    (tmp_path / "out" / "static").mkdir(parents=True)
    for more, corpus, said in (
        ("a/model b/Model", "text.txt", "two encoders are called model"),
        ("some/static", "text.txt", "two encoders are called static"),
        ("a/model", "", "CORPUS"),
    ):
        assert asked_by("encoders.sh", tmp_path, fail="early", MORE=more, CORPUS=corpus) == []
        assert said in capfd.readouterr().err.replace("Model", "model")  # either of the two
    calls = asked_by("encoders.sh", tmp_path, fail="prepare", MORE="a/model", CORPUS="text.txt")
    assert calls[-1][1:4] == ["prepare", "a/model", "text.txt"] and "--trust-remote-code" not in calls[-1]


# --- scripts --------------------------------------------------------------------------------------

# Leaves the figures of what it was asked to train, for which scripts wait.
FAKE = """#!/bin/sh
echo "$@" >> {folder}/asked
echo "{{}}"
for word in "$@"; do
  if [ "$2 $before" = "train --out" ]; then mkdir -p "$word" && echo "{{}}" > "$word/figures.json"; fi
  before=$word
done
[ "$2" != {fail} ]
"""


def asked_by(
    script: str, tmp_path: Path, *, fail: str = "none", where: Sequence[object] = ("data", "texts"),
    **environment: str,
) -> list[list[str]]:  # fmt: skip
    """Run a script with a python that does little but write down what it was asked for."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE.format(folder=tmp_path, fail=fail))
    fake.chmod(0o755)
    (tmp_path / "asked").write_text("")
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", RECIPES / script, *map(str, where), tmp_path / "out"],
        env={**os.environ, **environment, "PATH": path}, cwd=RECIPES.parent, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (fail == "none")
    return [line.split() for line in (tmp_path / "asked").read_text().splitlines()]


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
