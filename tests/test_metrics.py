from __future__ import annotations

import sys

import numpy as np
import pytest
import sacrebleu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

from unembed import metrics
from unembed.errors import UnembedError

ids = st.lists(st.integers(0, 5), max_size=12)
# Few words, so that matches and repetitions are common; marks, so that tokenisation is exercised.
ascii_texts = st.lists(
    st.sampled_from(["the", "The", "cat", "sat", "on", "a", "mat.", "don't", "x_1", "3.14", "?!", "-"]),
    max_size=12,
).map(" ".join)
unicode_texts = st.text(max_size=40) | st.lists(
    st.sampled_from(["Übung", "été", "привет", "東京都", "हिन्दी", "ภาษาไทย", "안녕", "🙂", "cat"]), max_size=8
).map(" ".join)


class OurWords(Tokenizer):
    def tokenize(self, text: str) -> list[str]:
        return metrics.words(text)


def corpus_bleu(references: list[str], hypotheses: list[str]) -> float:
    return sacrebleu.corpus_bleu(hypotheses, [references], force=True).score


@pytest.mark.parametrize(
    ("reference", "hypothesis", "accuracy", "f1"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0, 1.0),
        ([1, 2, 3], [3, 1, 2], 0.0, 1.0),
        ([1, 2, 3, 4], [1, 2], 0.5, 2 / 3),
        ([1, 2], [1, 2, 3, 4], 1.0, 2 / 3),
        ([1, 1, 1, 1], [1], 0.25, 0.4),
        ([1, 2], [3, 4], 0.0, 0.0),
        ([1, 2], [], 0.0, 0.0),
        ([], [1], 0.0, 0.0),
        ([], [], 1.0, 1.0),
    ],
)
def test_tokens(reference: list[int], hypothesis: list[int], accuracy: float, f1: float) -> None:
    assert metrics.token_accuracy(reference, hypothesis) == pytest.approx(accuracy)
    assert metrics.token_f1(reference, hypothesis) == pytest.approx(f1)
    as_arrays = np.array(reference, dtype=np.int64), np.array(hypothesis, dtype=np.int64)
    assert metrics.token_accuracy(*as_arrays) == metrics.token_accuracy(reference, hypothesis)
    assert metrics.token_f1(*as_arrays) == metrics.token_f1(reference, hypothesis)


@given(ids, ids)
def test_token_metrics_are_shares(a: list[int], b: list[int]) -> None:
    assert 0 <= metrics.token_accuracy(a, b) <= 1
    assert 0 <= metrics.token_f1(a, b) <= 1
    assert metrics.token_f1(a, b) == metrics.token_f1(b, a)
    assert metrics.token_accuracy(a, a) == metrics.token_f1(a, a) == 1
    assert metrics.token_f1(a, sorted(a)) == 1


@given(ascii_texts, ascii_texts)
def test_rouge_l_is_rouge_score(reference: str, hypothesis: str) -> None:
    expected = RougeScorer(["rougeL"]).score(reference, hypothesis)["rougeL"].fmeasure
    assert metrics.rouge_l(reference, hypothesis) == pytest.approx(expected)


@given(st.text(st.characters(codec="ascii"), max_size=60))
def test_words_of_ascii_are_those_of_rouge_score(text: str) -> None:
    from rouge_score.tokenize import tokenize

    assert metrics.words(text) == tokenize(text, None)


@given(unicode_texts, unicode_texts)
def test_rouge_l_of_any_script(reference: str, hypothesis: str) -> None:
    scorer = RougeScorer(["rougeL"], tokenizer=OurWords())
    expected = scorer.score(reference, hypothesis)["rougeL"].fmeasure
    assert metrics.rouge_l(reference, hypothesis) == pytest.approx(expected)
    if metrics.words(reference):
        assert metrics.rouge_l(reference, reference) == 1


@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9))
def test_longest_common_subsequence_is_that_of_the_table(left: list[str], right: list[str]) -> None:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert metrics.longest_common(left, right) == table[-1][-1]


@pytest.mark.parametrize(
    ("reference", "hypothesis"),
    [
        ("", ""),
        ("a b c", ""),
        ("", "a b c"),
        ("a b c", "x y z"),
        ("the the the the", "the"),
        ("the", "the the the the"),
        ("a a b b a a", "b a b a b a"),
        ("A-B_c 1,000", "a b c 1 000"),
        ("?!", "?!"),
    ],
)
def test_rouge_l_at_the_edges(reference: str, hypothesis: str) -> None:
    expected = RougeScorer(["rougeL"]).score(reference, hypothesis)["rougeL"].fmeasure
    assert metrics.rouge_l(reference, hypothesis) == pytest.approx(expected)


def test_rouge_l_sees_scripts_without_spaces() -> None:
    assert metrics.rouge_l("東京都", "東京") == pytest.approx(0.8)
    assert metrics.rouge_l("привет мир", "привет") == pytest.approx(2 / 3)
    assert metrics.rouge_l("", "") == metrics.rouge_l("a", "?") == 0


@settings(max_examples=200)
@given(st.lists(st.tuples(ascii_texts | unicode_texts, ascii_texts | unicode_texts), min_size=1, max_size=6))
def test_bleu_is_sacrebleu(pairs: list[tuple[str, str]]) -> None:
    references, hypotheses = [list(side) for side in zip(*pairs, strict=True)]
    assert metrics.bleu(references, hypotheses) == pytest.approx(corpus_bleu(references, hypotheses))


