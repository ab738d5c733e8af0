"""pairs: every batch a pure function of (seed, step), whole or in slices, and never a held-out text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tabled import TabledEncoder
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from unembed.corpus import PreparedData, prepare
from unembed.encoders import LocalEncoder, load_encoder
from unembed.errors import UnembedError
from unembed.pairs import LONGEST_WORD, SWAPPED, CachedPairs, FreshSpans, Pairs, step_generator
from unembed.tokens import TextTokenizer

T, SIZE, WHOLE = 8, 16, slice(None)
SYLLABLES = [c + v for c in "bdgkm" for v in "aeiou"]
FIRST, HELD_OUT = "za", "zo"  # the word that every passage begins with; one that only held-out texts have
CHANGED = pytest.mark.parametrize(
    "shares",
    [{}, {"rare_share": 1.0}, {"splice_share": 1.0}, {"swap_share": 1.0}],
    ids=["as-is", "rare", "spliced", "swapped"],
)


def syllable_tokenizer() -> TextTokenizer:
    """Build a vocabulary of syllables, each as a word's beginning and as what follows one."""
    tokens = ["[PAD]", "[SEP]", "[MASK]", FIRST, HELD_OUT, *SYLLABLES, *(f"##{s}" for s in SYLLABLES)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer.wrap(tokenizer, name="syllables")


TOKENIZER = syllable_tokenizer()


class FakeEncoder(TabledEncoder):
    """A random vector for each token at each place."""

    def __init__(self) -> None:
        table = torch.randn(64, T, SIZE, generator=torch.Generator().manual_seed(0))
        super().__init__(table, TOKENIZER)


def words(rng: np.random.Generator, count: int) -> str:
    """Return so many words of one to three syllables."""
    return " ".join("".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(count))


@pytest.fixture(scope="module")
def pairs_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """50 different texts in shards of 16."""
    rng = np.random.default_rng(0)
    texts = [f"{SYLLABLES[k % 25]} {words(rng, 3)}" for k in range(50)]
    return prepare(
        texts, encoder=FakeEncoder(), out=tmp_path_factory.mktemp("pairs"), max_tokens=T, shard_size=16
    )


@pytest.fixture(scope="module")
def passages_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Passages of 1 to 40 words; only the last five hold the word HELD_OUT, and they hold no other."""
    rng = np.random.default_rng(1)
    texts = [f"{FIRST} {words(rng, length)}" for length in (*range(1, 6), *range(20, 41))]
    texts += [" ".join([HELD_OUT] * length) for length in (3, 7, 8, 9, 30)]
    folder = tmp_path_factory.mktemp("passages")
    return prepare(texts, encoder=FakeEncoder(), out=folder, max_tokens=T, kind="passages", shard_size=9)


def cached(data: PreparedData, **changes: Any) -> CachedPairs:
    """Open the pairs with five held out."""
    return CachedPairs(data, **{"batch_size": 9, "validation": 5, "seed": 3, "device": "cpu", **changes})


def fresh(data: PreparedData, **changes: Any) -> FreshSpans:
    """Open the passages with five held out."""
    values = {"encoder": FakeEncoder(), "batch_size": 16, "validation": 5, "seed": 3, "device": "cpu"}
    return FreshSpans(data, **{**values, **changes})


def lengths_of(ids: Tensor) -> Tensor:
    """Content tokens of each row, checked to be followed by one end and then padding."""
    ends, pads = ids == TOKENIZER.end_id, ids == TOKENIZER.pad_id
    lengths = T - (ends | pads).sum(1)
    places = torch.arange(T)
    assert torch.equal(ends, places == lengths[:, None])
    assert torch.equal(pads, places > lengths[:, None])
    return lengths


# --- the generator --------------------------------------------------------------------------------


def test_draws_depend_on_seed_step_and_stream() -> None:
    def draw(seed: int, step: int, stream: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=step_generator(seed, step, stream=stream)).tolist())

    assert draw(1, 2, 0) == draw(1, 2, 0)
    keys = [(seed, step, stream) for seed in range(3) for step in range(50) for stream in range(3)]
    assert len({draw(*key) for key in keys}) == len(keys)


# --- cached ---------------------------------------------------------------------------------------


def epoch(pairs: CachedPairs, number: int) -> list[tuple[int, ...]]:
    """Return the rows of an epoch in their order: 45 of them, five batches of nine."""
    parts = [pairs.batch(step, WHOLE)[0] for step in range(number * 5, number * 5 + 5)]
    return [tuple(row) for row in torch.cat(parts).tolist()]


def test_an_epoch_has_every_training_pair_once_in_a_new_order(pairs_data: PreparedData) -> None:
    pairs = cached(pairs_data)
    training = sorted(tuple(row) for row in pairs_data.ids(np.arange(45)).tolist())
    assert len(set(training)) == 45
    orders = [epoch(pairs, number) for number in range(4)]
    assert all(sorted(order) == training for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("batch_size", [7, 45, 100])
def test_batches_may_span_epochs(pairs_data: PreparedData, batch_size: int) -> None:
    pairs = cached(pairs_data, batch_size=batch_size)
    rows = torch.cat([pairs.batch(step, WHOLE)[0] for step in range(-(-135 // batch_size))])[:135]
    expected = [row for number in range(3) for row in epoch(cached(pairs_data), number)]
    assert [tuple(row) for row in rows.tolist()] == expected


def test_cached_ids_keep_their_vectors(pairs_data: PreparedData) -> None:
    ids, vectors = cached(pairs_data).batch(3, WHOLE)
    assert (ids.dtype, vectors.dtype) == (torch.int64, torch.float32)
    expected = FakeEncoder().encode_ids(ids, lengths_of(ids))
    torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-3)  # stored in float16


def test_held_out_pairs_are_the_last_and_in_no_batch(pairs_data: PreparedData) -> None:
    pairs = cached(pairs_data)
    ids, vectors = pairs.validation()
    assert np.array_equal(ids.numpy(), pairs_data.ids(np.arange(45, 50)))
    assert np.array_equal(vectors.numpy(), pairs_data.vectors(np.arange(45, 50)))
    held_out = {tuple(row) for row in ids.tolist()}
    assert not held_out & {row for number in range(4) for row in epoch(pairs, number)}


# --- both -----------------------------------------------------------------------------------------


@pytest.fixture(params=["cached", "fresh", "rare", "spliced", "swapped"])
def both(request: pytest.FixtureRequest, pairs_data: PreparedData, passages_data: PreparedData) -> Any:
    """A function that opens one kind, then the other, as it is and in the ways its rows may be changed."""
    if request.param == "cached":
        return lambda **changes: cached(pairs_data, **changes)
    names = {"rare": "rare_share", "spliced": "splice_share", "swapped": "swap_share"}
    shares = {names[request.param]: 0.5} if request.param in names else {}
    return lambda **changes: fresh(passages_data, **shares, **changes)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Tell whether two batches are bit for bit the same."""
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_a_batch_is_a_pure_function_of_seed_and_step(both: Any) -> None:
    pairs: Pairs = both()
    forward = [pairs.batch(step, WHOLE) for step in range(12)]
    other: Pairs = both()
    for step in (11, 0, 7, 3, 4):  # no matter what was asked for before
        assert same(other.batch(step, WHOLE), forward[step])
    assert not same(both(seed=4).batch(0, WHOLE), forward[0])


@pytest.mark.parametrize("world", [2, 3])
def test_slices_make_up_the_whole(both: Any, world: int) -> None:
    pairs: Pairs = both(batch_size=10)
    for step in range(8):
        ids, vectors = pairs.batch(step, WHOLE)
        cuts = [10 * rank // world for rank in range(world + 1)]
        parts = [pairs.batch(step, slice(a, b)) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat([part[0] for part in parts]), ids)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), vectors)


