"""Held-out text -> records: embed, forget, invert, measure; and baselines to measure against.

Knows what an inverter and an encoder offer, and the metrics. Must not know how a strategy decodes,
or how a record is printed or drawn.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from unembed import metrics
from unembed.errors import UnembedError
from unembed.inverter import Inverter, content_lengths, similarity
from unembed.search import Refine, SearchOptions
from unembed.strategies import check_steps, find_strategy

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder
    from unembed.tokens import TextTokenizer

# Numbers `nearest` holds in an array at a time: bounds memory, whatever the size of the data.
_NEAREST_ENTRIES = 2**24


@dataclass(frozen=True)
class Record:
    """What one strategy in one number of steps recovers of a set of texts; the fields are the JSON keys.

    Metrics are means over the texts, except `bleu`, which is of the corpus, from 0 to 100.
    """

    strategy: str
    steps: int
    texts: int
    token_accuracy: float
    token_f1: float
    exact_match: float
    bleu: float
    rouge_l: float
    cosine: float
    forward_passes: float  # mean a text
    encoder_calls: float  # mean a text, spent on inverting, not on measuring `cosine`
    texts_per_second: float  # of inverting alone
    intervals: dict[str, metrics.Interval]  # 95 % bootstrap interval of each metric


@dataclass(frozen=True)
class References:
    """Texts as an inverter could at best return them, and the vectors it is given."""

    ids: list[np.ndarray]  # content tokens of each text
    texts: list[str]  # read back from the ids, so that an uncased vocabulary is not punished for case
    vectors: np.ndarray  # (N, E), of the texts as cut


@dataclass(frozen=True)
class Hypotheses:
    """What was recovered, and at which cost."""

    ids: list[np.ndarray]  # content tokens of each text
    texts: list[str]
    seconds: float
    forward_passes: float = 0.0
    encoder_calls: float = 0.0


def evaluate(
    texts: Iterable[str],
    *,
    inverter: Inverter,
    encoder: Encoder | None = None,
    strategies: Sequence[str] = ("confidence",),
    steps: Sequence[int] = (8,),
    guidance: float = 1.0,
    temperature: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
    limit: int | None = None,
    show_progress: bool = False,
    refine: Refine | None = None,
    rounds: int = SearchOptions.rounds,
    candidates: int = SearchOptions.candidates,
    pool: int = SearchOptions.pool,
    budget: int | None = None,
) -> list[Record]:
    """Measure an inverter on texts it has not seen: one record for each strategy and number of steps.

    Texts are cut to what the inverter holds and embedded as cut, by `encoder` or the one that the
    inverter was trained against. `limit` takes the first so many texts. `refine` and what follows it
    are those of `Inverter.invert`; a search is then measured instead of a draft.
    """
    metrics.check_extra()
    encoder = inverter.encoder() if encoder is None else encoder
    search: dict[str, Any] = {}
    if refine is not None:
        SearchOptions(refine, rounds, candidates, pool, budget)  # names a bad setting
        search = dict(
            refine=refine, rounds=rounds, candidates=candidates, pool=pool, budget=budget, encoder=encoder
        )
    _check(inverter, encoder=encoder, strategies=strategies, steps=steps, limit=limit)
    references = refer(
        texts if limit is None else islice(texts, limit),
        tokenizer=inverter.tokenizer,
        encoder=encoder,
        max_tokens=inverter.max_tokens,
        batch_size=batch_size,
        show_progress=show_progress,
    )
    # The first call pays for what is loaded and compiled on first use; it is not timed.
    inverter.invert(references.vectors[:1], steps=1, seed=seed)

    records = []
    for strategy in strategies:
        for count in steps:
            start = time.perf_counter()
            inversions = inverter.invert(
                references.vectors,
                strategy=strategy,
                steps=count,
                guidance=guidance,
                temperature=temperature,
                seed=seed,
                batch_size=batch_size,
                show_progress=show_progress,
                **search,
            )
            hypotheses = Hypotheses(
                ids=[np.array(i.ids, dtype=np.int64) for i in inversions],
                texts=[i.text for i in inversions],
                seconds=time.perf_counter() - start,
                forward_passes=float(np.mean([i.forward_passes for i in inversions])),
                encoder_calls=float(np.mean([i.encoder_calls for i in inversions])),
            )
            record = score(references, hypotheses, encoder=encoder, strategy=strategy, steps=count, seed=seed)
            records.append(record)
    return records


def refer(
    texts: Iterable[str],
    *,
    tokenizer: TextTokenizer,
    encoder: Encoder,
    max_tokens: int,
    batch_size: int = 64,
    show_progress: bool = False,
) -> References:
    """Cut texts to `max_tokens`, with a warning, and embed them as cut."""
    if isinstance(texts, str):
        raise UnembedError("expected a list of texts, not one string; put it in brackets.")
    texts = list(texts)
    if not texts:
        raise UnembedError("there is no text to evaluate; give at least one.")
    encoded = tokenizer.encode(texts, max_tokens=max_tokens)
    if encoded.truncated.any():
        warnings.warn(
            f"{int(encoded.truncated.sum())} of {len(texts)} texts are longer than {max_tokens} tokens "
            "and were cut.",
            stacklevel=3,
        )
    return References(
        ids=[row[:length] for row, length in zip(encoded.ids, encoded.lengths, strict=True)],
        texts=tokenizer.decode(encoded.ids),
        vectors=encoder.encode(encoded.texts, batch_size=batch_size, show_progress_bar=show_progress),
    )


def score(
    references: References,
    hypotheses: Hypotheses,
    *,
    encoder: Encoder,
    strategy: str,
    steps: int = 0,
    seed: int = 0,
) -> Record:
    """Measure hypotheses against references, whichever way they came about."""
    tokens = list(zip(references.ids, hypotheses.ids, strict=True))
    pairs = list(zip(references.texts, hypotheses.texts, strict=True))
    values: dict[str, Sequence[float] | np.ndarray] = {
        "token_accuracy": [metrics.token_accuracy(r, h) for r, h in tokens],
        "token_f1": [metrics.token_f1(r, h) for r, h in tokens],
        "exact_match": [metrics.exact_match(r, h) for r, h in pairs],
        "rouge_l": [metrics.rouge_l(r, h) for r, h in pairs],
        "cosine": similarity(encoder, references.vectors, hypotheses.texts),
    }
    statistics = metrics.bleu_statistics(references.texts, hypotheses.texts)
    intervals = {name: metrics.bootstrap_interval(each, seed=seed) for name, each in values.items()}
    return Record(
        strategy=strategy,
        steps=steps,
        texts=len(pairs),
        **{name: float(np.mean(each)) for name, each in values.items()},
        bleu=float(metrics.bleu_of_sums(statistics.sum(axis=0))),
        forward_passes=hypotheses.forward_passes,
        encoder_calls=hypotheses.encoder_calls,
        texts_per_second=len(pairs) / max(hypotheses.seconds, 1e-9),
        intervals=intervals | {"bleu": metrics.bleu_interval(statistics, seed=seed)},
    )


def random_tokens(references: References, *, tokenizer: TextTokenizer, seed: int = 0) -> Hypotheses:
    """Guess every token at random from the vocabulary; the lengths are given away."""
    start = time.perf_counter()
    rng = np.random.default_rng(seed)
    special = [tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id]
    plain = np.setdiff1d(np.arange(tokenizer.size), special)
    ids = [rng.choice(plain, size=len(row)) for row in references.ids]
    return Hypotheses(ids=ids, texts=tokenizer.decode(ids), seconds=time.perf_counter() - start)


def nearest(references: References, *, data: PreparedData) -> Hypotheses:
    """Return the passage of prepared data whose vector is nearest by cosine."""
    if data.kind != "pairs":
        raise UnembedError(
            f"the nearest passage needs data with vectors, not {data.kind!r}; prepare it with kind 'pairs'."
        )
    size = references.vectors.shape[1]
    if data.embedding_size != size:
        raise UnembedError(
            f"the data holds vectors of size {data.embedding_size}, the texts have size {size}; "
            "use data prepared with the same encoder."
        )
    start = time.perf_counter()
    best = np.full(len(references.vectors), -np.inf, dtype=np.float32)
    found = np.zeros(len(best), dtype=np.int64)
    block = max(1, _NEAREST_ENTRIES // max(references.vectors.shape))
    for first in range(0, data.count, block):
        vectors = data.vectors(np.arange(first, min(first + block, data.count)))
        # The length of a query changes no ranking; the length of a candidate would.
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        similar = references.vectors @ (vectors / np.maximum(norms, 1e-12)).T  # (N, block)
        row = similar.argmax(axis=1)
        value = similar[np.arange(len(row)), row]
        found = np.where(value > best, first + row, found)
        best = np.maximum(value, best)
    rows = data.ids(found)
    lengths = content_lengths(rows, end_id=data.tokenizer.end_id)
    ids = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return Hypotheses(ids=ids, texts=data.tokenizer.decode(ids), seconds=time.perf_counter() - start)


def _check(
    inverter: Inverter,
    *,
    encoder: Encoder,
    strategies: Sequence[str],
    steps: Sequence[int],
    limit: int | None,
) -> None:
    """Name a bad setting before any text is embedded."""
    for name in strategies:
        find_strategy(name)
    for count in steps:
        check_steps(count, inverter.max_tokens)
    if limit is not None and limit < 1:
        raise UnembedError(f"limit must be at least 1, not {limit}; leave it out to take every text.")
    inverter.check_encoder(encoder)
