"""What more beams and looks recover: figures of every set by one number after another, and what each took.

    python recipes/beams.py MODEL --data DIR --texts DIR --beams 32 64 --looks 0 4 [--limit 2000] --out FILE

Needs no command line of unembed, so it runs where only torch and transformers are.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import measure_sets
from publish import NAMES

from unembed.beam import LOOKS
from unembed.corpus import PreparedData
from unembed.inverter import Inverter


def measure_beams(
    inverter: Inverter, *, beams: int, looks: int, data: PreparedData, texts: Path, limit: int
) -> Any:
    """Figures of every set by so many beams and looks, under the names they are published by."""

    def invert(vectors: np.ndarray) -> list[list[int]]:
        found = inverter.invert(vectors, strategy="beam", beams=beams, looks=looks, batch_size=2048)
        return [list(inversion.ids) for inversion in found]

    begun = time.monotonic()
    found = measure_sets(texts, {"beam": invert}, limit=limit, data=data, encoder=inverter.encoder())
    sets = {name: {NAMES[k]: v for k, v in modes["beam"].items()} for name, modes in found.items()}
    return {"beams": beams, "looks": looks, "sets": sets, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    """Measure one after another; what is measured is written at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--beams", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--looks", type=int, nargs="+", default=[LOOKS])
    parser.add_argument("--limit", type=int, default=2_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data, inverter = PreparedData.open(args.data), Inverter.from_pretrained(args.model)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows: list[Any] = []
    for looks, beams in product(args.looks, args.beams):
        common = {"data": data, "texts": args.texts, "limit": args.limit}
        rows.append(measure_beams(inverter, beams=beams, looks=looks, **common))
        args.out.write_text(json.dumps({"hardware": hardware, "rows": rows}, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