def test_tokens_are_bounded(both: Any) -> None:
    pairs: Pairs = both(batch_size=400)
    bound = pairs.most_tokens(400)
    most = max(int((pairs.batch(step, WHOLE)[0] != TOKENIZER.pad_id).sum()) for step in range(60))
    assert most <= bound <= 400 * T
    if isinstance(pairs, FreshSpans):  # a batch is drawn at random: it is never all long rows
        assert bound < 1.05 * most and bound < 0.99 * 400 * T
    assert [pairs.most_tokens(rows) for rows in (0, 1)] == [0, T]


def test_too_few_texts(both: Any) -> None:
    with pytest.raises(UnembedError, match="kept for validation; prepare more text or lower --validation"):
        both(validation=50)


def test_the_other_kind(pairs_data: PreparedData, passages_data: PreparedData) -> None:
    with pytest.raises(UnembedError, match="holds passages without vectors; train with --pairs fresh"):
        cached(passages_data)
    with pytest.raises(UnembedError, match="holds ready pairs; train with --pairs cached"):
        fresh(pairs_data)


# --- fresh ----------------------------------------------------------------------------------------


def test_spans_are_pieces_of_one_passage_from_a_words_start(passages_data: PreparedData) -> None:
    tokenizer, spans = passages_data.tokenizer, fresh(passages_data)
    bounds = list(zip(passages_data.offsets, passages_data.offsets[1:], strict=False))
    passages = [passages_data.tokens[a:b].tolist() for a, b in bounds]
    pieces = {
        tuple(passage[begin:end])
        for passage in passages
        for begin in range(len(passage))
        if tokenizer.word_start[passage[begin]]
        for end in range(begin + 1, min(begin + T, len(passage)) + 1)
    }
    ids = torch.cat([spans.batch(step, WHOLE)[0] for step in range(60)])
    lengths = lengths_of(ids)
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        assert tuple(row[:length]) in pieces
    assert lengths.max() == T and lengths.min() < 4  # some passages are shorter than the shortest cut


