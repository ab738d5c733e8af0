"""What a search finds and spends, whatever the seed and the batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from searching.toys import TEXTS, Bigrams, Errs, Places, T, WordsOnly, open_search, refine
from unembed import Inverter, load_encoder, search
from unembed.errors import UnembedError
from unembed.evaluate import evaluate
from unembed.results import Round
from unembed.search import CORRECTIONS, GAIN

# What a search finds


def test_search_finds_the_order_that_drafts_do_not(inverter: Inverter, vectors: np.ndarray) -> None:
    encoder = Bigrams()
    drafts = refine(inverter, vectors, rounds=1, candidates=1)
    found = refine(inverter, vectors, rounds=40, candidates=32, encoder=encoder)
    assert sum(one.text == text for one, text in zip(found, TEXTS, strict=True)) >= 4
    assert sum(one.text == text for one, text in zip(drafts, TEXTS, strict=True)) <= 1
    for one, text, draft in zip(found, TEXTS, drafts, strict=True):
        assert one.ranked_by == "bigrams" and one.cosine is not None and draft.cosine is not None
        assert one.cosine >= draft.cosine
        assert one.exact == (one.text == text) == (one.cosine > 0.9999)
        assert len(one.ids) == len(one.confidences)
    assert sum(one.encoder_calls for one in found) == len(encoder.seen)


def test_a_search_never_ends_below_the_open_loop(inverter: Inverter, vectors: np.ndarray) -> None:
    plain = inverter.invert(vectors, strategy="euler", seed=4)
    assert all((p.cosine, p.exact, p.ranked_by, p.encoder_calls) == (None, None, None, 0) for p in plain)
    drafts = refine(inverter, vectors, strategy="euler", seed=4, budget=1)
    assert [d.text for d in drafts] == [p.text for p in plain]
    found = refine(inverter, vectors, strategy="euler", seed=4)
    assert all((f.cosine or 0) >= (d.cosine or 0) for f, d in zip(found, drafts, strict=True))


def test_what_is_found_leaves_the_search(inverter: Inverter, vectors: np.ndarray) -> None:
    encoder = Bigrams()
    rounds = list(inverter.search(vectors[3], encoder=encoder, rounds=200, seed=0))
    assert rounds[-1].exact and not any(r.exact for r in rounds[:-1])
    assert rounds[-1].text == TEXTS[3] and len(rounds) < 100
    assert rounds[-1].encoder_calls == len(encoder.seen)


def test_a_model_that_says_nothing_is_survived(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = inverter.config.model
    silence = torch.full((T, config.vocab_size), -20.0)
    silence[:, config.end_id] = 20.0
    monkeypatch.setattr(WordsOnly, "hidden", lambda model, xt, e, **_: silence.expand(len(xt), -1, -1))
    encoder = Bigrams()
    for one in refine(inverter, vectors, encoder=encoder):
        assert (one.text, one.ids, one.cosine, one.exact, one.encoder_calls) == ("", [], 0.0, False, 0)
    assert not encoder.seen
    (*_, last) = inverter.search(vectors[0], encoder=encoder, seed=0)
    assert (last.text, last.pool, last.cosine) == ("", [], 0.0)


# What it begins with

# "the" is preferred by more than a token counts for in these texts' vectors, by less than a correction adds.
BEGINNINGS = ["the cat sat", "a red bird ran", "dog and cat ran far"]
PREFERENCE = 0.6


@pytest.fixture
def erring(inverter: Inverter) -> tuple[Inverter, Places, Errs]:
    encoder = Places(inverter.tokenizer)
    config = inverter.config.override(encoder="places", embedding_size=encoder.size)
    model = Errs(config.model, by=PREFERENCE)
    return Inverter(model, config=config, tokenizer=inverter.tokenizer, device="cpu"), encoder, model


def test_a_correction_makes_up_for_what_the_model_always_gets_wrong(
    erring: tuple[Inverter, Places, Errs], monkeypatch: pytest.MonkeyPatch
) -> None:
    inverter, encoder, _ = erring
    vectors = encoder.encode(BEGINNINGS)
    options: dict[str, Any] = {"strategy": "confidence", "steps": 8, "temperature": 0.0}
    plain = inverter.invert(vectors, **options, seed=0)
    assert [p.text for p in plain] == ["the cat sat", "the red bird ran", "the and cat ran far"]
    found = refine(inverter, vectors, encoder=encoder, **options)
    assert [f.text for f in found] == BEGINNINGS
    # What the first draft has right costs nothing more, whatever the others of its batch need.
    assert [f.encoder_calls for f in found] == [1, 2, 2]
    assert all(f.exact for f in found)
    (short,) = refine(inverter, vectors[1], encoder=encoder, **options, budget=1)
    assert (short.text, short.encoder_calls) == ("the red bird ran", 1)
    monkeypatch.setattr(search, "GAIN", 0.0)
    for vector, text in zip(vectors, BEGINNINGS, strict=True):
        first = next(inverter.search(vector, encoder=encoder, **options, pool=1 + CORRECTIONS, seed=0))
        assert first.exact == text.startswith("the") and first.encoder_calls == 1


def test_corrections_add_up_what_was_missed(erring: tuple[Inverter, Places, Errs]) -> None:
    inverter, encoder, model = erring
    model.by = 9.0  # more than any correction makes up for, but they change the drafts' other words
    (vector,) = torch.from_numpy(encoder.encode(BEGINNINGS[1:2]))
    (draft,) = inverter.invert(vector, strategy="confidence", steps=1, temperature=0.0, seed=0)
    model.asked.clear()
    options: dict[str, Any] = {"strategy": "confidence", "steps": 1, "temperature": 0.0, "seed": 0}
    first = next(inverter.search(vector, encoder=encoder, **options))
    miss = vector - torch.from_numpy(encoder.encode([draft.text])[0])
    aims = torch.cat(model.asked).unique(dim=0)
    # All drafts of the same text: the corrections go on in one direction, and what is drawn aims straight.
    assert {text for text, _ in first.pool} == {draft.text}
    expected = torch.stack([vector + GAIN * n * miss for n in range(CORRECTIONS + 1)])
    assert torch.cdist(aims, expected).min(1).values.max() < 1e-5
    assert torch.cdist(expected, aims).min(1).values.max() < 1e-5


@pytest.mark.parametrize("pool", [1, 2, 3, 8])
def test_first_drafts_fill_the_pool_and_no_more(inverter: Inverter, vectors: np.ndarray, pool: int) -> None:
    for number, each in enumerate(
        inverter.search(vectors[0], encoder=Bigrams(), pool=pool, rounds=4, seed=0)
    ):
        assert len(each.pool) <= pool
        assert number or each.encoder_calls <= pool
    assert number == 4 or each.exact


def test_corrections_do_not_depend_on_the_batch(erring: tuple[Inverter, Places, Errs]) -> None:
    inverter, encoder, model = erring
    model.by = 1.7  # some texts need more corrections than others
    vectors = encoder.encode([*BEGINNINGS, *TEXTS])
    whole = refine(inverter, vectors, encoder=encoder, rounds=2, candidates=4, seed=3)
    assert len({one.forward_passes for one in whole}) > 2 and all(one.exact for one in whole)
    for size in (1, 3):
        assert (
            refine(inverter, vectors, encoder=encoder, rounds=2, candidates=4, seed=3, batch_size=size)
            == whole
        )


@pytest.mark.parametrize("pool", [1, 3, 8])
def test_pools_keep_the_embeddings_of_their_texts(inverter: Inverter, vectors: np.ndarray, pool: int) -> None:
    e = nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    for standing in open_search(inverter, pool=pool).run(e):
        full = standing.cosine.isfinite()
        assert full[:, 0].all()
        texts = inverter.tokenizer.decode(standing.ids[full].numpy())
        again = nn.functional.normalize(torch.from_numpy(Bigrams().encode(texts)), dim=1)
        assert torch.allclose(standing.vectors[full], again, atol=1e-5)
        targets = e[:, None].expand_as(standing.vectors)
        assert torch.allclose((standing.vectors * targets).sum(2)[full], standing.cosine[full], atol=1e-5)
        assert torch.allclose(standing.vectors[~full], targets[~full], atol=1e-6)


# What it may spend


@pytest.mark.parametrize("budget", [1, 3, 8, 20, 57])
def test_the_budget_is_never_exceeded(inverter: Inverter, vectors: np.ndarray, budget: int) -> None:
    for vector in vectors:
        encoder = Bigrams()
        (one,) = refine(inverter, vector, encoder=encoder, budget=budget, rounds=30)
        assert len(encoder.seen) == one.encoder_calls <= budget
        assert one.exact or one.encoder_calls == budget


def test_no_text_is_embedded_twice(inverter: Inverter, vectors: np.ndarray) -> None:
    encoder = Bigrams()
    refine(inverter, vectors[2], encoder=encoder, rounds=30)
    assert len(encoder.seen) == len(set(encoder.seen)) > 100


def test_chunks_bound_what_is_computed_at_once(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = refine(inverter, vectors)
    monkeypatch.setattr("unembed.search.ROWS", {"cpu": 5})
    encoder = Bigrams()
    sizes: list[int] = []
    encode, hidden = encoder.encode, WordsOnly.hidden

    def note_encode(texts: Sequence[str], **options: Any) -> np.ndarray:
        sizes.append(len(texts))
        return encode(texts, **options)

    def note_hidden(model: WordsOnly, xt: Tensor, e: Tensor, **options: Any) -> Tensor:
        sizes.append(len(xt))
        return hidden(model, xt, e, **options)

    monkeypatch.setattr(encoder, "encode", note_encode)
    monkeypatch.setattr(WordsOnly, "hidden", note_hidden)
    parts = refine(inverter, vectors, encoder=encoder)
    assert max(sizes) <= 5 and [p.ids for p in parts] == [w.ids for w in whole]


# Seeds, batches, the trajectory


def test_a_seed_gives_the_same_texts_whatever_the_batch(inverter: Inverter, vectors: np.ndarray) -> None:
    whole = refine(inverter, vectors, seed=5)
    assert whole == refine(inverter, vectors, seed=5)
    for size in (1, 2):
        parts = refine(inverter, vectors, seed=5, batch_size=size)
        assert [replace(p, cosine=None) for p in parts] == [replace(w, cosine=None) for w in whole]
        assert [p.cosine for p in parts] == pytest.approx([w.cosine for w in whole], abs=1e-5)
    other = refine(inverter, vectors, seed=6)
    assert [o.encoder_calls for o in other] != [w.encoder_calls for w in whole]
    assert refine(inverter, vectors, seed=None)  # a seed of its own


def test_the_trajectory_rises_to_what_invert_returns(inverter: Inverter, vectors: np.ndarray) -> None:
    for vector in vectors:
        (one,) = refine(inverter, vector, seed=7, candidates=8, pool=4)
        options: dict[str, Any] = {"rounds": 10, "candidates": 8, "pool": 4, "seed": 7}
        rounds: list[Round] = list(inverter.search(vector, encoder=Bigrams(), **options))
        last = rounds[-1]
        assert (last.text, last.cosine, last.encoder_calls) == (one.text, one.cosine, one.encoder_calls)
        assert last.exact == one.exact
        assert [r.index for r in rounds] == list(range(len(rounds))) and {r.total for r in rounds} == {10}
        for before, after in zip(rounds, rounds[1:], strict=False):
            assert after.cosine >= before.cosine and after.encoder_calls >= before.encoder_calls
            tries = sum(count.tries for count in after.moves.values())
            assert tries == after.encoder_calls - before.encoder_calls <= 8
            assert all(c.tries >= max(c.entered, c.improved) for c in after.moves.values())
            improved = sum(count.improved for count in after.moves.values())
            assert (improved > 0) == (after.cosine > before.cosine)
        for each in rounds:
            texts, cosines = zip(*each.pool, strict=True)
            assert len(set(texts)) == len(texts) <= 4 and all(texts)
            assert (texts[0], cosines[0]) == (each.text, each.cosine)
            assert list(cosines) == sorted(cosines, reverse=True)


def test_progress_goes_to_stderr(
    inverter: Inverter, vectors: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    refine(inverter, vectors, show_progress=True, rounds=2)
    out, err = capfd.readouterr()
    assert not out and "inverting (rounds)" in err
    ((done, total),) = re.findall(r"(\d+)/(\d+)", err)[-1:]
    assert done == total


# With the rest of the package


def test_reconstruct_and_evaluate_pass_the_options_on(inverter: Inverter) -> None:
    encoder = Bigrams()
    options: dict[str, Any] = {"refine": "encoder", "rounds": 5, "candidates": 8, "seed": 0}
    found = inverter.reconstruct(TEXTS[:2], encoder=encoder, **options)
    for each in found:
        assert each.inversion.cosine == pytest.approx(each.cosine, abs=1e-5)
        assert each.inversion.encoder_calls > 0
    (record,) = evaluate(TEXTS[:2], inverter=inverter, encoder=encoder, **options)
    assert record.encoder_calls == np.mean([each.inversion.encoder_calls for each in found])
    with pytest.raises(UnembedError, match="pool must be"):
        evaluate(TEXTS[:2], inverter=inverter, encoder=encoder, refine="encoder", pool=0)


def test_the_bundled_model_comes_closer() -> None:
    inverter = Inverter.from_pretrained(device="cpu")
    encoder = load_encoder("all-MiniLM-L6-v2", device="cpu")
    texts = [
        "Nadia painted the hallway green and now regrets it a little.",
        "The old lift stops between floors whenever it rains.",
        "Grandpa keeps spare buttons in a dented biscuit tin.",
    ]
    first, last = [], []
    for vector in encoder.encode(texts):
        options: dict[str, Any] = {"rounds": 2, "candidates": 6, "pool": 2, "steps": 4, "seed": 0}
        rounds = list(inverter.search(vector, encoder=encoder, **options))
        first.append(rounds[0].cosine)
        last.append(rounds[-1].cosine)
        (again,) = encoder.encode([rounds[-1].text])
        assert float(again @ vector) == pytest.approx(last[-1], abs=1e-5)
    assert all(b >= a for a, b in zip(first, last, strict=True)) and sum(last) > sum(first) + 0.01
