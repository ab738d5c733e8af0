"""How to decode, as people say it and as a model can do it; and the draws of a seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from reading import CONFIG, T

from unembed.decode import DecodeOptions, FittedOptions, draw_uniforms
from unembed.errors import UnembedError


@pytest.mark.parametrize(("steps", "length"), [(1, 1), (3, 5), (8, 32)])
def test_a_rows_draws_are_its_own(steps: int, length: int) -> None:
    whole = draw_uniforms(0, 20, steps=steps, length=length, seed=5)
    assert whole.shape == (20, steps, 2, length) and whole.dtype == torch.float32
    assert torch.equal(draw_uniforms(7, 12, steps=steps, length=length, seed=5), whole[7:12])
    assert len(whole.flatten().unique()) > 0.99 * whole.numel()
    assert not torch.equal(draw_uniforms(0, 20, steps=steps, length=length, seed=6), whole)


def test_draws_are_uniform_and_below_one() -> None:
    u = draw_uniforms(0, 500, steps=8, length=32, seed=0).flatten()
    assert 0 <= float(u.min()) and float(u.max()) < 1
    counts = u.mul(16).long().bincount(minlength=16) / len(u)
    torch.testing.assert_close(counts, torch.full((16,), 1 / 16), atol=0.002, rtol=0)


@pytest.mark.parametrize("seed", [-1, 2**128, 1.5, "1", True])
def test_a_seed_is_a_natural_number(seed: Any) -> None:
    with pytest.raises(UnembedError, match="seed must be 0 or more"):
        draw_uniforms(0, 1, steps=1, length=1, seed=seed)


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "eular"}, "did you mean 'euler'"),
        ({"strategy": 8}, "unknown strategy '8'"),
        ({"steps": "8"}, "steps must be a whole number, not '8'"),
        ({"steps": 2.5}, "steps must be a whole number, not 2.5"),
        ({"temperature": "hot"}, "temperature must be 0 or more, not 'hot'"),
        ({"guidance": None}, "guidance must be 0 or more .*not None"),
        ({"remask": "0.5"}, "remask must be between 0 and 1, not '0.5'"),
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"guidance": -1.0}, "guidance must be 0 or more .*not -1"),
        ({"guidance": float("nan")}, "guidance must be"),
        ({"remask": 1.5}, "remask must be between 0 and 1, not 1.5"),
        ({"restart": -0.5}, "restart must be between 0 and 1, not -0.5"),
        ({"reveal": "sine"}, "reveal must be linear or cosine, not 'sine'"),
        ({"beams": 0}, "beams must be a whole number from 1 to 128, not 0"),
        ({"beams": 129}, "beams must be .* not 129"),
        ({"beams": 2.5}, "beams must be .* not 2.5"),
        ({"beams": True}, "beams must be .* not True"),
        ({"looks": -1}, "looks must be a whole number from 0 to 8, not -1"),
        ({"looks": 9}, "looks must be .* not 9"),
        ({"strategy": "beam", "temperature": 0.5}, "beam .* draws nothing; leave temperature out"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnembedError, match=said):
        DecodeOptions(**options)


def test_numbers_may_be_numpy_s() -> None:
    options = DecodeOptions("euler", np.int64(3), np.float32(0.5), beams=np.int16(4))  # type: ignore[arg-type]
    assert options == DecodeOptions("euler", 3, 0.5, beams=4)
    drawn = [draw_uniforms(0, 2, steps=1, length=3, seed=seed) for seed in (7, np.int64(7))]  # type: ignore[arg-type]
    assert torch.equal(*drawn)


def test_options_meet_a_model() -> None:
    reading = dataclasses.replace(CONFIG, causal=True)
    short = dataclasses.replace(CONFIG, max_tokens=5)
    for options, config, strategy, steps in (
        (DecodeOptions(), CONFIG, "confidence", 8),
        (DecodeOptions(), short, "confidence", 5),
        (DecodeOptions(), reading, "beam", T),
        (DecodeOptions(temperature=0.5), reading, "causal", T),
        (DecodeOptions(steps=3), reading, "confidence", 3),
        (DecodeOptions("euler"), reading, "euler", 8),
        (DecodeOptions("beam", 3), reading, "beam", T),
    ):
        fitted = options.fit(config)
        assert (fitted.strategy, fitted.steps) == (strategy, steps)
        assert fitted.fit(config) == fitted  # what is settled stays
    knobs: dict[str, Any] = {"guidance": 2.0, "remask": 0.2, "restart": 0.3, "reveal": "cosine", "beams": 3}
    fitted = DecodeOptions(temperature=0.7, **knobs).fit(reading)
    assert fitted == FittedOptions("causal", T, 0.7, **knobs, looks=0)
    for steps in (0, T + 1):
        with pytest.raises(UnembedError, match=f"steps must be between 1 and {T} .*not {steps}"):
            DecodeOptions(steps=steps).fit(reading)
    with pytest.raises(UnembedError, match="does not read left to right, as beam does"):
        DecodeOptions("beam").fit(CONFIG)