def test_spans_end_anywhere_but_mostly_run_on(passages_data: PreparedData) -> None:
    spans = fresh(passages_data, batch_size=4000, seed=0)
    full = lengths_of(spans.batch(0, WHOLE)[0]) == T
    # Three quarters run as far as they may, of which a few meet the passage's end.
    assert 0.6 < full.float().mean() < 0.8


def test_about_half_of_the_spans_start_where_the_passage_starts(passages_data: PreparedData) -> None:
    ids, _ = fresh(passages_data, batch_size=4000).batch(0, WHOLE)
    vocabulary = passages_data.tokenizer
    first = vocabulary.encode([FIRST], max_tokens=T).ids[0, 0]
    share = (ids[:, 0] == first).float().mean()
    # A fifth of the passages are so short that a draw from anywhere often meets their start, too.
    assert 0.48 < share < 0.65
    assert len(ids[:, 0].unique()) > 20


def test_no_batch_comes_twice(passages_data: PreparedData) -> None:
    keys = {
        fresh(passages_data, batch_size=8, seed=seed).batch(step, WHOLE)[0].numpy().tobytes()
        for seed in range(3)
        for step in range(400)
    }
    assert len(keys) == 3 * 400


@CHANGED
def test_held_out_passages_are_never_drawn(passages_data: PreparedData, shares: dict[str, float]) -> None:
    spans = fresh(passages_data, batch_size=4000, **shares)
    word = int(passages_data.tokenizer.encode([HELD_OUT], max_tokens=T).ids[0, 0])
    assert not (spans.batch(0, WHOLE)[0] == word).any()
    ids, vectors = spans.validation()
    lengths = lengths_of(ids)
    assert lengths.tolist() == [3, 7, 8, 8, 8]
    assert all((row[:n] == word).all() for row, n in zip(ids, lengths, strict=True))
    torch.testing.assert_close(vectors, FakeEncoder().encode_ids(ids, lengths))


