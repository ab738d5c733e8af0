"""Looks: beginnings that are written out, the same as by the plainest search that does so."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from beginnings import (
    Text,
    assert_same,
    cosines,
    found,
    guessing,
    next_tokens,
    parts,
    pretend,
    vectors,
)
from reading import CONFIG, END, PAD, T, causal_model
from torch import Tensor

from unembed import beam, choice, looks
from unembed.beam import Beams, look_places
from unembed.choice import LENGTH_POWER
from unembed.decode import DecodeOptions
from unembed.model import Denoiser


@dataclasses.dataclass
class Plain:
    """A search that looks ahead, for one text, as plainly as can be; and how many rows it reads.

    Who `remembers` what was seen need not write it, nor guess its vector, again.
    """

    model: Denoiser
    e: Tensor
    remembers: bool
    seen: list[Text] = dataclasses.field(default_factory=list)
    passes: int = 0

    def chances(self, text: tuple[int, ...]) -> list[float]:
        self.passes += 1
        return next_tokens(self.model, self.e, text, 1.0)

    def written_out(self, text: tuple[int, ...], likelihood: float) -> Text:
        for whole in self.seen if self.remembers else []:
            if whole[0][: len(text)] == text:
                return whole
        while END not in text and len(text) < T:
            chances = self.chances(text)
            token = max(range(len(chances)), key=chances.__getitem__)
            text, likelihood = (*text, token), likelihood + chances[token]
        return text, likelihood

    def guess(self, texts: list[Text]) -> list[float]:
        known = [text for text, _ in self.seen] if self.remembers else []
        self.passes += sum(text not in known for text, _ in texts)
        rows = torch.tensor([[*text, *[PAD] * (T - len(text))] for text, _ in texts])
        near: list[float] = cosines(self.model, self.e, rows[None])[0].tolist()
        return near

    def look(self, texts: list[Text]) -> list[float]:
        """What speaks for beginnings."""
        whole = [self.written_out(*text) for text in texts]
        near = self.guess(whole)
        self.seen += whole
        weight = looks.PROMISE * (sum(len(text) for text, _ in whole) / len(whole)) ** LENGTH_POWER
        return [weight * each for each in near]

    def search(self, beams: int, count: int) -> list[tuple[int, ...]]:
        """All texts that may be chosen."""
        kept: list[Text] = [((), 0.0)]
        promises = [0.0]
        for place in range(T):
            if all(END in text for text, _ in kept):
                break
            if place in look_places(count, T):
                promises = self.look(kept)
            longer: list[tuple[Text, float]] = []
            for (text, likelihood), promise in zip(kept, promises, strict=True):
                more = [] if END in text else enumerate(self.chances(text))
                longer += [(((*text, n), likelihood + gain), promise) for n, gain in more]
                longer += [((text, likelihood), promise)] * (END in text)
            best = sorted(longer, key=lambda beam: -(beam[0][1] + beam[1]))[:beams]
            kept, promises = [text for text, _ in best], [promise for _, promise in best]
        self.guess(kept)
        return [text for text, _ in (*kept, *self.seen)]


@pytest.mark.parametrize("gpu", [False, True])
def test_looking_ahead_is_the_plainest_looking_ahead(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = guessing(layers=2), vectors(6)
    last, blindly = found(model, e, beams=4, looks=3), found(model, e, beams=4)
    for row in range(len(e)):
        plain = Plain(model, e[row : row + 1], remembers=not gpu)
        texts = plain.search(4, 3)
        ids = torch.tensor([[*text, *[PAD] * (T - len(text))] for text in texts])
        assert all(text in ids.tolist() for text in last.ids[row].tolist())
        assert int(last.passes[row]) == plain.passes
    torch.testing.assert_close(last.likeness, cosines(model, e, last.ids))
    assert not torch.equal(last.ids, blindly.ids)
    assert float(last.likeness[:, 0].mean()) > float(blindly.likeness[:, 0].mean())


@pytest.mark.parametrize("gpu", [False, True])
def test_of_all_that_was_seen_the_best_are_returned(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    # Likeness alone counts, so that it can be told which are best; -inf is what stands there twice.
    monkeypatch.setattr(
        choice,
        "rescore",
        lambda ids, score, *, likeness, **_: likeness.masked_fill(score.isneginf(), -math.inf),
    )
    model, e = guessing(layers=2), vectors(6)
    last = found(model, e, beams=4, looks=3)
    for row in range(len(e)):
        texts = set(Plain(model, e[row : row + 1], remembers=False).search(4, 3))
        ids = torch.tensor([[*text, *[PAD] * (T - len(text))] for text in sorted(texts)])
        near = cosines(model, e[row : row + 1], ids[None])[0]
        wanted = ids[near.argsort(descending=True, stable=True)[:4]]
        assert last.ids[row].tolist() == wanted.tolist()


@pytest.mark.parametrize("gpu", [False, True])
def test_a_look_does_not_depend_on_the_vectors_beside_it(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu=gpu)
    model, e = guessing(), vectors(9)
    whole = found(model, e, beams=4, looks=2)
    for row in range(len(e)):
        one = found(model, e[row : row + 1], beams=4, looks=2)
        assert_same(one, Beams(*(x[row : row + 1] for x in parts(whole))))
    monkeypatch.setattr(beam, "ROWS", {"cpu": 16})
    assert_same(found(model, e, beams=4, looks=2), whole)


def test_who_guesses_nothing_looks_at_nothing() -> None:
    model, e = causal_model(), vectors(5)
    assert_same(found(model, e, beams=4, looks=3), found(model, e, beams=4))
    unaware = guessing()
    assert_same(found(unaware, e, beams=4, looks=3, guidance=0.0), found(unaware, e, beams=4, guidance=0.0))


@pytest.mark.parametrize(("embeds", "guidance"), [(False, 1.0), (True, 1.0), (True, 0.0)])
def test_options_know_whether_there_is_anything_to_look_at(embeds: bool, guidance: float) -> None:
    config = dataclasses.replace(CONFIG, causal=True, embeds=embeds)
    fitted = DecodeOptions("beam", beams=5, looks=3, guidance=guidance).fit(config)
    assert (fitted.looks, fitted.rows) == ((3, 10) if embeds and guidance else (0, 5))
