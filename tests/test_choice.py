"""Choosing among whole texts: by the plainest arithmetic, whatever the order they come in."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unembed.choice import AGREEMENT, COVERAGE, HEARING, LIKENESS, REPEATS, UNIT, judge, rescore
from unembed.config import ModelConfig
from unembed.metrics import token_f1

T, V = 7, 9
PAD, END, MASK = 0, 1, 2
CONFIG = ModelConfig(max_tokens=T, vocab_size=V, mask_id=MASK, end_id=END, pad_id=PAD)
WORDS = st.lists(st.integers(3, V - 1), max_size=T)


def rows_of(texts: list[list[int]]) -> Tensor:
    """Ids (1, K, T) of texts: their end behind them, then padding."""
    rows = [(text + [END])[:T] for text in texts]
    return torch.tensor([[row + [PAD] * (T - len(row)) for row in rows]])


def plainly(
    texts: list[list[int]], scores: list[float], heard: list[float] | None, likeness: list[float] | None
) -> list[float]:
    """Score texts by loops over their words."""
    own = []
    for text, score in zip(texts, scores, strict=True):
        if heard is not None:
            score += HEARING * sum(heard[word] for word in text) / max(1, len(text))
            score += COVERAGE * sum(math.exp(heard[word]) for word in set(text))
        own.append(score - REPEATS * sum(n - 1 for n in Counter(text).values()) / max(1, len(text)))
    found = []
    for k, text in enumerate(texts):
        others = [j for j in range(len(texts)) if j != k]
        weights = [math.exp((own[j] - max(own)) / UNIT) for j in others]
        # Two texts without a word have none in common; for the metric they are the same.
        f1 = [token_f1(text, texts[j]) if text or texts[j] else 0.0 for j in others]
        agreed = sum(w * each for w, each in zip(weights, f1, strict=True)) / max(sum(weights), 1e-30)
        found.append(own[k] + AGREEMENT * agreed + (LIKENESS * likeness[k] if likeness else 0.0))
    return found


@given(
    texts=st.lists(WORDS, min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    hears=st.booleans(),
    embeds=st.booleans(),
)
def test_it_is_the_plainest_arithmetic(texts: list[list[int]], seed: int, hears: bool, embeds: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand((1, len(texts)), generator=draw) / 4 - 1
    heard = torch.randn((1, V), generator=draw).log_softmax(-1) if hears else None
    likeness = torch.rand((1, len(texts)), generator=draw) * 2 - 1 if embeds else None
    found = rescore(rows_of(texts), scores, heard=heard, likeness=likeness, config=CONFIG)
    told, like = (None if part is None else part[0].tolist() for part in (heard, likeness))
    assert found[0].tolist() == pytest.approx(plainly(texts, scores[0].tolist(), told, like), abs=1e-4)


def test_each_row_is_chosen_for_alone_and_in_any_order() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (4, 5, T), generator=draw)
    score, heard = (
        torch.randn((4, 5), generator=draw) / 5,
        torch.randn((4, V), generator=draw).log_softmax(-1),
    )
    like = torch.rand((4, 5), generator=draw)
    found = rescore(ids, score, heard=heard, likeness=like, config=CONFIG)
    for row in range(4):
        part = slice(row, row + 1)
        alone = rescore(ids[part], score[part], heard=heard[part], likeness=like[part], config=CONFIG)
        torch.testing.assert_close(alone, found[part])
    order = torch.tensor([3, 0, 4, 1, 2])
    again = rescore(ids[:, order], score[:, order], heard=heard, likeness=like[:, order], config=CONFIG)
    torch.testing.assert_close(again, found[:, order])


def test_what_is_no_text_neither_wins_nor_counts() -> None:
    ids = rows_of([[3, 4, 5], [3, 4, 6], [7, 8, 7]])
    score = torch.tensor([[-1.0, -1.02, -math.inf]])
    found = rescore(ids, score, heard=None, config=CONFIG)
    assert found[0, 2] == -math.inf
    torch.testing.assert_close(found[:, :2], rescore(ids[:, :2], score[:, :2], heard=None, config=CONFIG))
    like = torch.tensor([[0.1, 0.2, 1.0]])
    assert rescore(ids, score, heard=None, likeness=like, config=CONFIG)[0, 2] == -math.inf


def test_two_who_agree_win_against_one_who_is_a_little_likelier() -> None:
    ids = rows_of([[3, 4, 5], [6, 7, 8], [6, 7, 3]])
    score = torch.tensor([[-1.0, -1.05, -1.05]])
    assert int(rescore(ids, score, heard=None, config=CONFIG).argmax()) == 2
    far = torch.tensor([[-1.0, -9.0, -9.0]])
    assert int(rescore(ids, far, heard=None, config=CONFIG).argmax()) == 0


def test_of_texts_as_likely_the_one_whose_vector_is_nearer_wins() -> None:
    ids, score = rows_of([[3, 4, 5], [3, 4, 6], [3, 4, 7]]), torch.full((1, 3), -1.0)
    for best in range(3):
        like = torch.tensor([[0.90, 0.90, 0.90]])
        like[0, best] += 0.01
        found = rescore(ids, score, heard=None, likeness=like, config=CONFIG)
        assert int(found.argmax()) == best
        plain = rescore(ids, score, heard=None, config=CONFIG)
        torch.testing.assert_close(found - plain, LIKENESS * like)
    # Far less likely, it does not.
    less = torch.tensor([[-1.0, -1.0, -9.0]])
    assert int(rescore(ids, less, heard=None, likeness=like, config=CONFIG).argmax()) != 2


def test_a_word_said_again_counts_against_a_text() -> None:
    ids = rows_of([[3, 4, 4], [3, 4, 5]])
    once = rescore(ids, torch.tensor([[-1.0, -1.0]]), heard=None, config=CONFIG)
    assert float(once[0, 1] - once[0, 0]) == pytest.approx(REPEATS / 3)


class Guessing:
    """Guesses that a text's vector points along the number of its first word."""

    config, embeds = CONFIG, True

    def embed(self, ids: Tensor) -> Tensor:
        return torch.eye(V)[ids[:, 0]]


def test_a_judge_says_how_like_the_texts_are() -> None:
    ids, score, e = rows_of([[3, 4, 5], [4, 5, 6]]), torch.full((1, 2), -1.0), 7 * torch.eye(V)[4:5]
    judged, likeness = judge(Guessing(), e, ids, score, blind=False)
    assert likeness.tolist() == [[0.0, 1.0]]
    torch.testing.assert_close(judged, rescore(ids, score, heard=None, likeness=likeness, config=CONFIG))
    judged, unknown = judge(Guessing(), e, ids, score, blind=True)
    assert unknown.shape == score.shape and unknown.isnan().all()
    torch.testing.assert_close(judged, rescore(ids, score, heard=None, config=CONFIG))
