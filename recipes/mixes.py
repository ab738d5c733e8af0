"""Means of two models in several shares: how each reads held-out text, and what it guesses of the vectors.

    python recipes/mixes.py FIRST SECOND --data DIR --texts DIR --out FILE [--shares 0 0.35 0.5 0.65 1]

A share is the second's. Texts are read, not decoded, so that a mean is judged in seconds; average.py then
makes the one that is wanted. Needs no command line of unembed, so it runs where only torch and transformers
are.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from average import average
from compare import read_sets, refer_sets

from unembed.corpus import PreparedData
from unembed.scoring import References


def main() -> None:
    """Read every set with every mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.35, 0.5, 0.65, 1.0])
    args = parser.parse_args()
    data, device = PreparedData.open(args.data), "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    sets: dict[str, References] = {}
    rows = []
    for share in args.shares:
        mean = average([(args.first, 1 - share), (args.second, share)])
        sets = sets or refer_sets(args.texts, data=data, encoder=mean.encoder())
        with half:
            read = read_sets(mean.model.to(device), sets, mean.config)
        rows.append({"share": share, **read})
        print(json.dumps(rows[-1]), flush=True)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    names = {"first": Path(args.first).name, "second": Path(args.second).name}
    args.out.write_text(json.dumps({"hardware": hardware, **names, "means": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