@CHANGED
def test_fresh_vectors_are_those_of_the_spans(passages_data: PreparedData, shares: dict[str, float]) -> None:
    ids, vectors = fresh(passages_data, **shares).batch(5, WHOLE)
    torch.testing.assert_close(vectors, FakeEncoder().encode_ids(ids, lengths_of(ids)))


@CHANGED
def test_fresh_vectors_of_minilm_are_those_of_the_text(tmp_path: Path, shares: dict[str, float]) -> None:
    encoder = cast("LocalEncoder", load_encoder("all-MiniLM-L6-v2", device="cpu"))
    passages = [
        "The night train crossed the border before anyone had finished the first game of cards.",
        "Her accountant found 14 unexplained transactions, all of them below the reporting threshold!",
        "Unbelievably, the photosynthesis experiment outperformed the hydroponic one (by 3.5 percent).",
        "Held out.",
    ]
    data = prepare(passages, encoder=encoder, out=tmp_path, max_tokens=T, kind="passages")
    spans = fresh(data, encoder=encoder, batch_size=24, validation=1, seed=0, **shares)
    ids, vectors = spans.batch(0, WHOLE)
    texts = data.tokenizer.decode(ids.numpy())
    # A span that ends inside a word may be other tokens when read again: its vector is of the ids.
    again = data.tokenizer.encode(texts, max_tokens=T).ids
    kept = np.flatnonzero((again == ids.numpy()).all(1))
    assert len(kept) >= 16
    expected = encoder.encode([texts[k] for k in kept])
    assert np.abs(vectors.numpy()[kept] - expected).max() < 1e-4


# --- spliced --------------------------------------------------------------------------------------


def contents(spans: FreshSpans, step: int = 0) -> list[tuple[int, ...]]:
    """Content of each row of a batch."""
    ids, _ = spans.batch(step, WHOLE)
    return [tuple(row[:n]) for row, n in zip(ids.tolist(), lengths_of(ids).tolist(), strict=True)]


