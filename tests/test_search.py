"""The closed loop: it spends what it may, forgets nothing, never falls back, and finds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import unembed
from unembed import Inverter, load_encoder, search
from unembed.backbone import build
from unembed.beam import beam_search
from unembed.choice import LENGTH_POWER
from unembed.cli import main
from unembed.config import Config, ModelConfig
from unembed.decode import DecodeOptions
from unembed.draws import draw, stream_keys
from unembed.errors import UnembedError
from unembed.evaluate import evaluate
from unembed.moves import MOVES, row_lengths
from unembed.reader import Reader
from unembed.results import Inversion, Round
from unembed.search import (
    CORRECTIONS,
    FURTHEST,
    GAIN,
    LARGEST,
    LIKELIHOOD,
    NEVER,
    STRAIGHT,
    Searcher,
    SearchOptions,
    _parts,
    aim_beyond,
    choose_moves,
    fill_steps,
    hash_rows,
    mark_fresh,
)
from unembed.tokens import TextTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]
WORDS = "the a small old red cat dog bird sat ran on under mat roof road today near far and then ##s".split()
TEXTS = [
    "the small cat sat under a roof",
    "a red bird ran near the road",
    "then the old dog ran far today",
    "cat and dog",
    "the bird sat on a mat",
]
T, E = 12, 96
GOLDEN = [0.6401547789573669, 0.4761453866958618, 0.556006669998169]


class Bigrams:
    """An encoder that hears which word follows which; it counts what it is asked."""

    name, size = "bigrams", E

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        rows = np.zeros((len(texts), self.size), np.float32)
        for row, text in zip(rows, texts, strict=True):
            words = ["^", *text.split(), "$"]
            for part in [*words, *zip(words, words[1:], strict=False)]:
                row += np.random.default_rng(list(repr(part).encode())).standard_normal(self.size)
        return rows


class WordsOnly(nn.Module):
    """A model that knows the words of each text and how many there are, but not their order."""

    vectors: Tensor
    logits: Tensor

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, texts: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        vectors = torch.from_numpy(Bigrams().encode(texts))
        self.register_buffer("vectors", nn.functional.normalize(vectors, dim=1))
        encoded = tokenizer.encode(texts, max_tokens=T)
        logits = torch.full((len(texts), T, config.vocab_size), -20.0)
        for row, ids, length in zip(logits, encoded.ids, encoded.lengths, strict=True):
            row[:length, ids[:length]] = 0.0
            row[length:, config.pad_id] = 5.0
            if length < T:
                row[length, config.end_id] = 10.0
        self.register_buffer("logits", logits)

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        nearest = (nn.functional.normalize(e, dim=1) @ self.vectors.T).argmax(1)
        return self.logits[nearest]

    def head(self, h: Tensor) -> Tensor:
        return h


class Places(Bigrams):
    """An encoder that hears which token stands where, the end included, each as a number of its own."""

    name = "places"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self.tokenizer, self.size = tokenizer, T * tokenizer.size

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        encoded = self.tokenizer.encode(texts, max_tokens=T)
        rows = np.zeros((len(texts), T, self.tokenizer.size), np.float32)
        for row, ids, length in zip(rows, encoded.ids, encoded.lengths, strict=True):
            row[np.arange(length + 1), ids[: length + 1]] = 1.0
        flat = rows.reshape(len(rows), -1)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)


class Errs(nn.Module):
    """A model that reads off the vector of `Places` what stands where, but prefers to begin with "the"."""

    def __init__(self, config: ModelConfig, *, by: float) -> None:
        super().__init__()
        self.config, self.by = config, by
        self.asked: list[Tensor] = []

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        self.asked.append(e)
        logits = e.unflatten(1, (T, -1)).clone()
        logits[:, 0, len(SPECIAL) + WORDS.index("the")] += self.by
        return 40 * logits

    def head(self, h: Tensor) -> Tensor:
        return h


@pytest.fixture(scope="module")
def inverter() -> Inverter:
    base = Tokenizer(models.WordPiece({t: i for i, t in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    base.normalizer = normalizers.Lowercase()
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(SPECIAL)
    tokenizer = TextTokenizer.wrap(base)
    config = Config().override(
        encoder="bigrams", max_tokens=T, vocab_size=tokenizer.size, embedding_size=E,
        mask_id=tokenizer.mask_id, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    model = WordsOnly(config.model, tokenizer, TEXTS)
    return Inverter(model, config=config, tokenizer=tokenizer, device="cpu")


def open_causal(inverter: Inverter, *, seed: int = 0, **settings: Any) -> Inverter:
    """One of random weights that reads left to right."""
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "adaln_rank": 0}
    config = inverter.config.override(causal=True, **shape, **settings)
    torch.manual_seed(seed)
    model = build(config.model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return Inverter(model, config=config, tokenizer=inverter.tokenizer, device="cpu")


@pytest.fixture(scope="module")
def causal(inverter: Inverter) -> Inverter:
    return open_causal(inverter)


def open_search(inverter: Inverter, **options: Any) -> Searcher:
    """Search by `Bigrams`, whatever part it plays."""
    settings: dict[str, Any] = {"rounds": 4, "candidates": 8, "seed": 1}
    decoding = DecodeOptions("confidence", 4).fit(inverter.config.model)
    reader = Reader(Bigrams(), inverter.tokenizer)
    return Searcher(
        inverter.ready, reader, inverter.config.diffusion, decoding, SearchOptions(**(settings | options))
    )


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return Bigrams().encode(TEXTS)


def refine(inverter: Inverter, vectors: Any, **options: Any) -> list[Inversion]:
    settings: dict[str, Any] = {"encoder": Bigrams(), "rounds": 10, "candidates": 16, "seed": 0}
    return inverter.invert(vectors, refine="encoder", **(settings | options))


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


# What it ranks by where the cosine is a guess


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


# Its parts


@given(
    st.integers(0, 2**32),
    st.floats(0, 2, allow_nan=False),
    st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=8),
)
def test_aims_lie_beyond_the_target_within_bounds(seed: int, far: float, draws: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    e, way = nn.functional.normalize(torch.randn(2, 16, generator=generator), dim=1)
    found, drawn = (e - far * way).expand(len(draws), -1), torch.tensor(draws)[:, None]
    beyond = aim_beyond(e, found, drawn) - e
    size = beyond.norm(dim=1)
    assert (size <= min(FURTHEST, LARGEST * far) + 1e-5).all()
    # Away from what was found, and no way to a side.
    assert torch.allclose(beyond, size[:, None] * way, atol=1e-5)
    straight = drawn[:, 0] < STRAIGHT
    assert not size[straight].any()
    if far > 1e-3:
        assert (size[drawn[:, 0] > STRAIGHT + 1e-2] > 0).all()


def test_a_share_of_aims_is_straight_and_the_furthest_reach_the_bounds() -> None:
    draws = torch.arange(1000)[:, None] / 1000
    e = torch.tensor([1.0, 0.0, 0.0])
    for far in (0.1, 1.0):
        size = (aim_beyond(e, e - torch.tensor([0.0, far, 0.0]), draws) - e).norm(dim=1)
        assert float((size == 0).float().mean()) == pytest.approx(STRAIGHT, abs=0.002)
        assert float(size.max()) == pytest.approx(min(FURTHEST, LARGEST * far), rel=0.01)
        assert (size.diff() >= -1e-6).all()


def test_where_nothing_is_missed_the_aim_is_the_target() -> None:
    e = nn.functional.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    assert aim_beyond(e, e, torch.full((3, 1), 0.99)).equal(e)


def test_moves_are_filled_for_aims_beyond_the_target(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tensor] = []
    hidden = WordsOnly.hidden

    def note(model: WordsOnly, xt: Tensor, e: Tensor, **options: Any) -> Tensor:
        asked.append(e)
        return hidden(model, xt, e, **options)

    monkeypatch.setattr(WordsOnly, "hidden", note)
    rounds = inverter.search(vectors[0], encoder=Bigrams(), rounds=2, candidates=64, pool=4, seed=0)
    next(rounds)
    first = next(rounds)  # a pool of more than one
    asked.clear()
    next(rounds)
    e = nn.functional.normalize(torch.from_numpy(vectors[0]), dim=0)
    beyond = torch.cat(asked).unique(dim=0) - e
    size = beyond.norm(dim=1)
    assert (size == 0).any() and (size > 0.1).any() and size.max() <= FURTHEST + 1e-5
    pool = nn.functional.normalize(torch.from_numpy(Bigrams().encode([t for t, _ in first.pool])), dim=1)
    along = nn.functional.cosine_similarity(beyond[size > 0.01][:, None], (e - pool)[None], dim=2)
    assert along.max(1).values.min() > 0.999
    assert len(along.argmax(1).unique()) > 1  # away from more than one of the pool


def test_draws_are_uniform_and_no_two_streams_alike() -> None:
    numbers = torch.arange(50)
    keys = torch.stack([stream_keys(seed, numbers, m) for seed in (0, 1, 2**100) for m in (-1, 1, 2)])
    assert len(keys.unique()) == keys.numel()
    draws = draw(keys.flatten(), 0, 200)
    assert draws.min() >= 0 and draws.max() < 1 and len(draws.unique()) > 0.99 * draws.numel()
    counts = torch.histc(draws, bins=10, min=0, max=1) / draws.numel()
    assert (counts - 0.1).abs().max() < 0.005
    for lag in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):  # of a stream, of its neighbours
        assert abs(float(torch.corrcoef(torch.stack([part.flatten() for part in lag]))[0, 1])) < 0.01
    # Any part of any stream can be drawn alone, and golden values stay the same on every machine.
    assert draw(keys[4, 7:9], 30, 5).equal(draw(keys[4], 0, 60)[7:9, 30:35])
    assert draw(stream_keys(3, torch.tensor([5]), 2), 0, 3)[0].tolist() == pytest.approx(GOLDEN)
    with pytest.raises(UnembedError, match="seed must be 0 or more"):
        stream_keys(-1, numbers, 0)
    with pytest.raises(UnembedError, match="seed must be 0 or more, a whole number .* not 1.5"):
        stream_keys(1.5, numbers, 0)  # type: ignore[arg-type]
    assert torch.equal(stream_keys(np.int64(3), numbers, 0), stream_keys(3, numbers, 0))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 32), max_size=40), st.integers(1, 9))
def test_parts_hold_rows_of_the_same_steps(masks: list[int], most: int) -> None:
    masks = sorted(masks, reverse=True)
    parts = list(_parts(masks, most))
    assert [n for a, b in parts for n in range(a, b)] == [n for n, count in enumerate(masks) if count]
    for first, stop in parts:
        assert stop - first <= most and len({fill_steps(count) for count in masks[first:stop]}) == 1


def test_memory_is_bounded_whatever_the_candidates(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = refine(inverter, vectors, candidates=24, rounds=4, budget=60)
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in tree_flatten(out)[0] if isinstance(each, Tensor))
            return out

    def largest(candidates: int) -> int:
        sizes.clear()
        with Watch():
            refine(inverter, vectors, candidates=candidates, rounds=1, budget=100, batch_size=1)
        return max(sizes)

    monkeypatch.setattr("unembed.search.BLOCK", 16)
    monkeypatch.setattr("unembed.search.ROWS", {"cpu": 8})
    monkeypatch.setattr("unembed.search.REMEMBERED", 64)
    largest(32)
    assert largest(256) == largest(32)
    monkeypatch.setattr("unembed.search.REMEMBERED", 2**16)
    # Blocks share the round's parents and draws, so the first blocks make what one block would.
    parts = refine(inverter, vectors, candidates=24, rounds=1, budget=60)
    monkeypatch.undo()
    assert parts == refine(inverter, vectors, candidates=24, rounds=1, budget=60) != whole


def test_what_is_forgotten_is_not_kept_twice(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unembed.search.REMEMBERED", 4)
    encoder = Bigrams()
    for each in inverter.search(vectors[2], encoder=encoder, rounds=15, seed=0):
        texts = [text for text, _ in each.pool]
        assert len(set(texts)) == len(texts)
        assert each.encoder_calls == len(encoder.seen)
    assert len(set(encoder.seen)) < len(encoder.seen)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.sets(st.integers(0, 6)))
def test_only_the_first_of_what_is_new_is_fresh(hashes: list[int], known: set[int]) -> None:
    seen = torch.tensor([sorted(known)], dtype=torch.long).reshape(1, -1)
    valid = torch.tensor([[h != 3 for h in hashes]])
    fresh, after = mark_fresh(torch.tensor([hashes]), valid, seen)
    expected = [h not in known and h != 3 and h not in hashes[:i] for i, h in enumerate(hashes)]
    assert fresh[0].tolist() == expected
    assert sorted({*after[0].tolist()} - {NEVER}) == sorted(known | ({*hashes} - {3}))
    assert after[0].tolist() == sorted(after[0].tolist())


def test_rows_that_differ_have_hashes_that_differ() -> None:
    rows = torch.cartesian_prod(*[torch.arange(8)] * 4)
    assert len(hash_rows(rows).unique()) == len(rows)
    assert (hash_rows(rows) < NEVER).all()


def test_moves_that_pay_are_chosen_more_often() -> None:
    M = len(MOVES)
    tries = torch.full((2, M), 20.0)
    rewards = torch.zeros(2, M)
    rewards[1, 4] = 20.0
    past, spread = torch.stack((tries, rewards)), torch.full((2, 1), 0.5)
    chosen = choose_moves(past, spread, first=0, count=100, total=100)
    even, learnt = (torch.bincount(row, minlength=M) for row in chosen)
    assert even.min() >= 100 // M - 1 and even.max() <= 100 // M + 1
    assert learnt.argmax() == 4 and learnt[4] > 40 and (learnt > 0).all()


def test_only_a_causal_model_rewrites() -> None:
    M, rewrite = len(MOVES), list(MOVES).index("rewrite")
    past, spread = torch.ones(2, 1, M), torch.full((1, 1), 0.5)
    for causal in (True, False):
        chosen = choose_moves(past, spread, first=0, count=500, total=500, causal=causal)
        counts = torch.bincount(chosen[0], minlength=M)
        assert (counts[rewrite] > 0) == causal and (counts > 0).sum() == M - (not causal)


def test_a_causal_model_drafts_and_rewrites_from_left_to_right(
    causal: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    plain = search.decode

    def spy(*args: Any, options: DecodeOptions, **more: Any) -> Any:
        asked.append(options.strategy)
        return plain(*args, options=options, **more)

    monkeypatch.setattr(search, "decode", spy)
    found = refine(causal, vectors)
    assert {"causal", "confidence"} <= set(asked)
    assert [one.text for one in refine(causal, vectors, batch_size=2)] == [one.text for one in found]
    *_, last = causal.search(vectors[0], encoder=Bigrams(), rounds=10, candidates=16, seed=0)
    assert last.text == found[0].text


def test_a_reader_takes_ids_only_of_its_own_vocabulary(inverter: Inverter) -> None:
    class ByIds(Bigrams):
        tokenizer = inverter.tokenizer

        def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
            rows = [row[:n] for row, n in zip(ids.numpy(), lengths, strict=True)]
            return torch.from_numpy(self.encode(inverter.tokenizer.decode(rows)))

    class Refuses(ByIds):
        def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
            raise UnembedError("its prompt is joined with the text")

    encoder = ByIds()
    assert not Reader(Refuses(), inverter.tokenizer).by_ids
    assert Reader(encoder, inverter.tokenizer).by_ids and not Reader(Bigrams(), inverter.tokenizer).by_ids
    vectors = Bigrams().encode(TEXTS)
    one, other = (refine(inverter, vectors, encoder=each, rounds=3) for each in (encoder, Bigrams()))
    assert one == other and encoder.seen
    encoder.tokenizer = TextTokenizer.load(Path(unembed.__file__).parent / "models" / "all-MiniLM-L6-v2")
    assert not Reader(encoder, inverter.tokenizer).by_ids


def test_a_reader_respells_what_no_text_is_spelt_like(inverter: Inverter) -> None:
    tokenizer = inverter.tokenizer
    (ids,) = torch.from_numpy(tokenizer.encode(["cat dog"], max_tokens=T).ids)
    odd = ids.clone()
    odd[0] = SPECIAL.index("[UNK]")
    read = Reader(Bigrams(), tokenizer).respell(torch.stack((ids, odd)))
    assert tokenizer.decode(read.numpy()) == ["cat dog", "dog"]


# Mistakes


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
