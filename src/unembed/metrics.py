"""How close a recovered text is to its original: (reference, hypothesis) -> number.

Knows token ids, texts and vectors as they are; nothing of models, tokenizers or encoders. Every
metric is of one pair, from 0 to 1, except BLEU, which is of a whole corpus, from 0 to 100.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from unembed.errors import UnembedError

Tokens = Sequence[int] | np.ndarray
Interval = tuple[float, float]

# Scripts written without spaces, in which a single character is the word: Thai, Lao, Myanmar, Khmer,
# kana, Han (with extensions).
_UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_BLEU_ORDER = 4
# Entries of a resampling table held at a time: bounds memory, whatever the number of texts.
_RESAMPLE_ENTRIES = 2**22


def token_accuracy(reference: Tokens, hypothesis: Tokens) -> float:
    """Share of the reference's tokens that the hypothesis has at the same position.

    >>> token_accuracy([7, 8, 9, 7], [7, 9, 9])
    0.5
    """
    if not len(reference):
        return float(not len(hypothesis))
    same = sum(int(a) == int(b) for a, b in zip(reference, hypothesis, strict=False))
    return same / len(reference)


def token_f1(reference: Tokens, hypothesis: Tokens) -> float:
    """Harmonic mean of precision and recall of the tokens as multisets: order does not count.

    >>> token_f1([1, 2, 2, 3], [2, 2, 2, 1])
    0.75
    """
    if not len(reference) and not len(hypothesis):
        return 1.0
    common = Counter(map(int, reference)) & Counter(map(int, hypothesis))
    return 2 * common.total() / (len(reference) + len(hypothesis))


def exact_match(reference: str, hypothesis: str) -> float:
    """1.0 if the texts are the same, else 0.0.

    >>> exact_match("a b", "a b"), exact_match("a b", "a  b")
    (1.0, 0.0)
    """
    return float(reference == hypothesis)


def rouge_l(reference: str, hypothesis: str) -> float:
    """F-measure of the longest common subsequence of words; 0 where one side has no word.

    Words are lower-case runs of letters, digits and combining marks; in scripts written without
    spaces each character is a word. On ASCII text this is rouge-score's rougeL exactly; beyond
    ASCII, rouge-score would drop every letter.

    >>> round(rouge_l("The cat sat on the mat.", "the cat lay on a mat"), 3)
    0.667
    """
    left, right = words(reference), words(hypothesis)
    if not left or not right:
        return 0.0
    return 2 * longest_common(left, right) / (len(left) + len(right))


def longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence, bit by bit (Hyyrö 2004): a row of the table is a number.

    >>> longest_common("abcbdab", "bdcaba")
    4
    """
    places: dict[str, int] = {}
    for i, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(left)) - 1
    row = full
    for word in right:
        same = row & places.get(word, 0)
        row = ((row + same) | (row - same)) & full
    return len(left) - row.bit_count()


def words(text: str) -> list[str]:
    """Split a text into the words that `rouge_l` compares.

    >>> words("Don't PANIC, हिन्दी 東京!")
    ['don', 't', 'panic', 'हिन्दी', '東', '京']
    """
    return "".join(map(_spaced, text.lower())).split()


def _spaced(character: str) -> str:
    """Return the character as it stands in a text whose words are parted by spaces."""
    if unicodedata.category(character)[0] not in "LMN":
        return " "
    alone = any(low <= ord(character) <= high for low, high in _UNSPACED)
    return f" {character} " if alone else character


def bleu(references: Sequence[str], hypotheses: Sequence[str], *, tokenize: str = "13a") -> float:
    """Corpus BLEU as sacrebleu gives it with its defaults; `tokenize` is sacrebleu's ("zh", "char"...).

    >>> round(bleu(["the cat sat on the mat"], ["the cat sat on a mat"]), 2)
    53.73
    """
    statistics = bleu_statistics(references, hypotheses, tokenize=tokenize)
    return float(bleu_of_sums(statistics.sum(axis=0)))


def bleu_tokenizer(language: str | None) -> str:
    """Name sacrebleu's tokenizer for a language: Chinese by its own, Korean by characters, most by 13a.

    Japanese goes by words where sacrebleu has MeCab to find them, else by characters too.

    >>> bleu_tokenizer("zh-Hant"), bleu_tokenizer("ko"), bleu_tokenizer("pt"), bleu_tokenizer(None)
    ('zh', 'char', '13a', '13a')
    """
    base = (language or "").lower().replace("_", "-").partition("-")[0]
    if base == "ja":
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return {"zh": "zh", "ko": "char", "th": "char", "lo": "char", "my": "char", "km": "char"}.get(base, "13a")


