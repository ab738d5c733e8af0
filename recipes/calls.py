"""Draw exact match against encoder calls: docs/images/calls.png, from what recipes/search.py measured.

python recipes/calls.py benchmarks/results/search-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "calls.png"
NAMES = {
    "persona_chat": "chat turns",
    "in_distribution": "passages kept aside",
    "web_answers_msmarco": "web answers",
    "science_claims_scifact": "scientific claims",
}
# As published, of another encoder and of text like that it was trained on: without its loop, and with
# 50 steps of 8 beams.
VEC2TEXT = {1: 0.0, 3200: 0.92}


def main() -> None:
    """Read the record and draw a line for each set."""
    sets = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["sets"]
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for key, name in NAMES.items():
        curve = {int(calls): point["exact"] for calls, point in sets[key]["curve"].items()}
        axes.plot(list(curve), list(curve.values()), marker=".", label=name)
    axes.plot(list(VEC2TEXT), list(VEC2TEXT.values()), "x", color="0.3", label="vec2text, GTR, its own text")
    axes.set(xscale="log", xlabel="encoder calls a text, at most", ylabel="exact match", ylim=(-0.03, 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(IMAGE, dpi=150)


if __name__ == "__main__":
    main()
