"""Encoders that are a table: a vector for each token, added up and brought to length one.

Two kinds come out of the same form. A static encoder (model2vec) has its tokens' vectors distilled from a
transformer. Latent semantic analysis weighs counts by idf and projects them on the singular vectors of a
corpus; as the length is taken out at the end, that too is a sum over tokens, of idf times a row of
singular vectors. Knows tables, ids and their files; must not know transformers, nor what vectors are for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unembed.errors import UnembedError, check_batch_size, first_line, unknown_name
from unembed.tokens import TextTokenizer
from unembed.whole import whole_folder

if TYPE_CHECKING:
    import torch

SETTINGS, WEIGHTS = "encoder.json", "table.safetensors"
FORMAT = 1
DTYPES = ("float32", "float16", "bfloat16")


class TableEncoder:
    """The sum of the vectors of a text's tokens, of length one; in any order, it is the same."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        """Load the table.

        Args:
            folder: where `save_table` wrote it.
            name: what to call it; the folder by default.
            device: cpu, cuda, ...; the best there is by default.
            dtype: how the table is kept, float32 by default; sums are float32 in any case.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        self.name = name or str(folder)
        if dtype not in (None, *DTYPES):
            raise unknown_name("dtype", str(dtype), DTYPES)
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            if settings["format"] != FORMAT:
                raise KeyError(f"format {settings['format']}")
            self.kind, self.facts = str(settings["kind"]), dict(settings["facts"])
            table = load_file(folder / WEIGHTS)["table"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UnembedError(
                f"encoder {self.name} cannot be loaded: {first_line(error)}; expected the folder of a table, "
                "as save_table writes it."
            ) from error
        self.tokenizer = TextTokenizer.load(folder)
        if table.dim() != 2 or len(table) != self.tokenizer.size:
            raise UnembedError(
                f"encoder {self.name} has a table of shape {tuple(table.shape)} for a vocabulary of "
                f"{self.tokenizer.size} tokens; make it again."
            )
        self.size = table.shape[1]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._table = table.to(self.device, getattr(torch, dtype or "float32"))

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each; a text of unknown tokens alone gives zeros."""
        import torch

        check_batch_size(batch_size)
        spans = self.tokenizer.spans(texts)
        for index, span in enumerate(spans):
            if not len(span):
                raise UnembedError(
                    f"text {index} is {texts[index]!r}; expected text that is not blank; leave it out."
                )
        parts = []
        for start in range(0, len(spans), batch_size):
            batch = [torch.from_numpy(span) for span in spans[start : start + batch_size]]
            lengths = torch.tensor([len(span) for span in batch], device=self.device)
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(self.device)
            parts.append(self.encode_ids(ids, lengths).cpu().numpy())
        return np.concatenate([np.zeros((0, self.size), dtype=np.float32), *parts])

    def encode_ids(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embed rows of content ids (B, T), `lengths` (B,) of them in each: (B, size), float32."""
        import torch
        import torch.nn.functional as F

        inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        total = (self._table[ids].float() * inside[..., None]).sum(1)
        return F.normalize(total, dim=1)


def is_table(folder: Path) -> bool:
    """Tell the folder of a table from that of another model."""
    return (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file()


def save_table(
    folder: str | Path, table: np.ndarray, *, tokenizer: TextTokenizer, kind: str, facts: dict[str, Any]
) -> None:
    """Write a table (V, E) with its vocabulary in half precision, whole or not at all.

    The length of vectors is taken out in the end, so the table may be scaled to the range of its numbers;
    by a power of two, which rounds nothing.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    if folder.exists():
        raise UnembedError(f"{folder} exists already; choose another folder, or remove it.")
    if table.ndim != 2 or len(table) != tokenizer.size or not np.isfinite(table).all() or not table.any():
        raise UnembedError(
            f"expected finite numbers of shape ({tokenizer.size}, size), not all zero; got {table.shape}."
        )
    scaled = (table * 2.0 ** -np.ceil(np.log2(np.abs(table).max()))).astype(np.float16)
    settings = {"format": FORMAT, "kind": kind, "size": table.shape[1], "facts": facts}
    with whole_folder(folder) as draft:
        tokenizer.save(draft)
        save_file({"table": np.ascontiguousarray(scaled)}, draft / WEIGHTS)
        (draft / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def fit_lsa(
    tokens: np.ndarray, offsets: np.ndarray, *, vocab_size: int, size: int = 300, seed: int = 0
) -> np.ndarray:
    """Fit TF-IDF and a truncated SVD to passages and return their table (vocab_size, size).

    tokens: the ids of all passages, one after the other; offsets: where each begins, and the end.
    Terms are the tokens themselves, so that vectors can be made of ids, on any device.
    """
    try:
        from scipy.sparse import csr_matrix
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfTransformer
    except ImportError as error:
        raise UnembedError("fitting LSA needs scikit-learn: pip install 'unembed[lsa]'.") from error
    passages = len(offsets) - 1
    if not 1 <= size < min(passages, vocab_size):
        raise UnembedError(
            f"size must lie between 1 and {min(passages, vocab_size) - 1}, below the number of passages and "
            f"of tokens, not {size}."
        )
    ones = np.ones(len(tokens), dtype=np.float32)
    counts = csr_matrix((ones, tokens.astype(np.int32), offsets), shape=(passages, vocab_size))
    counts.sum_duplicates()
    weigh = TfidfTransformer()
    svd = TruncatedSVD(size, random_state=seed)
    svd.fit(weigh.fit_transform(counts))
    table = weigh.idf_[:, None] * svd.components_.T
    table[np.bincount(tokens, minlength=vocab_size) == 0] = 0  # but for rounding, it is
    return table.astype(np.float32)


def table_of_model2vec(folder: str | Path, tokenizer: TextTokenizer) -> np.ndarray:
    """Read the static model that model2vec saved as a table (V, E) in the numbering of `tokenizer`.

    model2vec drops special and unused tokens and numbers the rest anew; what it dropped, and the unknown
    token, which it leaves out of a text, gets zeros.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        theirs = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        tensors = load_file(folder / "model.safetensors")
        rows, unknown = dict(theirs["vocab"]), theirs.get("unk_token")
        if set(tensors) != {"embeddings"} or not settings["normalize"]:
            raise KeyError("only models with one vector a token, brought to length one, are read")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UnembedError(
            f"{folder} cannot be read: {first_line(error)}; expected what StaticModel.save_pretrained writes."
        ) from error
    rows.pop(unknown, None)
    ours = _vocabulary(tokenizer.to_json())
    table = np.zeros((tokenizer.size, tensors["embeddings"].shape[1]), dtype=np.float32)
    shared = [(i, rows[token]) for token, i in ours.items() if token in rows]
    if len(shared) < len(rows) - 1:  # but for the padding that may go by another name
        raise UnembedError(f"{folder} has another vocabulary: {len(rows) - len(shared)} tokens are not ours.")
    here, there = zip(*shared, strict=True)
    table[list(here)] = tensors["embeddings"][list(there)]
    return table


@functools.cache
def _vocabulary(text: str) -> dict[str, int]:
    """Read the tokens of a tokenizer.json."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
