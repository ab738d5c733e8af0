"""Settings: what a preset says survives JSON, and what makes no sense is named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from unembed.config import PRESETS, Config, DiffusionConfig, ModelConfig, TrainConfig, preset, setting_names
from unembed.errors import UnembedError


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    config = preset(name)
    assert Config.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["model"]["layers"] == config.model.layers


def test_json_of_another_kind() -> None:
    good = json.loads(Config().to_json())
    wrong: list[str] = ["", "{", "[]", "3", "null", '"text"', "{}", '{"model": 3, "encoder": "x"}']
    wrong.append(json.dumps({**good, "model": {**good["model"], "colour": "red"}}))
    for text in wrong:
        with pytest.raises(UnembedError, match="not an unembed configuration") as caught:
            Config.from_json(text)
        assert "\n" not in str(caught.value)
    bad_value = json.dumps({**good, "model": {**good["model"], "layers": "12"}})
    with pytest.raises(UnembedError, match="layers must be int, not '12'"):
        Config.from_json(bad_value)


def test_json_without_a_section_has_its_defaults() -> None:
    assert Config.from_json('{"encoder": "mine"}') == Config(encoder="mine")


def test_settings_that_an_older_file_does_not_know_are_off() -> None:
    raw = json.loads(preset("small").to_json())
    settings = {
        "model": ["dropout", "embeds"],
        "diffusion": ["causal_hidden", "embed_share"],
        "train": ["splice_share", "swap_share", "rare_share", "reword_share", "practice_share"],
    }
    for section, names in settings.items():
        for name in names:
            del raw[section][name]
    config = Config.from_json(json.dumps(raw))
    assert all(
        getattr(getattr(config, section), name) == 0 for section in settings for name in settings[section]
    )


def test_override_finds_the_section() -> None:
    config = Config().override(layers=2, schedule="cosine", steps=10, encoder="mine", learning_rate=None)
    assert (config.model.layers, config.diffusion.schedule, config.train.steps) == (2, "cosine", 10)
    assert config.encoder == "mine"
    assert config.train.learning_rate == Config().train.learning_rate
    assert Config().model.layers == 12  # the original is as it was
    assert Config().override() == Config()


def test_override_takes_false_and_zero() -> None:
    config = Config().override(stratified=False, adaln_rank=0, clip=0)
    assert (config.diffusion.stratified, config.model.adaln_rank, config.train.clip) == (False, 0, 0)


def test_no_setting_stands_in_two_sections() -> None:
    names = setting_names()
    assert len(set(names)) == len(names)
    assert {"encoder", "layers", "schedule", "batch_size"} <= set(names)


def test_every_setting_has_help() -> None:
    for section in (ModelConfig, DiffusionConfig, TrainConfig):
        for field in dataclasses.fields(section):
            assert field.metadata["help"], field.name


@pytest.mark.parametrize(
    ("name", "near"), [("layer", "layers"), ("learning-rate", "learning_rate"), ("shedule", "schedule")]
)
def test_unknown_setting_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnembedError, match=f"unknown setting '{name}'; did you mean '{near}'"):
        Config().override(**{name: 1})


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnembedError, match="unknown preset 'mmbert22'; did you mean 'mmbert-22'"):
        preset("mmbert22")
    with pytest.raises(UnembedError, match="unknown preset 'zzz'. Known: tiny, small"):
        preset("zzz")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"condition_dropout": 1.5}, "condition_dropout must be between 0.0 and 1.0, not 1.5"),
        ({"mask_ratio": 0.0}, "mask_ratio must be between 0.01 and 1.0"),
        ({"dropout": 1.0}, "dropout must be between 0.0 and 0.9, not 1.0"),
        ({"causal_hidden": 1.1}, "causal_hidden must be between 0.0 and 1.0, not 1.1"),
        ({"splice_share": -0.1}, "splice_share must be between 0.0 and 1.0, not -0.1"),
        ({"swap_share": 1.1}, "swap_share must be between 0.0 and 1.0, not 1.1"),
        ({"reword_share": 1.1}, "reword_share must be between 0.0 and 1.0, not 1.1"),
        ({"reword_share": -0.1}, "reword_share must be between 0.0 and 1.0, not -0.1"),
        ({"rare_share": 1.1}, "rare_share must be between 0.0 and 1.0, not 1.1"),
        ({"practice_share": 0.5}, "practice_share 0.5 needs a model that reads left to right; set causal"),
        ({"practice_weight": -1.0}, "practice_weight must be at least 0.0, not -1.0"),
        ({"rate": -1.0}, "rate must be at least 0.01"),
        ({"seed": -1}, "seed must be between 0 and 9223372036854775807, not -1"),
        ({"seed": 2**63}, "seed must be between 0 and 9223372036854775807, not 9223372036854775808"),
        ({"layers": 2.0}, "layers must be int, not 2.0"),
        ({"layers": True}, "layers must be int, not True"),
        ({"learning_rate": "fast"}, "learning_rate must be float, not 'fast'"),
        ({"learning_rate": True}, "learning_rate must be float, not True"),
        ({"stratified": 1}, "stratified must be bool, not 1"),
        ({"backbone": 3}, "backbone must be str, not 3"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"freeze": "embedding"}, "unknown freeze 'embedding'; did you mean 'embeddings'"),
        ({"hidden": 100, "heads": 8}, "hidden 100 is not a multiple of heads 8"),
        ({"causal_share": 0.5}, "causal_share 0.5 needs a model that reads left to right; set causal"),
        ({"embed_share": 1.1}, "embed_share must be between 0.0 and 1.0, not 1.1"),
        ({"embed_weight": -1.0}, "embed_weight must be at least 0.0, not -1.0"),
        ({"embed_share": 0.1}, "embed_share 0.1 needs a model that guesses vectors; set embeds"),
        (
            {"causal": True, "causal_share": 0.7, "embeds": True, "embed_share": 0.4},
            "causal_share 0.7 and embed_share 0.4 are more than all rows; lower one of them",
        ),
        ({"backbone": "some/lm", "embeds": True}, "some/lm guesses no vectors; leave embeds out"),
        (
            {"backbone": "some/lm", "embeds": True, "embed_share": 0.1},
            "some/lm guesses no vectors; leave embeds out",
        ),
        ({"backbone": "some/lm", "causal": True}, "some/lm reads in both directions; leave causal out"),
        ({"backbone": "some/lm", "dropout": 0.1}, "some/lm is trained without dropout; leave dropout out"),
    ],
    ids=lambda v: "-".join(f"{k}-{n}" for k, n in v.items()) if isinstance(v, dict) else "",
)
def test_bad_values_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnembedError, match=said) as caught:
        Config().override(**changes)
    assert "\n" not in str(caught.value)


def test_shares_may_be_all_rows_and_a_model_may_guess_without_a_share() -> None:
    both = Config().override(causal=True, embeds=True, causal_share=0.7, embed_share=0.3)
    assert (both.diffusion.causal_share, both.diffusion.embed_share) == (0.7, 0.3)
    assert Config().override(embeds=True, embed_share=1.0).diffusion.embed_share == 1
    assert Config().override(embeds=True).diffusion.embed_share == 0


@pytest.mark.parametrize("name", ["rate", "learning_rate", "condition_dropout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(UnembedError, match=f"{name} must be a finite number, not {value}"):
        Config().override(**{name: value})


def test_a_whole_number_does_for_a_float() -> None:
    assert Config().override(rate=3).diffusion.rate == 3


@pytest.mark.parametrize("section", ["model", "diffusion", "train"])
def test_settings_are_frozen(section: str) -> None:
    part = getattr(Config(), section)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, dataclasses.fields(part)[0].name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().encoder = "other"  # type: ignore[misc]


def test_special_tokens_of_presets_are_in_their_vocabulary() -> None:
    for name in PRESETS:
        model = preset(name).model
        assert max(model.mask_id, model.end_id, model.pad_id) < model.vocab_size
        assert model.mask_id not in (model.end_id, model.pad_id)
