"""A model that knows words without their order, one that reads left to right, and vectors."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from searching.toys import SPECIAL, TEXTS, WORDS, Bigrams, E, T, WordsOnly, open_causal
from unembed import Inverter
from unembed.config import Config
from unembed.tokens import TextTokenizer


@pytest.fixture(scope="module")
def inverter() -> Inverter:
    base = Tokenizer(models.WordPiece({t: i for i, t in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    base.normalizer = normalizers.Lowercase()
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(SPECIAL)
    tokenizer = TextTokenizer.wrap(base)
    config = Config().override(
        encoder="bigrams", max_tokens=T, vocab_size=tokenizer.size, embedding_size=E,
        mask_id=tokenizer.mask_id, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    model = WordsOnly(config.model, tokenizer, TEXTS)
    return Inverter(model, config=config, tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def causal(inverter: Inverter) -> Inverter:
    return open_causal(inverter)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return Bigrams().encode(TEXTS)
