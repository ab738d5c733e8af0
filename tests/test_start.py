"""A run that begins with given weights: its own, another encoder's, a backbone's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import rows_of
from safetensors.torch import load_file
from syllables import (
    ALONE,
    CONFIG,
    GUESSING,
    LEARNING,
    LEFT_TO_RIGHT,
    SIZE,
    FakeEncoder,
    T,
    syllable_tokenizer,
    texts,
)

from unembed.backbone import build
from unembed.checkpoint import read_weights
from unembed.corpus import PreparedData, prepare
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.pairs import CachedPairs
from unembed.run import Run
from unembed.step import masked_loss, train_step
from unembed.train import fit_to_data, train


def test_start_from_begins_with_the_given_weights(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG, data=data, out=tmp_path / "first")
    given = read_weights(first.model)
    train(
        CONFIG.override(learning_rate=0.0, steps=3),
        data=data,
        out=tmp_path / "second",
        start_from=first.model,
    )
    state = load_file(tmp_path / "second" / "state" / "model.safetensors")
    assert state.keys() == given.keys() and all(torch.equal(state[key], given[key]) for key in given)
    with pytest.raises(UnembedError, match="are not of this model"):
        train(CONFIG.override(hidden=64), data=data, out=tmp_path / "third", start_from=first.model)
    assert not (tmp_path / "third").exists()


def test_a_model_may_grow_and_says_the_same_at_first(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG.override(adaln_rank=4), data=data, out=tmp_path / "first")
    small = fit_to_data(CONFIG.override(adaln_rank=4), PreparedData.open(data))
    large = small.override(adaln_rank=6, adaln_diagonal=True)
    models = [Run(config, group=ALONE, start_from=first.model).average for config in (small, large)]
    x0, e = CachedPairs(
        PreparedData.open(data), batch_size=8, validation=4, seed=0, device="cpu"
    ).validation()
    assert torch.equal(*(model(x0, e) for model in models))
    grown = train(large, data=data, out=tmp_path / "second", start_from=first.model)
    weights = read_weights(grown.model)
    assert all(weights[f"blocks.0.modulation.{name}"].any() for name in ("diagonal", "up.weight"))
    assert weights["blocks.0.modulation.up.weight"][:, 4:].any()  # what is new has learnt
    with pytest.raises(UnembedError, match="are not of this model"):  # nothing is cut away
        train(CONFIG.override(adaln_rank=2), data=data, out=tmp_path / "third", start_from=first.model)


def test_a_model_learns_to_read_left_to_right_later(data: Path, tmp_path: Path) -> None:
    first = train(CONFIG.override(steps=20), data=data, out=tmp_path / "first")
    config = CONFIG.override(steps=100, **LEFT_TO_RIGHT)
    second = train(config, data=data, out=tmp_path / "second", start_from=first.model)
    rows = rows_of(tmp_path / "second")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert all({"causal_loss", "causal_f1"} <= row.keys() for row in rows if "validation_loss" in row)
    vectors = PreparedData.open(data).vectors(np.arange(3))
    inverter = Inverter.from_pretrained(second.model)
    found = inverter.invert(vectors, strategy="causal", seed=0)
    assert [i.forward_passes for i in found] == [min(len(i.ids) + 1, inverter.max_tokens) for i in found]


@pytest.fixture(scope="module")
def started(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the encoder `fake`."""
    return train(CONFIG.override(steps=20), data=data, out=tmp_path_factory.mktemp("started") / "run").model


def prepare_other(out: Path, *, name: str = "other", size: int = SIZE) -> Path:
    """Pairs of another encoder, in the same vocabulary."""
    encoder = FakeEncoder(size)
    encoder.name = name
    return prepare(texts(48, 6), encoder=encoder, out=out, max_tokens=T).path


READING = {"projection.w1.weight", "projection.w1.bias"}


@pytest.mark.parametrize(
    ("name", "size", "fresh"),
    [("fake", SIZE, set()), ("other", SIZE, READING), ("other", SIZE + 4, READING), ("fake", 12, READING)],
)
def test_for_another_encoder_only_what_reads_the_vector_is_fresh(
    started: Path, tmp_path: Path, name: str, size: int, fresh: set[str]
) -> None:
    given = read_weights(started)
    config = fit_to_data(CONFIG, PreparedData.open(prepare_other(tmp_path, name=name, size=size)))
    new, run = Run(config, group=ALONE), Run(config, group=ALONE, start_from=started)
    weights = dict(run.model.named_parameters())
    assert weights.keys() == given.keys()
    assert {key for key, w in weights.items() if not torch.equal(w, given[key])} == fresh
    own = dict(new.model.named_parameters())
    assert all(torch.equal(weights[key], own[key]) for key in fresh)  # drawn as in a run from nothing
    assert not torch.equal(weights["projection.w2.weight"], own["projection.w2.weight"])


