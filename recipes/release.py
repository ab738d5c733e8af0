"""Turn a trained inverter or distilled encoder into a release: int8 shards, and a card that names its data.

    python recipes/release.py runs/minilm/model src/unembed/models/all-MiniLM-L6-v2 \
        --sources recipes/minilm-sources.txt --figures benchmarks/results/heldout-h200.json

A model that was trained in stretches is released with the earlier ones named (`--after`, as often as
need be): its card then tells the minutes of all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from unembed import Inverter
from unembed.surrogate import DistilledEncoder


def main() -> None:
    """Load, state the facts, save in int8."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sources", type=Path, required=True, help="one source of text a line")
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="what earlier stretches saved")
    parser.add_argument("--figures", type=Path, help="records measured on held-out text")
    args = parser.parse_args()
    kind = DistilledEncoder if (args.model / "encoder.json").is_file() else Inverter
    released = kind.from_pretrained(args.model, device="cpu")
    for before in args.after:
        earlier = json.loads((before / "facts.json").read_text(encoding="utf-8"))["training"]
        training = released.facts["training"]
        for key in ("steps", "passages", "minutes"):
            training[key] = round(training[key] + earlier[key], 1)
    released.facts["data"] = args.sources.read_text(encoding="utf-8").splitlines()
    if args.figures:
        released.facts["figures"] = json.loads(args.figures.read_text(encoding="utf-8"))["records"]
    released.save_pretrained(args.out, int8=True)


if __name__ == "__main__":
    main()
