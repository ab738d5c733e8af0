"""Is held-out text in the training text? Runs of N tokens that both have, text by text.

    python recipes/overlap.py PREPARED_DATA TEXTS... -o benchmarks/results/overlap.json

Compares tokens, so case, accents and white space do not hide a copy. A text shorter than N tokens counts
as found when it stands in the training text as a whole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from unembed.corpus import PreparedData

_BLOCK = 2**24  # tokens hashed at a time


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hash every run of `length` tokens: a polynomial modulo 2^64, so that runs collide by chance alone."""
    count = max(len(tokens) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for k in range(length):
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes += tokens[k : k + count].astype(np.uint64) + np.uint64(1)
    return hashes


def found_in(data: PreparedData, hashes: np.ndarray, length: int) -> np.ndarray:
    """Which of some hashes are those of a run of the data; a run may reach from one passage to the next."""
    wanted = np.unique(hashes)
    seen = np.zeros(len(wanted), bool)
    for first in range(0, len(data.tokens), _BLOCK):
        runs = run_hashes(np.asarray(data.tokens[first : first + _BLOCK + length - 1]), length)
        place = np.searchsorted(wanted, runs).clip(max=len(wanted) - 1)
        seen[place[wanted[place] == runs]] = True
    return seen[np.searchsorted(wanted, hashes)]


def overlap(data: PreparedData, texts: list[str], length: int) -> dict[str, float]:
    """Count texts that share a run with the data, half of their runs, or all of them."""
    encoded = data.tokenizer.encode(texts, max_tokens=data.max_tokens)
    shares = np.zeros(len(texts))
    for size in sorted({min(length, int(n)) for n in encoded.lengths}):
        rows = [i for i, n in enumerate(encoded.lengths) if min(length, int(n)) == size]
        parts = [run_hashes(encoded.ids[i, : encoded.lengths[i]], size) for i in rows]
        hits = np.split(found_in(data, np.concatenate(parts), size), np.cumsum([len(p) for p in parts])[:-1])
        shares[rows] = [hit.mean() for hit in hits]
    return {
        "texts": len(texts),
        "share_a_run": int((shares > 0).sum()),
        "share_half_of_their_runs": int((shares >= 0.5).sum()),
        "share_all_of_their_runs": int((shares == 1).sum()),
    }


def main() -> None:
    """Compare every file and write one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=8, help="tokens of a run")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    data = PreparedData.open(args.data)
    sets = {
        path.stem: overlap(data, path.read_text(encoding="utf-8").splitlines(), args.length)
        for path in args.texts
    }
    found = {"run_of_tokens": args.length, "training_tokens": len(data.tokens), "sets": sets}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
