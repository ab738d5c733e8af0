"""Texts of syllables, an encoder of them, and settings of a small model of them: for tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabled import TabledEncoder
from tokenizers import Tokenizer, models, pre_tokenizers

from unembed.config import Config, ModelConfig, TrainConfig
from unembed.corpus import prepare
from unembed.run import Group
from unembed.tokens import TextTokenizer

T, SIZE = 8, 16
SYLLABLES = [c + v for c in "bdgkm" for v in "aeiou"]
ALONE = Group(0, 1, torch.device("cpu"))
CONFIG = Config(
    model=ModelConfig(layers=1, hidden=32, heads=2, ffn=64, adaln_rank=0),
    train=TrainConfig(
        batch_size=9, steps=50, learning_rate=5e-3, muon_rate=1e-2, warmup=5, decay="linear", ema=0.9,
        validation=8, evaluate_every=10, save_every=15, precision="fp32",
    ),
)  # fmt: skip
LEARNING = CONFIG.override(
    embeds=True, embed_share=0.5, pairs="fresh", batch_size=64, optimizer="muon", steps=200, validation=50,
    evaluate_every=50,
)  # fmt: skip
GUESSING: dict[str, Any] = {"embeds": True, "embed_share": 0.25}
LEFT_TO_RIGHT: dict[str, Any] = {"causal": True, "causal_share": 0.5, "causal_hidden": 0.2, "lowest_t": 0.3}


def syllable_tokenizer() -> TextTokenizer:
    """Build a vocabulary of 53 tokens: syllables that begin a word, and syllables that follow."""
    tokens = ["[PAD]", "[SEP]", "[MASK]", *SYLLABLES, *(f"##{s}" for s in SYLLABLES)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer.wrap(tokenizer, name="syllables")


class FakeEncoder(TabledEncoder):
    """A random vector for each token at each place."""

    def __init__(self, size: int = SIZE) -> None:
        table = torch.randn(64, T, size, generator=torch.Generator().manual_seed(0))
        super().__init__(table, syllable_tokenizer())


def texts(count: int, longest: int) -> list[str]:
    """Return texts of words of one or two syllables."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, longest, count)
    return [" ".join("".join(rng.choice(SYLLABLES, rng.integers(1, 3))) for _ in range(n)) for n in lengths]


def prepare_pairs(out: Path) -> Path:
    """Write 48 pairs."""
    return prepare(texts(48, 6), encoder=FakeEncoder(), out=out, max_tokens=T, source_names=["made up"]).path


def prepare_passages(out: Path) -> Path:
    """Write passages for spans."""
    return prepare(texts(400, 30), encoder=FakeEncoder(), out=out, max_tokens=T, kind="passages").path
