"""How far the model's own guess of the cosine can be trusted: what became of texts, by their likeness.

python recipes/likeness.py runs/measured/records.jsonl -o benchmarks/results/likeness-cpu.json
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from unembed.records import Row, read_records

EDGES = (-1.0, 0.85, 0.9, 0.92, 0.94, 0.96, 1.01)


def by_likeness(rows: list[Row]) -> list[dict[str, float]]:
    """Mean figures of the texts between one edge and the next; without those that have none."""
    parts = []
    for low, high in pairwise(EDGES):
        some = [row for row in rows if row.likeness is not None and low <= row.likeness < high]
        if some:
            values = {
                key: round(float(np.mean([getattr(row, key) for row in some])), 4)
                for key in ("likeness", "cosine", "token_f1", "exact_match")
            }
            parts.append({"from": low, "texts": len(some), **values})
    return parts


def main() -> None:
    """Read the records, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    records = read_records(args.records)
    rows = [row for row in records.rows if row.likeness is not None]
    told = np.array([[row.likeness, row.cosine, row.token_f1] for row in rows], float)
    correlation = np.corrcoef(told, rowvar=False)[0]
    found = {
        "weights": records.settings["weights"],
        "methods": sorted({row.method for row in rows}),
        "texts": len(rows),
        "correlation": {
            key: round(float(value), 4)
            for key, value in zip(("cosine", "token_f1"), correlation[1:], strict=True)
        },
        "parts": by_likeness(rows),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
