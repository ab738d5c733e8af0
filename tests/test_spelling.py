"""Spelling: a table of words says what the tokenizer says, and is asked no word twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import unembed
from unembed import spelling
from unembed.spelling import Speller
from unembed.tokens import TextTokenizer

T = 16
TOKENIZER = TextTokenizer.load(Path(unembed.__file__).parent / "models" / "all-MiniLM-L6-v2")
SPELLER = Speller(TOKENIZER)
LINES = [
    "Don't worry: the re-run's at 3.5% (i.e. mid-ocean), isn't it?",
    "unfairly antidisestablishmentarianism, naïve résumé #ok @home $5 ... !?",
    '東京 Москва "quoted words" and a/b/c [x] {y} e.g. u.s.a.',
    "a",
]
_PLAYING = ("play", "##ing", "playing")
COMMON = sorted({i for ids in TOKENIZER.spans(LINES) for i in ids.tolist()})


def through_text(ids: Tensor) -> Tensor:
    """Spell rows in the plainest way."""
    texts = TOKENIZER.decode(ids.numpy())
    return torch.from_numpy(TOKENIZER.encode(texts, max_tokens=ids.shape[1], allow_empty=True).ids)


def row_of(content: list[int]) -> list[int]:
    """One row in form."""
    return (content + [TOKENIZER.end_id] * (len(content) < T) + [TOKENIZER.pad_id] * T)[:T]


ends = (TOKENIZER.end_id, TOKENIZER.pad_id, TOKENIZER.mask_id)
tokens = st.one_of(st.sampled_from(COMMON), st.integers(0, TOKENIZER.size - 1)).filter(
    lambda i: i not in ends
)


@given(st.lists(st.lists(tokens, max_size=T), min_size=1, max_size=8))
def test_a_table_of_words_spells_as_the_tokenizer_does(rows: list[list[int]]) -> None:
    ids = torch.tensor([row_of(row) for row in rows])
    expected = through_text(ids)
    assert SPELLER.by_word
    assert SPELLER.respell(ids).equal(expected)
    assert SPELLER.respell(ids).equal(expected), "from the table alone"


def test_rows_that_are_spelt_well_stay_and_cost_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.from_numpy(TOKENIZER.encode(LINES, max_tokens=T).ids)
    speller = Speller(TOKENIZER)
    assert speller.respell(ids).equal(ids)
    monkeypatch.setattr(TextTokenizer, "decode", lambda *_: pytest.fail("went through text"))
    assert speller.respell(ids.flip(0)).equal(ids.flip(0))


def test_words_that_others_spell_otherwise() -> None:
    vocabulary = Tokenizer.from_str(TOKENIZER.to_json()).get_vocab()
    play, ing, playing = (vocabulary[token] for token in _PLAYING)
    assert SPELLER.respell(torch.tensor([row_of([ing, play, ing, ing])]))[0, :3].tolist() != [ing, play, ing]
    assert SPELLER.respell(torch.tensor([row_of([play, ing])])).tolist() == [row_of([playing])]
    assert SPELLER.respell(torch.tensor([row_of([])])).equal(torch.tensor([row_of([])]))


def test_the_table_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spelling, "MOST_WORDS", 20)
    speller = Speller(TOKENIZER)
    random = np.random.default_rng(0)
    for _ in range(6):
        rows = torch.tensor([row_of(random.choice(COMMON, 8).tolist()) for _ in range(4)])
        assert speller.respell(rows).equal(through_text(rows))
        assert len(speller._keys) <= 20 + 4 * 8 + 1


def test_other_tokenizers_go_through_text() -> None:
    base = Tokenizer(models.WordPiece({"[PAD]": 0, "[SEP]": 1, "[MASK]": 2, "?": 3, "##!": 4, "!": 5}))
    base.pre_tokenizer = pre_tokenizers.Whitespace()  # to which "?!" is one word
    base.add_special_tokens(["[PAD]", "[SEP]", "[MASK]"])
    tokenizer = TextTokenizer.wrap(base)
    speller = Speller(tokenizer)
    assert not speller.by_word
    ids = torch.tensor([[3, 5, 1, 0]])
    assert speller.respell(ids).tolist() == [[3, 4, 1, 0]]
