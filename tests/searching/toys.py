"""Encoders and models that know little, and searches by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from recovering import FakeEncoder
from torch import Tensor, nn

from unembed import Inverter
from unembed.backbone import build
from unembed.config import ModelConfig
from unembed.decode import DecodeOptions
from unembed.reader import Reader
from unembed.results import Inversion
from unembed.search import Searcher, SearchOptions
from unembed.tokens import TextTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]
WORDS = "the a small old red cat dog bird sat ran on under mat roof road today near far and then ##s".split()
TEXTS = [
    "the small cat sat under a roof",
    "a red bird ran near the road",
    "then the old dog ran far today",
    "cat and dog",
    "the bird sat on a mat",
]
T, E = 12, 96


class Bigrams(FakeEncoder):
    """An encoder that hears which word follows which; it counts what it is asked."""

    name, size = "bigrams", E

    def vector(self, text: str) -> np.ndarray:
        words = ["^", *text.split(), "$"]
        parts = [*words, *zip(words, words[1:], strict=False)]
        seeds = [list(repr(part).encode()) for part in parts]
        return np.sum([np.random.default_rng(seed).standard_normal(self.size) for seed in seeds], axis=0)


class WordsOnly(nn.Module):
    """A model that knows the words of each text and how many there are, but not their order."""

    vectors: Tensor
    logits: Tensor

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, texts: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        vectors = torch.from_numpy(Bigrams().encode(texts))
        self.register_buffer("vectors", nn.functional.normalize(vectors, dim=1))
        encoded = tokenizer.encode(texts, max_tokens=T)
        logits = torch.full((len(texts), T, config.vocab_size), -20.0)
        for row, ids, length in zip(logits, encoded.ids, encoded.lengths, strict=True):
            row[:length, ids[:length]] = 0.0
            row[length:, config.pad_id] = 5.0
            if length < T:
                row[length, config.end_id] = 10.0
        self.register_buffer("logits", logits)

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        nearest = (nn.functional.normalize(e, dim=1) @ self.vectors.T).argmax(1)
        return self.logits[nearest]

    def head(self, h: Tensor) -> Tensor:
        return h


class Places(Bigrams):
    """An encoder that hears which token stands where, the end included, each as a number of its own."""

    name = "places"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self.tokenizer, self.size = tokenizer, T * tokenizer.size

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        encoded = self.tokenizer.encode(texts, max_tokens=T)
        rows = np.zeros((len(texts), T, self.tokenizer.size), np.float32)
        for row, ids, length in zip(rows, encoded.ids, encoded.lengths, strict=True):
            row[np.arange(length + 1), ids[: length + 1]] = 1.0
        flat = rows.reshape(len(rows), -1)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)


class Errs(nn.Module):
    """A model that reads off the vector of `Places` what stands where, but prefers to begin with "the"."""

    def __init__(self, config: ModelConfig, *, by: float) -> None:
        super().__init__()
        self.config, self.by = config, by
        self.asked: list[Tensor] = []

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        self.asked.append(e)
        logits = e.unflatten(1, (T, -1)).clone()
        logits[:, 0, len(SPECIAL) + WORDS.index("the")] += self.by
        return 40 * logits

    def head(self, h: Tensor) -> Tensor:
        return h


def open_causal(inverter: Inverter, *, seed: int = 0, **settings: Any) -> Inverter:
    """One of random weights that reads left to right."""
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "adaln_rank": 0}
    config = inverter.config.override(causal=True, **shape, **settings)
    torch.manual_seed(seed)
    model = build(config.model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return Inverter(model, config=config, tokenizer=inverter.tokenizer, device="cpu")


def open_search(inverter: Inverter, **options: Any) -> Searcher:
    """Search by `Bigrams`, whatever part it plays."""
    settings: dict[str, Any] = {"rounds": 4, "candidates": 8, "seed": 1}
    decoding = DecodeOptions("confidence", 4).fit(inverter.config.model)
    reader = Reader(Bigrams(), inverter.tokenizer)
    return Searcher(
        inverter.ready, reader, inverter.config.diffusion, decoding, SearchOptions(**(settings | options))
    )


def refine(inverter: Inverter, vectors: Any, **options: Any) -> list[Inversion]:
    settings: dict[str, Any] = {"encoder": Bigrams(), "rounds": 10, "candidates": 16, "seed": 0}
    return inverter.invert(vectors, refine="encoder", **(settings | options))
