"""Prepared data -> batches of (ids, vectors) for training.

Every batch is a pure function of (data, seed, step), so a run that was killed goes on with the
very batches it would have had, and each process of a group cuts its rows from the same batch.
It must not know of models or losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.corpus import PreparedData
from unembed.errors import UnembedError

if TYPE_CHECKING:
    from unembed.encoders import IdEncoder

SWAPPED = 0.15  # of the words of a span in which words are swapped
_FREQUENT = 20  # a token that is there less often counts as if it were as often: it may be a slip
LONGEST_WORD = 4  # tokens of the longest words that are swapped; few are longer

Change = Callable[[Tensor], Tensor]  # ids (B, T) -> others of the same lengths
Batch = tuple[Tensor, Tensor]  # ids (B, T) int64, vectors (B, E) float32


class Pairs(Protocol):
    """Where training gets its batches."""

    def batch(self, step: int, rows: slice) -> Batch:
        """Rows `rows` of the batch of that step, on the training device."""
        ...

    def validation(self) -> Batch:
        """All pairs kept aside, never seen in a batch."""
        ...

    def most_tokens(self, rows: int) -> int:
        """Bound the tokens of so many rows, ends counted, that are drawn at random."""
        ...


def step_generator(
    seed: int, step: int, *, stream: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator whose draws depend on seed, step and stream alone.

    Streams keep the draws for order, masks and validation apart.
    """
    mixed = np.random.SeedSequence([seed, step, stream]).generate_state(2, np.uint32)
    # A CUDA generator takes 64 bits, a CPU one keeps 64 too; the sign bit stays clear.
    return torch.Generator(device=device).manual_seed((int(mixed[0]) << 31) ^ int(mixed[1]))


