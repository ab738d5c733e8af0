"""The paper's decoding ablations on held-out text: passes, strategies, remasking, restarts of two-stage.

    python recipes/sweeps.py --texts FILE... --out sweeps.json [--model MODEL] [--limit N] [--only remask ...]

Rows that the file holds already are not computed again. Needs no command line of unembed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import compare
import numpy as np

from unembed.inverter import Inverter
from unembed.scoring import refer
from unembed.whole import write_whole

PAPER = ("sequential", "euler", "euler-remask", "confidence", "two-stage")
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "passes": [
        {"strategy": strategy, "steps": steps}
        for strategy in ("confidence", "sequential")
        for steps in (1, 2, 4, 8, 16, 32)
    ],
    "strategies": [{"strategy": strategy, "steps": steps} for strategy in PAPER for steps in (8, 32)],
    "remask": [{"strategy": "euler-remask", "steps": 32, "remask": share} for share in (0.0, 0.05, 0.1, 0.2)],
    "restart": [{"strategy": "two-stage", "steps": 32, "restart": t0} for t0 in (0.1, 0.3, 0.5, 0.7, 0.9)],
}


def main() -> None:
    """Measure what is not in the file yet, and write it after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    args = parser.parse_args()
    inverter = Inverter.from_pretrained(args.model)
    encoder = inverter.encoder()
    settings = {"model": args.model, "limit": args.limit, "numbers": inverter.numbers, "seed": 0}
    found = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {**settings, "rows": []}
    )
    if {key: found[key] for key in settings} != settings:
        parser.error(f"{args.out} holds figures of other settings; choose another file.")
    known = {json.dumps([row["file"], row["options"]]) for row in found["rows"]}
    for path in args.texts:
        lines = path.read_text(encoding="utf-8").splitlines()[: args.limit]
        references = refer(
            lines, tokenizer=inverter.tokenizer, encoder=encoder, max_tokens=inverter.max_tokens
        )
        for sweep in args.only:
            for options in SWEEPS[sweep]:
                if json.dumps([path.name, options]) in known:
                    continue

                def invert(vectors: np.ndarray, options: dict[str, Any] = options) -> list[list[int]]:
                    return [i.ids for i in inverter.invert(vectors, seed=0, batch_size=128, **options)]

                figures = compare.measure(references, invert, tokenizer=inverter.tokenizer, encoder=encoder)
                row = {"sweep": sweep, "file": path.name, "texts": len(lines), "options": options, **figures}
                found["rows"].append(row)
                known.add(json.dumps([path.name, options]))
                write_whole(args.out, json.dumps(found, indent=1) + "\n")
                print(json.dumps(row))


if __name__ == "__main__":
    main()