def splices(first: tuple[int, ...], second: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """All rows that begin with the first span up to a word and go on with the second, and where they do."""
    starts = TOKENIZER.word_start
    return {(first[:k] + second)[:T]: k for k in range(4, len(first)) if starts[first[k]]}


def test_a_spliced_row_is_a_beginning_and_another_span(passages_data: PreparedData) -> None:
    """Which spans are drawn does not depend on the share, so a row can be held against what it is made of."""
    plain = contents(fresh(passages_data, batch_size=2000))
    rows = contents(fresh(passages_data, batch_size=2000, splice_share=1.0))
    cuts, could = [], 0
    for row, own, before in zip(rows, plain, [plain[-1], *plain], strict=False):
        possible = splices(own, before)
        could += bool(possible)
        if row in possible:
            cuts.append(possible[row])
        else:  # too short, or the place that was drawn lies in a word that begins too early
            assert row == own
    assert max(map(len, rows)) == T
    assert 0.75 * could < len(cuts) < len(rows)
    assert {4, 5, 6, 7} == set(cuts)
    # Rows that were short anyhow are cut as often as others, and lengthened by it.
    short = [i for i, own in enumerate(plain) if len(own) < T and splices(own, plain[i - 1])]
    changed = [i for i in short if rows[i] != plain[i]]
    assert len(short) > 100 and len(changed) > 0.75 * len(short)
    assert all(len(rows[i]) > len(plain[i]) or len(plain[i - 1]) < T for i in changed)


def test_the_share_of_spliced_rows(passages_data: PreparedData) -> None:
    plain, some, all_ = (
        contents(fresh(passages_data, batch_size=4000, splice_share=share)) for share in (0.0, 0.3, 1.0)
    )
    assert plain == contents(fresh(passages_data, batch_size=4000))
    spliced = [row for row in range(4000) if all_[row] != plain[row]]
    chosen = [row for row in spliced if some[row] != plain[row]]
    assert 0.27 < len(chosen) / len(spliced) < 0.33
    # The share decides which rows are spliced and nothing else.
    assert all(some[row] == (all_ if row in set(chosen) else plain)[row] for row in range(4000))


def test_passages_of_one_word_stay_whole(tmp_path: Path) -> None:
    """Cut before their word, they would be the row before once more."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(SYLLABLES, 12)) for _ in range(40)]
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    plain, spliced = (contents(fresh(data, batch_size=200, splice_share=share)) for share in (0.0, 1.0))
    assert spliced == plain


# --- swapped --------------------------------------------------------------------------------------


Word = tuple[int, ...]


def word_list(row: Word) -> list[Word]:
    """Words of a row: what opens one, and all up to the next that does."""
    begins = [k for k, token in enumerate(row) if TOKENIZER.word_start[token] or not k]
    return [row[a:b] for a, b in zip(begins, [*begins[1:], len(row)], strict=True)]


def training_words(data: PreparedData, *, validation: int = 5) -> Counter[Word]:
    """How often each word stands in the passages that are not kept aside."""
    offsets = data.offsets[: len(data.offsets) - validation]
    passages = [tuple(data.tokens[a:b].tolist()) for a, b in zip(offsets, offsets[1:], strict=False)]
    return Counter(word for passage in passages for word in word_list(passage))


@pytest.mark.parametrize("splice_share", [0.0, 0.5])
def test_words_are_swapped_for_words_of_as_many_tokens_of_training_passages(
    passages_data: PreparedData, splice_share: float
) -> None:
    """Which spans are drawn does not depend on the share, so a row can be held against what it was."""
    plain, rows = (
        contents(fresh(passages_data, batch_size=6000, splice_share=splice_share, swap_share=share))
        for share in (0.0, 1.0)
    )
    seen, found = Counter[int](), {size: Counter[Word]() for size in (1, 2, 3)}
    for own, row in zip(plain, rows, strict=True):
        assert len(own) == len(row)
        # Words begin where they did, so that each can be held against the one before.
        assert [len(word) for word in word_list(own)] == [len(word) for word in word_list(row)]
        for before, word in zip(word_list(own), word_list(row), strict=True):
            seen[len(word)] += 1
            if word != before:
                found[len(word)][word] += 1
    training = training_words(passages_data)
    assert {len(word) for word in training} == {1, 2, 3}
    for size, swapped in found.items():
        words = {word for word in training if len(word) == size}
        assert swapped.keys() <= words  # whole words, and no other
        # Each is as likely as any, whether it is frequent or not; one may also be drawn for itself.
        each = swapped.total() / len(words)
        assert swapped.total() / seen[size] == pytest.approx(SWAPPED * (1 - 1 / len(words)), rel=0.1)
        assert len(words) * (1 - np.exp(-each)) == pytest.approx(len(swapped), rel=0.05)
    assert min(found[1].values()) > 0.25 * found[1].total() / len(found[1])


def test_the_longest_words_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join("".join(rng.choice(SYLLABLES, n)) for n in (4, 5, 4, 6)) for _ in range(60)]
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    plain, rows = (contents(fresh(data, batch_size=2000, swap_share=share)) for share in (0.0, 1.0))
    changed = Counter[int]()
    for own, row in zip(plain, rows, strict=True):
        changed.update(len(a) for a, b in zip(word_list(own), word_list(row), strict=True) if a != b)
    # There are no shorter ones that what a row's end leaves of a word could be swapped for.
    assert set(changed) == {LONGEST_WORD} == {4} and changed[4] > 100


def test_a_rare_word_is_drawn_as_often_as_a_frequent_one(tmp_path: Path) -> None:
    texts = ["bada dabi kuma", *["baba baba baba"] * 50, HELD_OUT]
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    rows = contents(fresh(data, batch_size=4000, validation=1, swap_share=1.0))
    found = Counter(word for row in rows for word in word_list(row))
    (_, frequent), *rare = found.most_common()
    assert frequent > 0.8 * found.total() and len(rare) == 3
    expected = found.total() * (SWAPPED / 4 + (1 - SWAPPED) / 51 / 3)  # and where they stand themselves
    assert [count for _, count in rare] == pytest.approx([expected] * 3, rel=0.2)


def test_passages_with_rare_words_are_drawn_more_often(tmp_path: Path) -> None:
    """By the mean of one over the root of how often their tokens are there; in a share of the rows."""
    texts = [*["baba baba"] * 400, *["dada dada"] * 100, "gaga gaga", *["kaka kaka"] * 5]
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    tokens = {data.tokens[data.offsets[k]]: weight for k, weight in ((0, 400), (400, 100), (500, 1))}
    for share in (0.0, 0.5, 1.0):
        rows = contents(fresh(data, batch_size=20_000, rare_share=share))
        found = Counter(row[0] for row in rows)
        # Each token of a text is there twice; what is there less than 20 times counts as if it were so often.
        rare = {token: many * (2 * many if many > 10 else 20) ** -0.5 for token, many in tokens.items()}
        for token, many in tokens.items():
            expected = (1 - share) * many / 501 + share * rare[token] / sum(rare.values())
            assert found[token] / len(rows) == pytest.approx(expected, abs=0.015), (share, many)
    assert set(found) == set(tokens)  # what is kept aside is not drawn, nor does it count


def test_words_of_passages_kept_aside_are_never_swapped_in(tmp_path: Path) -> None:
    """They are made of other syllables, in words of all lengths."""
    rng = np.random.default_rng(0)

    def text(syllables: list[str]) -> str:
        return " ".join("".join(rng.choice(syllables, n)) for n in rng.integers(1, 5, 12))

    texts = [text(SYLLABLES[:15]) for _ in range(40)] + [text(SYLLABLES[15:]) for _ in range(5)]
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    kept_aside = set(data.tokens[data.offsets[40] :].tolist())
    rows = contents(fresh(data, batch_size=4000, swap_share=1.0))
    assert len(kept_aside) > 15 and not kept_aside & {token for row in rows for token in row}


def test_the_share_of_rows_with_swapped_words(passages_data: PreparedData) -> None:
    plain, some, all_ = (
        contents(fresh(passages_data, batch_size=4000, swap_share=share)) for share in (0.0, 0.3, 1.0)
    )
    assert plain == contents(fresh(passages_data, batch_size=4000))
    swapped = [row for row in range(4000) if all_[row] != plain[row]]
    chosen = {row for row in swapped if some[row] != plain[row]}
    assert 0.26 < len(chosen) / len(swapped) < 0.34
    # The share decides in which rows words are swapped and nothing else.
    assert all(some[row] == (all_ if row in chosen else plain)[row] for row in range(4000))


def test_swaps_are_drawn_anew_in_every_step(tmp_path: Path) -> None:
    texts = [
        " ".join(SYLLABLES[:4]),
        HELD_OUT,
    ]  # too short for two spans: rows differ in what is swapped alone
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    plain, swapped = (fresh(data, validation=1, swap_share=share) for share in (0.0, 1.0))
    assert len({row for step in range(20) for row in contents(plain, step)}) == 1
    assert len({tuple(contents(swapped, step)) for step in range(20)}) == 20


def test_nothing_is_swapped_where_no_token_tells_that_a_word_begins(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [words(rng, count) for count in (1, 12) for _ in range(20)]  # some as short as a word
    data = prepare(texts, encoder=FakeEncoder(), out=tmp_path, max_tokens=T, kind="passages")
    data.tokenizer.word_start[:] = False
    plain, swapped = (fresh(data, batch_size=400, swap_share=share).batch(0, WHOLE) for share in (0.0, 1.0))
    assert same(plain, swapped)
