"""Ways to answer without inverting, to measure against: random tokens, the nearest passage of some data.

Knows token ids, vectors and prepared data. Must not know models or strategies. The third baseline, the
model that is shown no vector, is the model's own affair (guidance 0).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unembed.errors import UnembedError
from unembed.logbook import progress
from unembed.readable import content_lengths
from unembed.reader import ROWS, Reader
from unembed.scoring import Hypotheses, References

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder
    from unembed.tokens import TextTokenizer

# Numbers `nearest` holds in an array at a time: bounds memory, whatever the size of the data.
ENTRIES = 2**24
# Windows of passages that `nearest` embeds at a time.
WINDOWS = 8192


def random_tokens(
    references: References, *, tokenizer: TextTokenizer, seed: int = 0, first: int = 0
) -> Hypotheses:
    """Guess every token at random from the vocabulary; the lengths are given away.

    The guess for a text depends on the seed and on its number, which counts from `first`.
    """
    start = time.perf_counter()
    special = [tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id]
    plain = np.setdiff1d(np.arange(tokenizer.size), special)
    ids = [
        np.random.default_rng([seed, number]).choice(plain, size=len(row))
        for number, row in enumerate(references.ids, first)
    ]
    return Hypotheses(ids=ids, texts=tokenizer.decode(ids), seconds=time.perf_counter() - start)


def nearest(
    references: References,
    *,
    data: PreparedData,
    encoder: Encoder | None = None,
    limit: int | None = None,
    show_progress: bool = False,
) -> Hypotheses:
    """Return the passage of prepared data whose vector is nearest by cosine.

    Passages without vectors are cut into windows of as many tokens as the data was prepared for, one
    behind the other, and embedded by `encoder`. `limit` looks at the first so many pairs or passages.
    """
    start = time.perf_counter()
    if data.kind == "pairs":
        size = references.vectors.shape[1]
        if data.embedding_size != size:
            raise UnembedError(
                f"the data holds vectors of size {data.embedding_size}, the texts have size {size}; "
                "use data prepared with the same encoder."
            )
        found = _nearest_pairs(references.vectors, data, limit, show_progress)
    else:
        if encoder is None:
            raise UnembedError(
                "the nearest passage needs vectors, and this data holds passages without; "
                "give the encoder, or prepare it with kind 'pairs'."
            )
        found = _nearest_windows(references.vectors, data, encoder, limit, show_progress)
    return Hypotheses(ids=found, texts=data.tokenizer.decode(found), seconds=time.perf_counter() - start)


class _Best:
    """The nearest candidate so far of every query."""

    def __init__(self, queries: np.ndarray) -> None:
        """Start with none."""
        self.queries = queries
        self.cosine = np.full(len(queries), -np.inf, dtype=np.float32)
        self.index = np.zeros(len(queries), dtype=np.int64)

    def look(self, vectors: np.ndarray, index: np.ndarray) -> None:
        """Take candidates into account, known by their indices."""
        # The length of a query changes no ranking; the length of a candidate would.
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        similar = self.queries @ (vectors / np.maximum(norms, 1e-12)).T  # (N, block)
        row = similar.argmax(axis=1)
        value = similar[np.arange(len(row)), row]
        self.index = np.where(value > self.cosine, index[row], self.index)
        self.cosine = np.maximum(value, self.cosine)


def _nearest_pairs(
    queries: np.ndarray, data: PreparedData, limit: int | None, show_progress: bool
) -> list[np.ndarray]:
    """Find the ids of the nearest of pairs, block by block."""
    best, count = _Best(queries), min(data.count, limit or data.count)
    block = max(1, ENTRIES // max(queries.shape))
    with progress("pairs looked at", total=count, show=show_progress) as advance:
        for first in range(0, count, block):
            rows = np.arange(first, min(first + block, count))
            best.look(data.vectors(rows), rows)
            advance(len(rows))
    rows = data.ids(best.index)
    lengths = content_lengths(rows, end_id=data.tokenizer.end_id)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _nearest_windows(
    queries: np.ndarray, data: PreparedData, encoder: Encoder, limit: int | None, show_progress: bool
) -> list[np.ndarray]:
    """Find the ids of the nearest window of passages, embedding them block by block."""
    best = _Best(queries)
    starts, stops = _windows(data.offsets[: None if limit is None else limit + 1], data.max_tokens)
    block = max(1, min(WINDOWS, ENTRIES // max(queries.shape)))
    by_ids = Reader(encoder, data.tokenizer).by_ids
    embed = partial(_embed_ids, shown=_shown(data.tokenizer)) if by_ids else _embed_texts
    with progress("windows embedded", total=len(starts), show=show_progress) as advance:
        for first in range(0, len(starts), block):
            index = np.arange(first, min(first + block, len(starts)))
            vectors, full = embed(encoder, data, starts[index], stops[index])
            if len(vectors):
                best.look(vectors, index[full])
            advance(len(index))
    return [data.tokens[starts[i] : stops[i]].astype(np.int64) for i in best.index]


def _embed_texts(
    encoder: Encoder, data: PreparedData, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Embed windows as text: the vectors of those that hold any, and which these are."""
    windows = zip(starts, stops, strict=True)
    texts = data.tokenizer.decode([data.tokens[first:stop].astype(np.int64) for first, stop in windows])
    full = np.array([bool(text.strip()) for text in texts])
    kept = [texts[i] for i in np.flatnonzero(full)]
    return (encoder.encode(kept, batch_size=256) if kept else np.empty((0, encoder.size))), full


def _embed_ids(
    encoder: Any, data: PreparedData, starts: np.ndarray, stops: np.ndarray, *, shown: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Embed windows by their ids, which spares a fast encoder the detour through text.

    A window that begins inside a word is embedded as it stands, not as its text would be spelt.
    """
    lengths = stops - starts
    places = np.arange(lengths.max())
    inside = places < lengths[:, None]
    ids = data.tokens[np.where(inside, starts[:, None] + places, 0)].astype(np.int64)
    full = (shown[ids] & inside).any(1)
    device = torch.device(getattr(encoder, "device", "cpu"))
    vectors, most = np.empty((len(ids), encoder.size), np.float32), ROWS.get(device.type, ROWS["cpu"])
    order = lengths.argsort(kind="stable")  # so that short windows are not padded to the longest of all
    for first in range(0, len(ids), most):
        some = order[first : first + most]
        part = (ids[some, : lengths[some[-1]]], lengths[some])
        found = encoder.encode_ids(*(torch.from_numpy(each).to(device) for each in part))
        vectors[some] = found.float().cpu().numpy()
    return vectors[full], full


def _shown(tokenizer: TextTokenizer) -> np.ndarray:
    """Which tokens of a vocabulary (V,) can be read in a text; the unknown one cannot."""
    return np.array([bool(text.strip()) for text in tokenizer.decode(np.arange(tokenizer.size)[:, None])])


def _windows(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the windows of passages begin and end, no window in two passages.

    >>> [each.tolist() for each in _windows(np.array([0, 5, 7]), 3)]
    [[0, 3, 5], [3, 5, 7]]
    """
    sizes = np.diff(offsets)
    counts = -(-sizes // length)
    passage = np.repeat(np.arange(len(sizes)), counts)
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[passage] + inside * length
    return starts, np.minimum(starts + length, offsets[passage + 1])
