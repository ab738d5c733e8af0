"""validation: the same masks every time, and figures that mean what they say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from syllables import ALONE, CONFIG, GUESSING

from unembed.corpus import PreparedData
from unembed.pairs import CachedPairs
from unembed.run import Run
from unembed.train import fit_to_data
from unembed.validation import validate


def test_validation_has_the_same_masks_every_time(data: Path) -> None:
    prepared = PreparedData.open(data)

    def figures(seed: int, *, times: int = 1) -> list[dict[str, float]]:
        run = Run(fit_to_data(CONFIG, prepared), group=ALONE)
        run.config = run.config.override(seed=seed)
        held_out = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu").validation()
        found = []
        for _ in range(times):
            torch.rand(7)  # draws of others do not matter, nor does the step
            run.step += 1
            found.append(validate(run, held_out))
        return found

    first, second = figures(0, times=2)
    assert first == second == figures(0)[0]
    assert first.keys() == {"validation_loss", "token_accuracy", "token_f1"}
    assert 0 <= first["token_accuracy"] <= 1 and 0 <= first["token_f1"] <= 1
    assert first["validation_loss"] == pytest.approx(math.log(52), rel=0.1)  # untrained: any of 52 tokens
    assert figures(1)[0]["validation_loss"] != first["validation_loss"]


@torch.no_grad()
def test_what_is_said_of_guesses_is_their_mean_cosine(data: Path) -> None:
    prepared = PreparedData.open(data)
    run = Run(fit_to_data(CONFIG.override(**GUESSING), prepared), group=ALONE)
    x0, e = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu").validation()
    figures = validate(run, (x0, e))
    assert figures.keys() == {"validation_loss", "token_accuracy", "token_f1", "embed_cosine"}
    model: Any = run.average
    guesses = torch.cat([model.embed(text[None]) for text in x0])
    mean = float(F.cosine_similarity(guesses, e).mean())
    assert figures["embed_cosine"] == pytest.approx(mean, abs=1e-5)
    run.config = run.config.override(embed_share=0.0)
    assert "embed_cosine" not in validate(run, (x0, e))
