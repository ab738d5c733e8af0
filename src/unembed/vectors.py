"""Vectors as people give them: brought into shape and checked, and how near texts come to them.

Knows numpy, torch and what an encoder promises. Must not know the model that inverts them, nor how it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unembed.errors import UnembedError

if TYPE_CHECKING:
    from unembed.encoders import Encoder

Vectors = np.ndarray | Tensor | Sequence[Sequence[float]] | Sequence[float]


def check_vectors(vectors: Vectors, *, size: int, encoder_name: str) -> Tensor:
    """Bring vectors into shape (N, E), or say what is wrong with them.

    Args:
        vectors: One (E,) or many (N, E), numpy or torch; their length does not matter.
        size: The numbers that a vector should have, E.
        encoder_name: Whose vectors are expected, to be named where they are of another size.
    """
    try:
        array = vectors.detach().cpu() if isinstance(vectors, Tensor) else _numbers(vectors)
        # Contiguous, because in another order sums are rounded differently, and a close choice falls so.
        e = torch.as_tensor(array).to(torch.float32).contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnembedError(f"vectors must be numbers in an array of shape (N, {size}).") from error
    if e.dim() == 1:
        e = e[None] if len(e) else e.reshape(0, size)
    if e.dim() != 2 or e.shape[1] != size:
        raise UnembedError(
            f"vectors have shape {tuple(array.shape)}, expected (N, {size}) as {encoder_name} "
            "makes them; choose the model trained for your encoder."
        )
    for problem, rows in (
        ("holds NaN or infinity", ~e.isfinite().all(1)),
        ("is all zeros", (e == 0).all(1)),
    ):
        if rows.any():
            row = int(rows.nonzero()[0])
            raise UnembedError(f"vector {row} {problem}; leave it out or embed its text again.")
    return e


def similarity(encoder: Encoder, vectors: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Cosine between vectors and the embeddings of texts; 0 where a text is blank."""
    out = np.zeros(len(texts), np.float32)
    full = [i for i, text in enumerate(texts) if text.strip()]
    if full:
        again = encoder.encode([texts[i] for i in full])
        known = np.asarray(vectors, np.float32)[full]
        norms = np.linalg.norm(again, axis=1) * np.linalg.norm(known, axis=1)
        out[full] = (again * known).sum(1) / np.maximum(norms, 1e-12)
    return out


def _numbers(vectors: Any) -> np.ndarray:
    """Make an array of float32, whatever its byte order and strides, that torch may have to itself."""
    array = np.asarray(vectors)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{array.dtype} holds no real numbers")
    with np.errstate(over="ignore"):  # what is too large becomes infinity, which is refused by its row
        return array.astype(np.float32, order="C")