@pytest.mark.parametrize(
    ("references", "hypotheses"),
    [
        ([""], [""]),
        (["a b c d e"], [""]),
        ([""], ["a b c d e"]),
        (["a b c d e"], ["v w x y z"]),
        (["a b c d e"], ["a b c d e"]),
        (["a b c d e"], ["a x b y c z"]),
        (["the the the the"], ["the the the the the the"]),
        (["a b c d e f g h"], ["a b c d"]),
        (["a"], ["a"]),
    ],
)
def test_bleu_at_the_edges(references: list[str], hypotheses: list[str]) -> None:
    assert metrics.bleu(references, hypotheses) == pytest.approx(corpus_bleu(references, hypotheses))


@pytest.mark.parametrize("tokenize", ["13a", "zh", "char", "none", "intl"])
@settings(max_examples=60)
@given(st.lists(st.tuples(unicode_texts, unicode_texts), min_size=1, max_size=5))
def test_bleu_by_every_tokenizer_is_sacrebleu(tokenize: str, pairs: list[tuple[str, str]]) -> None:
    references, hypotheses = [list(side) for side in zip(*pairs, strict=True)]
    expected = sacrebleu.corpus_bleu(hypotheses, [references], force=True, tokenize=tokenize).score
    assert metrics.bleu(references, hypotheses, tokenize=tokenize) == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["a", "b", "the"]), min_size=1, max_size=30), st.integers(1, 30))
def test_bleu_of_repeated_tokens_is_sacrebleu(words: list[str], times: int) -> None:
    references, hypotheses = [" ".join(words)], [" ".join(words[:1] * times)]
    assert metrics.bleu(references, hypotheses) == pytest.approx(corpus_bleu(references, hypotheses))


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [(None, "13a"), ("", "13a"), ("en", "13a"), ("ar", "13a"), ("zh", "zh"), ("zh_TW", "zh"), ("ko", "char")],
)
def test_the_tokenizer_follows_the_language(language: str | None, tokenizer: str) -> None:
    assert metrics.bleu_tokenizer(language) == tokenizer
    metrics.bleu(["東京 a"], ["東京 a"], tokenize=metrics.bleu_tokenizer(language))


def test_japanese_goes_by_words_only_where_they_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics.bleu(
        ["東京で会う"], ["東京で会う"], tokenize=metrics.bleu_tokenizer("ja")
    ) == pytest.approx(100)
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    assert metrics.bleu_tokenizer("ja") == "char"
    monkeypatch.setattr(metrics, "find_spec", lambda name: object())
    assert metrics.bleu_tokenizer("ja") == "ja-mecab"


def test_bleu_takes_a_tokenizer_of_sacrebleu() -> None:
    expected = sacrebleu.corpus_bleu(
        ["我们明天早上在东京见"], [["我们明天晚上在东京见"]], tokenize="zh"
    ).score
    assert metrics.bleu(["我们明天晚上在东京见"], ["我们明天早上在东京见"], tokenize="zh") == pytest.approx(
        expected
    )
    assert metrics.bleu(["我们明天晚上在东京见"], ["我们明天早上在东京见"]) == 0


def test_bleu_wants_as_many_hypotheses_as_references() -> None:
    with pytest.raises(UnembedError, match="2 references stand against 1 hypotheses"):
        metrics.bleu(["a", "b"], ["a"])


@example([7.9e-162, 0.0, 0.0], [1.0, 0.0, 0.0])  # whose square is hardly a number
@example([5e-324, 0.0, 5e-324], [0.0, 0.0, 1e-300])
@given(
    st.lists(st.floats(-100, 100), min_size=3, max_size=3),
    st.lists(st.floats(-100, 100), min_size=3, max_size=3),
)
def test_cosine(a: list[float], b: list[float]) -> None:
    value = metrics.cosine(np.array(a), np.array(b))
    assert np.isfinite(value) and abs(value) <= 1 + 1e-9
    assert metrics.cosine(np.array(a) * 2, np.array(b)) == pytest.approx(value, abs=1e-6)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    samples = rng.random((200, 60))
    inside = 0
    for i, sample in enumerate(samples):
        low, high = metrics.bootstrap_interval(sample, seed=i, level=0.9)
        inside += low <= 0.5 <= high
    assert 0.84 <= inside / len(samples) <= 0.96


def test_interval_is_seeded_and_chunking_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50)
    first = metrics.bootstrap_interval(values, seed=3)
    assert first == metrics.bootstrap_interval(values, seed=3)
    assert first != metrics.bootstrap_interval(values, seed=4)
    monkeypatch.setattr(metrics, "_RESAMPLE_ENTRIES", 120)
    assert metrics.bootstrap_interval(values, seed=3) == pytest.approx(first)


def test_bleu_interval_resamples_the_corpus() -> None:
    references = [f"number {i} of the many sentences we keep here" for i in range(20)]
    hypotheses = [r if i % 3 else "something else that has no match at all" for i, r in enumerate(references)]
    statistics = metrics.bleu_statistics(references, hypotheses)
    low, high = metrics.bleu_interval(statistics, n=200, seed=5)
    assert low < metrics.bleu(references, hypotheses) < high

    # The plain way: draw texts, score them with sacrebleu.
    rng = np.random.default_rng(5)
    drawn = rng.integers(20, size=(200, 20))
    plain = [corpus_bleu([references[i] for i in row], [hypotheses[i] for i in row]) for row in drawn]
    assert (low, high) == pytest.approx(tuple(np.quantile(plain, [0.025, 0.975])))


def test_nothing_to_resample() -> None:
    with pytest.raises(UnembedError, match="at least one text"):
        metrics.bootstrap_interval([])


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m == "sacrebleu" or m.startswith("sacrebleu.")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnembedError, match=r"needs sacrebleu.*unembed\[eval\]"):
        metrics.bleu(["a"], ["a"])
    with pytest.raises(UnembedError, match="needs sacrebleu"):
        metrics.check_extra()
    assert not metrics.has_bleu()
    assert metrics.rouge_l("a b", "a b") == 1
