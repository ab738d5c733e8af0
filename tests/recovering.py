"""An encoder and an inverter that know some texts by heart, for tests of what is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from unembed.config import Config, ModelConfig
from unembed.inverter import Inverter
from unembed.results import Inversion
from unembed.tokens import TextTokenizer

SHAPE = ModelConfig(max_tokens=8)  # what a plan has to know of the inverter below
WORDS = "the a small old red cat dog bird sat ran on under mat roof road today".split()


def make_tokenizer() -> TextTokenizer:
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[SEP]", "[MASK]", *WORDS])}
    base = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    base.normalizer = normalizers.Lowercase()
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(["[PAD]", "[UNK]", "[SEP]", "[MASK]"])
    return TextTokenizer.wrap(base)


class FakeEncoder:
    """Gives every text, whatever its case, a vector of its own, and notes what it was asked."""

    name = "fake"
    size = 16

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        return np.array([self.vector(text) for text in texts], np.float32).reshape(len(texts), self.size)

    def vector(self, text: str) -> np.ndarray:
        return np.random.default_rng(list(text.lower().encode())).standard_normal(self.size)


class FakeInverter(Inverter):
    """Knows some texts by their vectors, and answers one fixed text to all others."""

    pause = 0.002  # seconds a text

    def __init__(self, tokenizer: TextTokenizer, *, known: Sequence[str], guess: str = "the old cat") -> None:
        config = Config().override(
            encoder="fake", max_tokens=8, vocab_size=tokenizer.size, embedding_size=FakeEncoder.size
        )
        super().__init__(torch.nn.Identity(), config=config, tokenizer=tokenizer, device="cpu")
        encoded = tokenizer.encode([*known, guess], max_tokens=8)
        contents = [ids[:n].tolist() for ids, n in zip(encoded.ids, encoded.lengths, strict=True)]
        vectors = FakeEncoder().encode(encoded.texts)
        self.memory = {v.tobytes(): ids for v, ids in zip(vectors[:-1], contents[:-1], strict=True)}
        self.guess = contents[-1]
        self.calls: list[dict[str, Any]] = []

    def invert(self, vectors: Any, strategy: str = "confidence", **options: Any) -> list[Inversion]:  # type: ignore[override]
        self.calls.append(options | {"strategy": strategy, "count": len(vectors)})
        time.sleep(self.pause * len(vectors))
        rows = [self.memory.get(vector.tobytes(), self.guess) for vector in vectors]
        texts = self.tokenizer.decode(rows)
        return [
            Inversion(text, ids, [1.0] * len(ids), strategy, options["steps"])
            for text, ids in zip(texts, rows, strict=True)
        ]