def bleu_statistics(
    references: Sequence[str], hypotheses: Sequence[str], *, tokenize: str = "13a"
) -> np.ndarray:
    """Count what BLEU is made of: (N, 10) of both lengths, 4 x matched and 4 x total n-grams."""
    if len(references) != len(hypotheses):
        raise UnembedError(
            f"{len(references)} references stand against {len(hypotheses)} hypotheses; give one for each."
        )
    # effective_order only silences a warning about single sentences; the counts are the same.
    metric = _require("sacrebleu").BLEU(tokenize=tokenize, effective_order=True)
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        score = metric.sentence_score(hypothesis, [reference])
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return np.array(rows, dtype=np.float64).reshape(len(rows), 2 + 2 * _BLEU_ORDER)


def bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """Compute BLEU from summed statistics, (..., 10) -> (...), with sacrebleu's exponential smoothing."""
    hypothesis_length, reference_length = sums[..., 0], sums[..., 1]
    matched, total = sums[..., 2 : 2 + _BLEU_ORDER], sums[..., 2 + _BLEU_ORDER :]
    # The k-th order without a match counts as 1/2^k of a match (Chen and Cherry 2014, method 3).
    halvings = np.cumsum(matched == 0, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(matched > 0, matched, 0.5**halvings) / total
        brevity = np.exp(np.minimum(0.0, 1 - reference_length / hypothesis_length))
        score = 100 * brevity * np.exp(np.log(precision).mean(axis=-1))
    # No match at all, or no n-gram of the highest order in the whole corpus, is 0 in sacrebleu.
    return np.where((matched.sum(axis=-1) > 0) & (total[..., -1] > 0), score, 0.0)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each pair of rows, (..., E) x (..., E) -> (...); 0 where a vector is zero.

    >>> cosine(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[6.0, 8.0], [1.0, 0.0]])).tolist()
    [1.0, 0.0]
    """
    a, b = _within_one(a), _within_one(b)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = (a * b).sum(axis=-1)
    return np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)


def _within_one(rows: np.ndarray) -> np.ndarray:
    """Scale rows so that the largest number of each is one: squares of tiny numbers would vanish."""
    rows = np.asarray(rows, dtype=np.float64)
    largest = np.abs(rows).max(axis=-1, keepdims=True, initial=0.0)
    return np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, n: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of the mean of per-text values.

    >>> bootstrap_interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    """
    table = np.asarray(values, dtype=np.float64)[:, None]
    return percentiles(resampled_sums(table, n=n, seed=seed)[:, 0] / len(table), level)


def bleu_interval(statistics: np.ndarray, *, n: int = 1000, seed: int = 0, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of corpus BLEU, from `bleu_statistics`; no text is read again."""
    return percentiles(bleu_of_sums(resampled_sums(statistics, n=n, seed=seed)), level)


def resampled_sums(table: np.ndarray, *, n: int, seed: int) -> np.ndarray:
    """Sum the rows of `n` resamples of a table with replacement, (N, K) -> (n, K)."""
    size = len(table)
    if not size:
        raise UnembedError("there are no values to resample; evaluate at least one text.")
    rng = np.random.default_rng(seed)
    chunk = max(1, _RESAMPLE_ENTRIES // size)
    sums = []
    for start in range(0, n, chunk):
        count = min(chunk, n - start)
        drawn = rng.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        sums.append(times @ table)
    return np.concatenate(sums)


def percentiles(values: np.ndarray, level: float = 0.95) -> Interval:
    """Cut equal tails off both ends."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(hits: int, of: int) -> Interval:
    """95 % interval of a share (Wilson, 1927), which has a width even where none or all are hits.

    >>> [round(end, 3) for end in wilson_interval(0, 3)]
    [0.0, 0.561]
    """
    z2 = 1.959964**2
    middle = (hits + z2 / 2) / (of + z2)
    reach = math.sqrt(z2 * (hits * (of - hits) / of + z2 / 4)) / (of + z2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def check_extra() -> None:
    """Raise now, rather than after an hour's work, if the extra `eval` is not installed."""
    _require("sacrebleu")


def has_bleu() -> bool:
    """Whether BLEU can be computed here; every other metric always can."""
    return find_spec("sacrebleu") is not None


def _require(module: str) -> Any:
    """Import a module of the extra `eval`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnembedError(
            f"measuring needs {module.split('.')[0]}, which is not installed; "
            "install it with: pip install 'unembed[eval]'"
        ) from error
