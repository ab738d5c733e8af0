"""What a defender may do to vectors before they are stored, by what it hides and what it costs.

    python recipes/defences.py TEXTS.txt ... [--limit 40] [--beams 8] --out FILE

The defences are those of the page. Neighbours: of the ten texts nearest to a clean query, the share that is
still among the ten nearest when all that is stored is changed. The inverter has never seen a changed vector;
one that was trained on such would recover more, so these figures are the least that is given away.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import measure

from unembed import Inverter
from unembed.scoring import References, refer

NEAREST = 10
Defence = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # vectors (N, E), draws -> others


def add_noise(share: float, vectors: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Add noise that is so long a share of each vector's length."""
    scale = share * np.linalg.norm(vectors, axis=1, keepdims=True) / vectors.shape[1] ** 0.5
    return vectors + scale * draws.standard_normal(vectors.shape)


def keep_bits(bits: int, vectors: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Round each number to so many bits, the largest of its vector being the largest there is."""
    largest = np.abs(vectors).max(1, keepdims=True)
    if bits == 1:
        return np.sign(vectors) * largest
    levels = 2 ** (bits - 1) - 1
    return np.round(vectors / largest * levels) / levels * largest


def drop_numbers(share: float, vectors: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Set so large a share of the numbers to zero, the same of all vectors, as a shorter vector would be."""
    kept = np.ones(vectors.shape[1])
    kept[draws.permutation(vectors.shape[1])[: round(share * vectors.shape[1])]] = 0
    return vectors * kept


DEFENCES: dict[str, Defence] = {
    "none": lambda vectors, draws: vectors,
    **{f"{bits} bit{'s'[: bits > 1]} a number": partial(keep_bits, bits) for bits in (8, 4, 2, 1)},
    **{f"noise of {share:g} of its length": partial(add_noise, share) for share in (0.1, 0.25, 0.5, 1.0)},
    **{f"{share:.0%} of the numbers dropped": partial(drop_numbers, share) for share in (0.25, 0.5, 0.75)},
}


def neighbours_kept(queries: np.ndarray, stored: np.ndarray) -> float:
    """Of the texts nearest to a query, the share that is still so among vectors as they are stored."""
    sets = []
    for vectors in (queries, stored):
        likeness = queries @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T
        np.fill_diagonal(likeness, -np.inf)
        sets.append(np.argsort(-likeness, axis=1)[:, :NEAREST])
    return float(np.mean([len(set(a) & set(b)) / NEAREST for a, b in zip(*sets, strict=True)]))


def recovered(
    inverter: Inverter, references: References, stored: np.ndarray, *, beams: int
) -> dict[str, float]:
    """Figures of texts by their vectors as they are stored; the cosine is with the vectors as they were."""
    ids = [list(found.ids) for found in inverter.invert(stored, strategy="beam", beams=beams, seed=0)]
    found = measure(references, lambda _: ids, tokenizer=inverter.tokenizer, encoder=inverter.encoder())
    return {key: found[key] for key in ("f1", "exact", "cosine")}


def main() -> None:
    """Measure every defence on the same texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--limit", type=int, default=40, help="texts of each file that are recovered")
    parser.add_argument("--beams", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    inverter = Inverter.from_pretrained(args.model)
    files = [path.read_text(encoding="utf-8").splitlines() for path in args.texts]
    known: dict[str, Any] = {"tokenizer": inverter.tokenizer, "max_tokens": inverter.max_tokens}
    some, every = (
        refer(sum(lines, []), encoder=inverter.encoder(), **known)
        for lines in ([lines[: args.limit] for lines in files], files)
    )
    figures = {}
    for name, defence in DEFENCES.items():
        changed, stored = (defence(each.vectors, np.random.default_rng(0)) for each in (some, every))
        figures[name] = recovered(inverter, some, changed.astype(np.float32), beams=args.beams)
        figures[name]["neighbours"] = round(neighbours_kept(every.vectors, stored), 4)
        print(name, figures[name], flush=True)
    record = {
        "texts": len(some.ids), "stored": len(every.ids), "beams": args.beams,
        "torch": torch.__version__, "defences": figures,
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
