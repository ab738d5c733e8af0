"""Rows of ids, each as the tokenizer spells its text, without going through text row by row.

Knows that a BERT tokenizer spells word by word: a word once looked up is spelt by a table on the device.
Must not know what the rows are for. Where a tokenizer does not work so, every row goes through text.
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.tokens import TextTokenizer

LONGEST = 8  # tokens of a spelling in the table; rows with a longer one go through text
MOST_WORDS = 2**18  # bounds the table: it then starts anew
NEVER = torch.iinfo(torch.long).max


class Speller:
    """Spells rows as the tokenizer spells their text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Find out whether the tokenizer works word by word."""
        spec = json.loads(tokenizer.to_json())
        stages = [(spec[stage] or {}).get("type") for stage in ("normalizer", "pre_tokenizer", "model")]
        self.tokenizer = tokenizer
        # Others let a word's spelling depend on its neighbours: "?!" is one word to some, "? !" two.
        self.by_word = stages == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        self._forget(torch.device("cpu"))

    def respell(self, ids: Tensor) -> Tensor:
        """Spell rows (N, T) of content, end, padding; rows without a token come back empty."""
        if not self.by_word or not len(ids):
            return self._through_text(ids)
        if self._keys.device != ids.device or len(self._keys) > MOST_WORDS:
            self._forget(ids.device)
        T = ids.shape[1]
        content = (ids == self.tokenizer.end_id).cumsum(1) == 0
        places = torch.arange(T, device=ids.device).expand_as(ids)
        starts = content & (self._starts[ids] | (places == 0))
        word = (starts.cumsum(1) - 1).clamp(min=0)
        begin = places.masked_fill(~starts, 0).cummax(1).values
        parts = (ids + 1) * self._weights(T)[places - begin]
        hashes = torch.zeros_like(ids).scatter_add_(1, word, parts.masked_fill(~content, 0))
        real = places < starts.sum(1, keepdim=True)
        hashes = hashes.clamp(max=NEVER - 1).masked_fill(~real, NEVER)
        self._learn(ids, hashes, begin, starts, content)

        entry = torch.searchsorted(self._keys, hashes)
        counts = self._counts[entry]
        ends = counts.clamp(min=0).cumsum(1)
        length = ends[:, -1:]
        # Which word stands at a place of the new row, and which of its tokens.
        which = torch.searchsorted(ends, places.contiguous(), right=True).clamp(max=T - 1)
        token = places - F.pad(ends, (1, 0)).gather(1, which)
        spelt = self._spellings[entry.gather(1, which), token.clamp(0, LONGEST - 1)]
        spelt = torch.where(places < length, spelt, self.tokenizer.pad_id)
        spelt = spelt.masked_fill(places == length, self.tokenizer.end_id)
        odd = ((counts < 0).any(1) | (length.squeeze(1) > T)).nonzero().squeeze(1)
        if len(odd):
            spelt[odd] = self._through_text(ids[odd])
        return spelt

    def _through_text(self, ids: Tensor) -> Tensor:
        """Decode rows and encode them again."""
        texts = self.tokenizer.decode(ids.cpu().numpy())
        again = self.tokenizer.encode(texts, max_tokens=ids.shape[1], allow_empty=True)
        return torch.from_numpy(again.ids).to(ids.device)

    def _forget(self, device: torch.device) -> None:
        """Start with a table that holds no word but the one that is not there."""
        self._starts = torch.from_numpy(self.tokenizer.word_start).to(device)
        self._keys = torch.full((1,), NEVER, device=device)  # sorted hashes of words
        self._counts = torch.zeros(1, dtype=torch.long, device=device)  # tokens; -1 where not by word
        self._spellings = torch.zeros((1, LONGEST), dtype=torch.long, device=device)

    def _weights(self, count: int) -> Tensor:
        """Draw the weight of each of a word's tokens in its hash."""
        return hash_weights(count, device=self._keys.device)

    def _learn(self, ids: Tensor, hashes: Tensor, begin: Tensor, starts: Tensor, content: Tensor) -> None:
        """Look up the words that are new, each once, and add them to the table."""
        # At its first token a word has its hash and its place.
        own = hashes.gather(1, (starts.cumsum(1) - 1).clamp(min=0))
        known = self._keys[torch.searchsorted(self._keys, own).clamp(max=len(self._keys) - 1)] == own
        rows, places = (starts & ~known).nonzero(as_tuple=True)
        if not len(rows):
            return
        new, order = own[rows, places].sort(stable=True)
        first = F.pad(new[1:] != new[:-1], (1, 0), value=True)
        some = order[first]
        rows, places = rows[some], places[some]
        inside = (begin[rows] == places[:, None]) & content[rows]
        texts = [row[keep] for row, keep in zip(ids[rows].cpu().numpy(), inside.cpu().numpy(), strict=True)]
        spelt, counts = self._spell(texts)
        self._keys, order = torch.cat((self._keys, new[first])).sort()
        self._counts = torch.cat((self._counts, counts.to(ids.device)))[order]
        self._spellings = torch.cat((self._spellings, spelt.to(ids.device)))[order]

    def _spell(self, words: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Spell words (W, LONGEST) with the tokens of each (W,), -1 where the table cannot hold it."""
        tokens = sorted({int(i) for word in words for i in word})
        shown = dict(zip(tokens, self.tokenizer.decode([[i] for i in tokens]), strict=True))
        spelt = torch.zeros((len(words), LONGEST), dtype=torch.long)
        counts = torch.full((len(words),), -1)
        again = self.tokenizer.spans(self.tokenizer.decode(words))
        for n, (word, ids) in enumerate(zip(words, again, strict=True)):
            # A token that shows nothing is left out before words are joined, so it joins its neighbours.
            if len(ids) <= LONGEST and all(shown[int(i)] for i in word):
                counts[n] = len(ids)
                spelt[n, : len(ids)] = torch.from_numpy(ids)
        return spelt, counts


def hash_weights(count: int, *, device: torch.device) -> Tensor:
    """Draw odd weights modulo 2^64 for hashes of ids: rows collide by no more than chance."""
    weights = np.random.Philox(key=1).random_raw(count).view(np.int64) | 1
    return torch.from_numpy(weights).to(device)
