"""The parts of a search: aims, draws, memory, moves, and readers of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import unembed
from searching.toys import SPECIAL, TEXTS, Bigrams, T, WordsOnly, refine
from unembed import Inverter, search
from unembed.decode import DecodeOptions
from unembed.draws import draw, stream_keys
from unembed.errors import UnembedError
from unembed.moves import MOVES
from unembed.reader import Reader
from unembed.search import (
    FURTHEST,
    LARGEST,
    NEVER,
    STRAIGHT,
    _parts,
    aim_beyond,
    choose_moves,
    fill_steps,
    hash_rows,
    mark_fresh,
)
from unembed.tokens import TextTokenizer

GOLDEN = [0.6401547789573669, 0.4761453866958618, 0.556006669998169]


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
