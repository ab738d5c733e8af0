"""Which moves of the search pay, and when: benchmarks/results/moves.json and docs/images/moves.png.

    python recipes/moves.py [--texts 24] [--rounds 20] [--candidates 32]
    python recipes/moves.py --record benchmarks/results/search-web_answers.json

The text is that of the demo, src/unembed/data/demo.txt, which the bundled model has not seen. A move
pays when the candidate it made comes into the pool, or is better than any text before it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np

from unembed import Inverter
from unembed.moves import MOVES

ROOT = Path(__file__).parent.parent
COUNTS = ("tries", "entered", "improved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=32)
    parser.add_argument("--record", type=Path, help="only draw what recipes/search.py wrote")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    args = parser.parse_args()
    if args.record is not None:
        draw(json.loads(args.record.read_text(encoding="utf-8")), ROOT / "docs" / "images" / "moves.png")
        return

    inverter = Inverter.from_pretrained(precision=args.precision)
    lines = (ROOT / "src" / "unembed" / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()
    texts = inverter.tokenizer.encode(lines[: args.texts], max_tokens=inverter.max_tokens)
    counts = np.zeros((args.rounds + 1, len(MOVES), len(COUNTS)), dtype=np.int64)
    cosines = np.ones((len(texts.texts), args.rounds + 1))
    exact, calls = 0, 0
    start = time.perf_counter()
    for number, vector in enumerate(inverter.encoder().encode(texts.texts)):
        options = {"rounds": args.rounds, "candidates": args.candidates, "seed": number}
        for each in inverter.search(vector, **options):
            counts[each.index] += [astuple(count) for count in each.moves.values()]
            cosines[number, each.index :] = each.cosine
        exact, calls = exact + each.exact, calls + each.encoder_calls
    record = {
        "model": "all-MiniLM-L6-v2",
        "texts": len(texts.texts),
        "candidates": args.candidates,
        "device": str(inverter.device),
        "precision": inverter.numbers,
        "seconds_a_text": round((time.perf_counter() - start) / len(texts.texts), 2),
        "exact": round(exact / len(texts.texts), 3),
        "encoder_calls": round(calls / len(texts.texts), 1),
        "cosine": cosines.mean(0).round(4).tolist(),
        "moves": {
            name: {key: counts[1:, m, k].tolist() for k, key in enumerate(COUNTS)}
            for m, name in enumerate(MOVES)
        },
    }
    path = ROOT / "benchmarks" / "results" / "moves.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(record, ROOT / "docs" / "images" / "moves.png")
    print(f"wrote {path}: exact {record['exact']}, {record['encoder_calls']} calls a text")


def draw(record: dict, path: Path) -> None:
    """Draw how often a move pays, by a few stretches of rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rounds = len(record["cosine"]) - 1
    edges = np.unique(np.linspace(0, rounds, 5).astype(int))
    names = list(record["moves"])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, key, title in zip(
        axes, ("entered", "improved"), ("came into the pool", "better than all before"), strict=True
    ):
        for part, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
            tries = np.array([sum(record["moves"][n]["tries"][low:high]) for n in names])
            paid = np.array([sum(record["moves"][n][key][low:high]) for n in names])
            place = np.arange(len(names)) + (part - (len(edges) - 2) / 2) * 0.2
            shade = plt.get_cmap("viridis")(part / max(1, len(edges) - 2) * 0.85)
            label = f"rounds {low + 1}-{high}"
            axis.barh(place, 100 * paid / np.maximum(tries, 1), height=0.19, color=shade, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("% of the move's candidates")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
