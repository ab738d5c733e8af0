"""What a search refuses, in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from searching.toys import Bigrams, E, refine
from unembed import Inverter
from unembed.cli import main
from unembed.errors import UnembedError
from unembed.search import SearchOptions


@pytest.mark.parametrize("name", ["rounds", "candidates", "pool", "budget"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_bad_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(UnembedError, match=f"{name} must be a whole number of at least 1, not {value}"):
        SearchOptions(**{name: value})


def test_a_bad_refine_is_named(inverter: Inverter, vectors: np.ndarray) -> None:
    with pytest.raises(UnembedError, match="unknown refine 'encoders'; did you mean 'encoder'"):
        inverter.invert(vectors, refine="encoders")  # type: ignore[arg-type]
    with pytest.raises(UnembedError, match="search takes one vector, not 5; use invert for many"):
        inverter.search(vectors)


def test_an_encoder_that_does_not_fit_is_named(inverter: Inverter, vectors: np.ndarray) -> None:
    other = Bigrams()
    other.size = E + 1
    with pytest.raises(UnembedError, match=f"gives vectors of {E + 1} numbers"):
        refine(inverter, vectors, encoder=other)
    other = Bigrams()
    other.name = "trigrams"
    with pytest.raises(UnembedError, match="ranked by trigrams, but this model inverts vectors of bigrams"):
        refine(inverter, vectors, encoder=other)
    with pytest.raises(UnembedError, match="refine='encoder' needs the encoder bigrams at hand"):
        refine(inverter, vectors, encoder=None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rounds", "5"], "--rounds concerns a search; add --refine encoder, or leave it out."),
        (["--refine", "encoder", "--budget", "0"], "budget must be a whole number of at least 1, not 0."),
        (
            ["--refine", "decoder"],
            "unknown refine 'decoder'; did you mean 'encoder'? Known: encoder, self, distilled.",
        ),
    ],
)
@pytest.mark.parametrize("command", ["reconstruct", "invert", "evaluate"])
def test_the_command_line_says_the_same(
    command: str, options: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "nothing.npy", *options])
    assert end.value.code == 2 and capfd.readouterr().err == f"unembed: {sentence}\n"