class CachedPairs:
    """Pairs whose vectors were computed beforehand, in a new order each epoch."""

    def __init__(
        self, data: PreparedData, *, batch_size: int, validation: int, seed: int, device: torch.device | str
    ) -> None:
        """Take the last `validation` pairs aside; the rest is for training."""
        if data.kind != "pairs":
            raise UnembedError(
                f"{data.path} holds passages without vectors; train with --pairs fresh, or prepare pairs."
            )
        self.data, self.batch_size, self.seed, self.device = data, batch_size, seed, device
        self.train_count = _train_count(data.count, validation)
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def batch(self, step: int, rows: slice) -> Batch:
        """Rows of the batch of that step."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        epochs, within = np.divmod(places, self.train_count)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._order(int(epoch))[within[here]]
        return self._gather(chosen)

    def validation(self) -> Batch:
        """The pairs kept aside."""
        return self._gather(np.arange(self.train_count, self.data.count))

    def most_tokens(self, rows: int) -> int:
        """Bound the tokens of so many rows: texts that are kept may all be long."""
        return rows * self.data.max_tokens

    def _order(self, epoch: int) -> np.ndarray:
        """Permutation of the training pairs in that epoch; the latest one is kept."""
        if self._epoch[0] != epoch:
            generator = step_generator(self.seed, epoch, stream=1)
            self._epoch = (epoch, torch.randperm(self.train_count, generator=generator).numpy())
        return self._epoch[1]

    def _gather(self, rows: np.ndarray) -> Batch:
        """Read pairs from the memory-mapped shards."""
        ids = torch.from_numpy(self.data.ids(rows)).to(self.device)
        vectors = torch.from_numpy(self.data.vectors(rows)).to(self.device)
        return ids, vectors


class FreshSpans:
    """Random spans of passages, embedded while training: no pair is seen twice.

    Half of the spans start where the passage starts, the rest at any word that leaves half a row of
    text behind it; seven eighths run as far as they may, the rest end at any word. So most rows are
    well filled: padding costs as much as text and teaches little. In a share of them passages with rare words
    are drawn more often, so that texts of other kinds than most are not strange. A share is spliced: a first
    piece, and behind it a second one, of another passage. In another share some words are swapped for any
    others: rare words have their turn, and what cannot be guessed must be read from the vector. All on the
    device, without a loop over rows.
    """

    def __init__(
        self,
        data: PreparedData,
        *,
        encoder: IdEncoder,
        batch_size: int,
        validation: int,
        seed: int,
        device: torch.device | str,
        shortest: int = 4,
        splice_share: float = 0.0,
        swap_share: float = 0.0,
        rare_share: float = 0.0,
        compile: bool = False,
    ) -> None:
        """Move the corpus to the device; the last `validation` passages are kept aside."""
        if data.kind != "passages":
            raise UnembedError(
                f"{data.path} holds ready pairs; train with --pairs cached, or prepare passages."
            )
        self.encoder, self.batch_size, self.seed, self.device = encoder, batch_size, seed, device
        self.max_tokens, self.shortest = data.max_tokens, shortest
        self.splice_share, self.swap_share = splice_share, swap_share
        self.end_id, self.pad_id = data.tokenizer.end_id, data.tokenizer.pad_id
        self.train_count = _train_count(data.count, validation)
        tokens = torch.from_numpy(data.tokens.astype(np.int32))
        opens = torch.from_numpy(data.tokenizer.word_start)
        starts_word = opens[tokens.long()]
        starts_word[torch.from_numpy(data.offsets[:-1])] = True
        # For every token, where its word begins: a running maximum over the word starts.
        places = torch.arange(len(tokens), dtype=torch.int32)
        word_begin = torch.where(starts_word, places, 0).cummax(0).values
        self.tokens, self.word_begin = tokens.to(device), word_begin.to(device)
        self.offsets = torch.from_numpy(data.offsets).to(device)
        self.opens = opens.to(device)
        trained = slice(0, int(data.offsets[self.train_count]))
        edges = self.offsets[: self.train_count + 1]
        self.chances = _passage_chances(self.tokens[trained], edges, rare_share=rare_share)
        if swap_share:
            begins = starts_word[trained].to(device).nonzero()[:, 0]
            self.words = [
                _each_word(self.tokens[trained], begins, self.opens, size=n + 1) for n in range(LONGEST_WORD)
            ]
        _, kept, _, more = self._draw(0, 2**14)
        sizes = (kept + more + 1).clamp_max(self.max_tokens).double()  # the end is one more
        self._tokens_a_row = float(sizes.mean()), float(sizes.std())
        # Only batches, all of one shape, take the compiled way.
        function = getattr(encoder, "id_function", None) if compile else None
        self._compiled = None if function is None else torch.compile(function())

    def batch(self, step: int, rows: slice, change: Change | None = None) -> Batch:
        """Rows of the batch of that step: drawn whole, cut to the rows, changed if asked, then embedded."""
        begin, kept, then, more = (part[rows] for part in self._draw(step, self.batch_size))
        lengths = kept + more
        ids = self._cut(begin, lengths, kept=kept, then=then)
        if self.swap_share:
            ids = self._swap(ids, step, rows)
        if change is not None:
            ids = change(ids)
        if self._compiled is None:
            return ids, self.encoder.encode_ids(ids, lengths)
        with torch.no_grad():
            return ids, self._compiled(ids, lengths)

    def _swap(self, ids: Tensor, step: int, rows: slice) -> Tensor:
        """Swap some words of some rows for any others of as many tokens, so that lengths stay."""
        generator = step_generator(self.seed, step, stream=3, device=self.device)
        shape = 3, self.batch_size, self.max_tokens
        u = torch.rand(shape, generator=generator, device=self.device)[:, rows]
        text = (ids != self.end_id) & (ids != self.pad_id)
        places = torch.arange(self.max_tokens, device=self.device)
        begin = torch.where(self.opens[ids] | ~text, places, 0).cummax(1).values  # of each token's word
        size = torch.zeros_like(begin).scatter_add(1, begin, text.long()).gather(1, begin)
        row, chance, which = u[0, :, :1], u[1].gather(1, begin), u[2].gather(1, begin)
        swapped = text & (row < self.swap_share) & (chance < SWAPPED)
        for n, words in enumerate(self.words, 1):
            if len(words):
                other = words[(which * len(words)).long().clamp_max(len(words) - 1)] + places - begin
                taken = self.tokens[other.clamp_max(len(self.tokens) - 1)].long()
                ids = torch.where(swapped & (size == n), taken, ids)
        return ids

    def most_tokens(self, rows: int) -> int:
        """Bound the tokens of so many rows: five standard deviations above the mean of all rows."""
        mean, deviation = self._tokens_a_row
        return min(rows * self.max_tokens, math.ceil(rows * mean + 5 * rows**0.5 * deviation))

    def _draw(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the rows of a step: where each begins and how much is kept, where it goes on and how far."""
        generator = step_generator(self.seed, step, stream=1, device=self.device)
        u = torch.rand((7, count), generator=generator, device=self.device)
        begin, lengths = self._spans(u)
        # A spliced row goes on with the span of the row before it. One that is too short to be cut, or all of
        # one word, stays whole: without a first piece it would be that row once more.
        cut = self._word_cut(begin, u[6] * (lengths - self.shortest).clamp_min(0))
        spliced = (u[5] < self.splice_share) & (cut >= self.shortest) & (cut < lengths)
        kept = torch.where(spliced, cut, lengths)
        then = torch.where(spliced, begin.roll(1), begin)
        more = torch.where(spliced, lengths.roll(1), 0).minimum(self.max_tokens - kept)
        return begin, kept, then, more

    def _spans(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Where spans begin and how long they are, by five uniforms each."""
        passage = torch.searchsorted(self.chances, u[0].double()).clamp_max(self.train_count - 1)
        first, stop = self.offsets[passage], self.offsets[passage + 1]
        anywhere = first + (u[2] * (stop - first - self.max_tokens // 2 + 1).clamp_min(1)).long()
        begin = torch.where(u[1] < 0.5, first, self.word_begin[anywhere].long())
        furthest = (stop - begin).clamp_max(self.max_tokens)
        cut = self._word_cut(begin, u[4] * (furthest - self.shortest).clamp_min(0)).minimum(furthest)
        return begin, torch.where((u[3] < 0.875) | (cut < self.shortest), furthest, cut)

    def _word_cut(self, begin: Tensor, beyond: Tensor) -> Tensor:
        """Tokens up to the word that is so far beyond the shortest span."""
        place = (begin + self.shortest + beyond.long()).clamp_max(len(self.tokens) - 1)
        return (self.word_begin[place].long() - begin).clamp_min(0)

    def validation(self) -> Batch:
        """The beginnings of the passages kept aside."""
        begin = self.offsets[self.train_count : -1]
        lengths = (self.offsets[self.train_count + 1 :] - begin).clamp_max(self.max_tokens)
        ids = self._cut(begin, lengths, kept=lengths, then=begin)
        parts = zip(ids.split(2048), lengths.split(2048), strict=True)
        return ids, torch.cat([self.encoder.encode_ids(some, n) for some, n in parts])

    def _cut(self, begin: Tensor, lengths: Tensor, *, kept: Tensor, then: Tensor) -> Tensor:
        """Cut spans out of the corpus, from `then` on behind what is kept, with an end and padding."""
        places = torch.arange(self.max_tokens, device=self.device)
        source = torch.where(places < kept[:, None], begin[:, None] + places, (then - kept)[:, None] + places)
        ids = self.tokens[source.clamp(0, len(self.tokens) - 1)].long()
        ids = torch.where(places < lengths[:, None], ids, self.pad_id)
        return torch.where(places == lengths[:, None], self.end_id, ids)


def _train_count(count: int, validation: int) -> int:
    """Pairs left for training."""
    if count <= validation:
        raise UnembedError(
            f"the data holds {count} texts, but {validation} are to be kept for validation; "
            "prepare more text or lower --validation."
        )
    return count - validation


def _passage_chances(tokens: Tensor, edges: Tensor, *, rare_share: float) -> Tensor:
    """Chances (N,) that a span is of each passage or of one before it; `edges` (N + 1,) part their tokens.

    All are alike, but in a share of the spans they go by how rare a passage's tokens are: by the mean of
    one over the root of how often a token is there.
    """
    sizes = edges.diff().clamp_min(1)
    chances = torch.full_like(sizes, 1 / len(sizes), dtype=torch.float64)
    if rare_share:
        tokens = tokens.long()
        rarity = tokens.bincount().clamp_min(_FREQUENT).double() ** -0.5
        means = F.pad(rarity[tokens].cumsum(0), (1, 0))[edges].diff() / sizes
        chances = chances.lerp(means / means.sum(), rare_share)
    return chances.cumsum(0)


def _each_word(tokens: Tensor, begins: Tensor, opens: Tensor, *, size: int) -> Tensor:
    """Where each word of so many tokens stands, once each, of those that begin at `begins`.

    A vocabulary may not tell where words begin: then no token of it `opens` one, and there are none.
    """
    ends = torch.cat((begins[1:], begins.new_tensor([len(tokens)])))
    begins = begins[(ends - begins == size) & opens[tokens[begins]]]
    if not len(begins):
        return begins
    key, base = torch.zeros_like(begins), (int(tokens.max()) + 1) | 1  # odd: what overflows is not lost
    for place in range(size):
        key = key * base + tokens[begins + place]
    _, word = key.unique(return_inverse=True)
    return torch.zeros(int(word.max()) + 1, dtype=begins.dtype, device=begins.device).scatter(0, word, begins)
