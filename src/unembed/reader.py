"""How an encoder is asked about rows of ids: by ids where it takes them, else by their text.

Knows encoders, a model that guesses their vectors, and a tokenizer. It must not know what becomes of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unembed.errors import UnembedError
from unembed.spelling import Speller

if TYPE_CHECKING:
    from unembed.encoders import Encoder
    from unembed.tokens import TextTokenizer

# Rows that go through a model or an encoder together: a bound of memory.
ROWS = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Guesses:
    """A model's own guesses of its encoder's vectors, asked as an encoder is."""

    model: Any  # one that `embeds`
    tokenizer: TextTokenizer
    target: str  # the encoder whose vectors are guessed

    @property
    def name(self) -> str:
        """What answers say they were ranked by."""
        return f"guessed {self.target}"

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Guess the vectors (B, E) of rows ids (B, T), an end and padding behind their tokens."""
        guesses: Tensor = self.model.embed(ids)
        return guesses


class Reader:
    """Reads candidates as the encoder would: rows of ids in, vectors out."""

    def __init__(self, encoder: Encoder | Guesses, tokenizer: TextTokenizer) -> None:
        """Take the way through ids where the encoder has one and shares the vocabulary."""
        self.encoder, self.tokenizer = encoder, tokenizer
        own: TextTokenizer | None = getattr(encoder, "tokenizer", None)
        shares = own is not None and own.to_json() == tokenizer.to_json()
        self.by_ids = shares and _takes_ids(encoder)
        self._speller = Speller(tokenizer)

    def respell(self, ids: Tensor) -> Tensor:
        """Spell rows as the tokenizer spells their text; rows without a token come back empty.

        The truth is spelt like that, so another spelling is never it, and two spellings of a text
        must not cost two calls.
        """
        return self._speller.respell(ids)

    def embed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Embed respelt rows that are not empty."""
        encoder: Any = self.encoder
        if self.by_ids:
            device = getattr(encoder, "device", ids.device)
            return encoder.encode_ids(ids.to(device), lengths.to(device)).to(ids.device)
        texts = self.tokenizer.decode(ids.cpu().numpy())
        return torch.from_numpy(np.asarray(encoder.encode(texts), np.float32)).to(ids.device)


def _takes_ids(encoder: Any) -> bool:
    """Whether an encoder embeds ids; some prompts join the text's first token, and then it refuses."""
    if not hasattr(encoder, "encode_ids"):
        return False
    try:
        one = torch.ones((1, 1), dtype=torch.long, device=getattr(encoder, "device", "cpu"))
        encoder.encode_ids(one, one[0])
    except UnembedError:
        return False
    return True