@pytest.fixture(scope="module")
def guesses(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the encoder `fake` that guesses vectors, too."""
    config = CONFIG.override(steps=20, **GUESSING)
    return train(config, data=data, out=tmp_path_factory.mktemp("guesses") / "run").model


LEARNT = {"vector.weight", "vector.bias", "whole"}


@pytest.mark.parametrize(
    ("start", "name", "size", "fresh"),
    [
        ("started", "fake", SIZE, LEARNT),
        ("started", "other", SIZE, LEARNT | READING),
        ("guesses", "fake", SIZE, set()),
        ("guesses", "other", SIZE, LEARNT | READING),
        ("guesses", "other", SIZE + 4, LEARNT | READING),
        ("guesses", "fake", 12, LEARNT | READING),
    ],
)
def test_guessing_begins_where_nothing_is_told_unless_it_was_learnt_for_this_encoder(
    request: pytest.FixtureRequest, tmp_path: Path, start: str, name: str, size: int, fresh: set[str]
) -> None:
    model: Path = request.getfixturevalue(start)
    given = read_weights(model)
    other = PreparedData.open(prepare_other(tmp_path, name=name, size=size))
    config = fit_to_data(CONFIG.override(**GUESSING), other)
    new, run = Run(config, group=ALONE), Run(config, group=ALONE, start_from=model)
    weights, own = dict(run.model.named_parameters()), dict(new.model.named_parameters())
    assert weights.keys() == own.keys() >= LEARNT
    assert {key for key, w in weights.items() if key not in given or not torch.equal(w, given[key])} == fresh
    # Drawn as in a run from nothing, but for what stands for the vector.
    assert all(torch.equal(weights[key], own[key]) for key in fresh - {"whole"})
    assert given["projection.null"].any()
    assert not fresh or torch.equal(weights["whole"], given["projection.null"])
    assert torch.equal(run.average.whole, run.model.whole)  # type: ignore[arg-type]


def test_a_model_that_is_to_guess_says_the_same_at_first(started: Path, guesses: Path, data: Path) -> None:
    prepared = PreparedData.open(data)
    x0, e = CachedPairs(prepared, batch_size=8, validation=4, seed=0, device="cpu").validation()
    plain, more = (fit_to_data(CONFIG.override(**changes), prepared) for changes in ({}, GUESSING))
    for start in (started, guesses):
        one, two = (Run(config, group=ALONE, start_from=start).average for config in (plain, more))
        assert torch.equal(one(x0, e), two(x0, e))
    # What a model guessed by is dropped where it is not asked for.
    run = Run(plain, group=ALONE, start_from=guesses)
    given, weights = read_weights(guesses), dict(run.model.named_parameters())
    assert given.keys() - weights.keys() == LEARNT
    assert all(torch.equal(weights[key], given[key]) for key in weights)


def test_a_model_learns_to_guess_later(
    started: Path, passages: Path, tmp_path: Path, local: list[str]
) -> None:
    train(LEARNING.override(steps=50), data=passages, out=tmp_path / "run", start_from=started)
    result = train(LEARNING, data=passages, out=tmp_path / "run", resume=True)
    cosines = [row["embed_cosine"] for row in rows_of(tmp_path / "run") if "embed_cosine" in row]
    assert result.steps == 200 and len(cosines) == 4 and cosines[-1] > cosines[0] + 0.1


def test_another_encoder_does_not_make_another_vocabulary_fit(started: Path, data: Path) -> None:
    config = fit_to_data(CONFIG, PreparedData.open(data)).override(encoder="other", vocab_size=60)
    with pytest.raises(UnembedError, match="are not of this model: bias is .* expected"):
        Run(config, group=ALONE, start_from=started)


def test_a_vocabulary_of_the_same_size_is_not_the_same(started: Path, data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(started, tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    a, b, *_ = (token for token in spec["model"]["vocab"] if not token.startswith("["))
    words = spec["model"]["vocab"]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnembedError, match="another vocabulary"):
        train(CONFIG.override(steps=1), data=data, out=tmp_path / "run", start_from=other)
    assert train(CONFIG.override(steps=1), data=data, out=tmp_path / "run", start_from=started).steps == 1


def test_a_resumed_run_needs_no_weights_to_start_from(data: Path, started: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(started, tmp_path / "gone")
    states = []
    for name, start_from in (("one", None), ("two", gone)):
        train(CONFIG.override(steps=2), data=data, out=tmp_path / name, start_from=gone)
        if start_from:
            shutil.rmtree(gone)
        train(CONFIG.override(steps=4), data=data, out=tmp_path / name, resume=True, start_from=start_from)
        states.append((tmp_path / name / "state" / "model.safetensors").read_bytes())
    assert states[0] == states[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_a_model_brought_stays_if_frozen(started: Path, tmp_path: Path, optimizer: str) -> None:
    data, given = prepare_other(tmp_path / "data", size=SIZE + 4), read_weights(started)
    config = CONFIG.override(freeze="backbone", optimizer=optimizer, steps=3)
    with pytest.raises(UnembedError, match="begins with nothing such"):
        train(config, data=data, out=tmp_path / "nothing")
    result = train(config, data=data, out=tmp_path / "run", start_from=started)
    result = train(config.override(steps=6), data=data, out=tmp_path / "run", resume=True)
    learning = {key for key in given if key.startswith("projection.") or "modulation" in key} | {"places"}
    assert {
        "tokens.weight",
        "bias",
        "blocks.0.attention.qkv.weight",
        "blocks.0.up.weight",
    } <= given.keys() - learning
    state = load_file(tmp_path / "run" / "state" / "model.safetensors")
    same = {
        key for key in given if state[key].shape == given[key].shape and torch.equal(state[key], given[key])
    }
    assert same == given.keys() - learning
    inverter = Inverter.from_pretrained(result.model)
    assert len(inverter.invert(PreparedData.open(data).vectors(np.arange(2)), seed=0)) == 2


def test_guessing_is_learnt_even_if_what_a_model_brought_is_frozen(started: Path, data: Path) -> None:
    prepared = PreparedData.open(data)
    config = fit_to_data(CONFIG.override(freeze="backbone", **GUESSING), prepared)
    run = Run(config, group=ALONE, start_from=started)
    before = {key: p.detach().clone() for key, p in run.model.named_parameters()}
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")
    for run.step in range(3):
        run.set_rate()
        train_step(run, pairs, masked_loss)
    changed = {key for key, p in run.model.named_parameters() if not torch.equal(p, before[key])}
    assert LEARNT <= changed and "tokens.weight" not in changed


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random ModernBERT with the vocabulary of the data."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    tokenizer, folder = syllable_tokenizer(), tmp_path_factory.mktemp("lm")
    rope = {"rope_type": "default", "rope_theta": 160_000.0}
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": tokenizer.size,
        "rope_parameters": {"full_attention": dict(rope), "sliding_attention": dict(rope)},
        "pad_token_id": tokenizer.pad_id,
        "mask_token_id": tokenizer.mask_id,
        **{f"{name}_token_id": tokenizer.end_id for name in ("bos", "eos", "cls", "sep")},
    }
    ModernBertForMaskedLM(ModernBertConfig(**values)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("freeze", ["embeddings", "backbone"])
def test_what_is_frozen_stays(freeze: str, masked_lm: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "vocab_size": syllable_tokenizer().size}
    config = CONFIG.override(backbone=str(masked_lm), freeze=freeze, mask_id=2, steps=20, **sizes)
    torch.manual_seed(config.train.seed)
    fresh = build(fit_to_data(config, PreparedData.open(data)).model)
    frozen = {name for name, p in fresh.named_parameters() if not p.requires_grad}
    assert "tokens.weight" in frozen and "projection.w1.weight" not in frozen
    train(config, data=data, out=tmp_path)
    for file in ("model", "average"):
        trained = load_file(tmp_path / "state" / f"{file}.safetensors")
        changed = {name for name, p in fresh.named_parameters() if not torch.equal(p, trained[name])}
        assert not changed & frozen
        assert {"projection.w1.weight", "places", "bias"} - frozen <= changed


def test_a_backbone_of_another_vocabulary(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="prepare the data with the backbone's tokenizer"):
        train(CONFIG.override(backbone="some/model", vocab_size=99), data=data, out=tmp_path)
