"""Recipes that measure: what they write down, and that a model is asked for no more than it can do."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovering import WORDS, FakeEncoder, make_tokenizer
from torch import Tensor

from unembed import encoders
from unembed.config import Config
from unembed.corpus import PreparedData, prepare
from unembed.diffusion import causal_rows
from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.strategies import STRATEGIES
from unembed.train import masked_loss

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
    assert ("causal_loss" in line) == (script in ("compare", "variants") and modes >= LEFT)
    kinds = ("causal_loss", "token_loss", "cross_entropy", "validation_loss")
    loss = next(line[kind] for kind in kinds if kind in line)
    assert loss < math.log(SpanEncoder.tokenizer.size) - 0.05  # better than drawing tokens evenly


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


def test_comparisons_ask_for_what_there_is(recipe: Any, folder: Path) -> None:
    lines = [line.split() for line in (RECIPES / "comparisons.sh").read_text().splitlines()]
    asked = [line[1:] for line in lines if line[:1] == ["train"]]
    assert len({name for _, name, *_ in asked}) == len(asked) > 10
    assert {name for script, name, *_ in asked if script == "variants"} == set(recipe("variants").VARIANTS)
    seen = set()
    for script, name, *fields in asked:
        args = Namespace(fields=fields, data=folder / "data", tiny=False, preset="small", minutes=1.0)
        config, _, _ = recipe("compare").settings(args)
        seen.add(name if script == "variants" else config)
    assert len(seen) == len(asked)  # each differs from the preset, and from the others
