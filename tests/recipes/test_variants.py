"""Variants of the model: each trains, is measured, and differs from the rest in what it says."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recovering import WORDS

from recipes.rehearsal import OtherEncoder, SpanEncoder, open_inverter, run_recipe, with_texts
from unembed import encoders
from unembed.checkpoint import read_weights
from unembed.corpus import PreparedData
from unembed.diffusion import causal_rows
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.run import Run
from unembed.step import masked_loss
from unembed.validation import causal_loss

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
    with_texts(folder, tmp_path, "the small cat sat on the mat", "roof")
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
    with_texts(folder, tmp_path, "the small cat sat on the mat")
    compare = recipe("compare")
    line = run_recipe(compare, tmp_path, monkeypatch, capsys, "some", "--modes", "c8,causal")
    assert set(line["sets"]["few"]) == {"c8", "causal"}
    with pytest.raises(SystemExit):  # before anything is trained
        run_recipe(compare, tmp_path, monkeypatch, capsys, "none", "--modes", "c8,c9")
    assert "unknown c9; there are c8" in capsys.readouterr().err
