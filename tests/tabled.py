"""An encoder without a model, for tests of training: a vector for each token at each place, added up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unembed.encoders import LocalEncoder
from unembed.tokens import TextTokenizer


class TabledEncoder(LocalEncoder):
    """Adds up the vectors of a table (V, T, E)."""

    def __init__(self, table: Tensor, tokenizer: TextTokenizer, *, name: str = "fake") -> None:
        self.name, self.size, self.table, self._words = name, table.shape[2], table, tokenizer

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._words

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return (self.table[ids, places] * (places < lengths[:, None])[..., None]).sum(1)

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        encoded = self.tokenizer.encode(texts, max_tokens=self.table.shape[1])
        return self.encode_ids(torch.from_numpy(encoded.ids), torch.from_numpy(encoded.lengths)).numpy()
