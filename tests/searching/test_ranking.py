"""What a search ranks by where the cosine is a guess: the likelihood, or the model's own guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from searching.toys import TEXTS, T, open_causal, open_search
from unembed import Inverter
from unembed.beam import beam_search
from unembed.choice import LENGTH_POWER
from unembed.cli import main
from unembed.errors import UnembedError
from unembed.moves import row_lengths
from unembed.search import LIKELIHOOD, Searcher


def test_likelihood_is_that_of_the_beam_search(
    causal: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    e, config = torch.from_numpy(vectors), causal.config.model
    monkeypatch.setattr("unembed.choice.rescore", lambda ids, score, **_: score)
    *_, beams = beam_search(causal.ready, e, beams=6)
    ids, whose = beams.ids.flatten(0, 1), torch.arange(len(e)).repeat_interleave(6)
    lengths = row_lengths(ids, config).squeeze(1)
    assert len(lengths.unique()) > 3
    tokens = (lengths + 1).clamp(max=T)
    expected = beams.score.flatten() * tokens**LENGTH_POWER / tokens
    rows = torch.arange(len(ids)).flip(0)[::2]
    monkeypatch.setattr("unembed.search.ROWS", {"cpu": 4})
    found = open_search(causal)._likelihood(ids, lengths, rows, e[whose[rows]])
    assert torch.allclose(found[rows], expected[rows], atol=1e-4)
    assert not found[::2].any() and found[rows].all()  # the rows that were not asked for


@pytest.mark.parametrize("refine", ["self", "distilled"])
def test_a_guessed_cosine_is_joined_by_the_likelihood(
    causal: Inverter, vectors: np.ndarray, refine: str
) -> None:
    e = nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    searcher = open_search(causal, refine=refine)
    for standing in searcher.run(e):
        assert standing.cosine.isfinite().equal(standing.score.isfinite())
        assert (standing.score[:, :-1] >= standing.score[:, 1:]).all()
        text, place = standing.cosine.isfinite().nonzero(as_tuple=True)
        ids = standing.ids[text, place]
        lengths = row_lengths(ids, causal.config.model).squeeze(1)
        likelihood = searcher._likelihood(ids, lengths, torch.arange(len(ids)), e[text])
        expected = standing.cosine[text, place] + LIKELIHOOD[refine] * likelihood
        assert torch.allclose(standing.score[text, place], expected, atol=1e-5)
    assert (standing.cosine[:, :-1] < standing.cosine[:, 1:]).any()  # a likelier text won


def test_the_likelihood_costs_a_pass_a_candidate(causal: Inverter, vectors: np.ndarray) -> None:
    e = torch.from_numpy(vectors)
    by_encoder, by_guess = (
        next(open_search(causal, refine=name).run(e)) for name in ("encoder", "distilled")
    )
    assert by_guess.calls.equal(by_encoder.calls)  # the first drafts, of the same draws
    assert by_guess.passes.equal(by_encoder.passes + by_encoder.calls)


def test_what_cannot_come_into_the_pool_is_not_read(
    causal: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = Searcher._likelihood

    def count(self: Searcher, ids: Tensor, lengths: Tensor, rows: Tensor, e: Tensor) -> Tensor:
        read.append(len(rows))
        return plain(self, ids, lengths, rows, e)

    monkeypatch.setattr(Searcher, "_likelihood", count)
    *_, last = open_search(causal, refine="self", rounds=8, candidates=16).run(torch.from_numpy(vectors))
    assert last.score.isfinite().all() and sum(read) < 0.8 * int(last.calls.sum())


def test_the_weight_of_the_likelihood_decides_between_likely_and_near(
    causal: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = torch.from_numpy(vectors)
    *_, near = open_search(causal, refine="distilled").run(e)
    weight = LIKELIHOOD["distilled"]
    monkeypatch.setitem(LIKELIHOOD, "distilled", 100.0)
    *_, likely = open_search(causal, refine="distilled").run(e)
    likelihood = [
        (standing.score[:, 0] - standing.cosine[:, 0]) / weight
        for standing, weight in ((near, weight), (likely, 100.0))
    ]
    assert likelihood[1].mean() > likelihood[0].mean() + 0.5
    assert likely.cosine[:, 0].mean() < near.cosine[:, 0].mean()


@pytest.mark.parametrize("refine", ["encoder", "distilled"])
def test_else_the_cosine_decides(
    inverter: Inverter, causal: Inverter, vectors: np.ndarray, refine: str
) -> None:
    # By the encoder, and by a model that does not read left to right and knows no likelihood.
    *_, last = open_search(causal if refine == "encoder" else inverter, refine=refine).run(
        torch.from_numpy(vectors)
    )
    assert last.score.equal(last.cosine)


def test_ranking_by_likelihood_does_not_depend_on_the_batch(causal: Inverter, vectors: np.ndarray) -> None:
    e = torch.from_numpy(vectors)
    *_, whole = open_search(causal, refine="distilled").run(e)
    for first in range(len(e)):
        *_, one = open_search(causal, refine="distilled").run(e[first : first + 1], first=first)
        assert one.ids[0].equal(whole.ids[first]) and one.calls == whole.calls[first]


def open_guessing(inverter: Inverter, *, taught: bool = True) -> Inverter:
    """One that guesses vectors as well, if it was taught to."""
    return open_causal(inverter, seed=1, embeds=True, embed_share=0.2 * taught)


def test_a_model_may_rank_by_its_own_guesses(inverter: Inverter) -> None:
    guessing = open_guessing(inverter)  # of an encoder that is not at hand
    encoded = inverter.tokenizer.encode(TEXTS, max_tokens=T)

    def guess(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return guessing.model.embed(ids)  # type: ignore[operator]

    e = guess(torch.from_numpy(encoded.ids))
    options: dict[str, Any] = {"strategy": "beam", "beams": 2, "looks": 0, "seed": 0, "refine": "self"}
    drafts = guessing.invert(e, budget=1, **options)
    found = guessing.invert(e, rounds=6, candidates=16, **options)
    for one, target in zip(found, e, strict=True):
        assert (one.ranked_by, one.exact, one.likeness) == ("guessed bigrams", None, None)
        ids = torch.tensor([[*one.ids, guessing.config.model.end_id]])[:, :T]
        assert one.cosine == pytest.approx(float(guess(ids)[0] @ target), abs=1e-4)
    gains = [(f.cosine or 0) - (d.cosine or 0) for f, d in zip(found, drafts, strict=True)]
    assert np.mean(gains) > 0.1
    *_, last = guessing.search(e[0], rounds=6, candidates=16, **options)
    assert (last.text, last.exact) == (found[0].text, False)


def test_a_model_that_guesses_nothing_cannot_rank_itself(
    inverter: Inverter, vectors: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in (inverter, open_guessing(inverter, taught=False)):
        with pytest.raises(UnembedError, match="needs a model that was taught to guess vectors"):
            one.invert(vectors, refine="self")
    open_guessing(inverter).save_pretrained(tmp_path / "taught")
    open_guessing(inverter, taught=False).save_pretrained(tmp_path / "plain")
    np.save(tmp_path / "vectors.npy", vectors)
    search = ["--refine", "self", "--rounds", "1", "--seed", "0", "--device", "cpu", "--json"]
    command = ["invert", str(tmp_path / "vectors.npy"), *search, "--model"]
    main([*command, str(tmp_path / "taught")])
    assert json.loads(capsys.readouterr().out)[0]["ranked_by"] == "guessed bigrams"
    with pytest.raises(SystemExit) as stop:
        main([*command, str(tmp_path / "plain")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "taught to guess vectors" in said and said.count("\n") == 1
