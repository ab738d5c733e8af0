"""How much more beams recover, and at what cost: the bundled model by `beam` with more and more of them.

    python recipes/beams.py FOLDER_OF_TXT [--model NAME_OR_FOLDER] [--beams 16 32 64] [--limit 100] --out FILE

Figures are token F1 and exact match of each set, and texts a second, on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from unembed import Inverter
from unembed.metrics import token_f1
from unembed.scoring import References, refer


def measure(inverter: Inverter, sets: dict[str, References], *, beams: int) -> dict[str, object]:
    """Invert all sets at once; figures of each, and how fast it went."""
    vectors = np.concatenate([references.vectors for references in sets.values()])
    start = time.perf_counter()
    found = iter([i.ids for i in inverter.invert(vectors, strategy="beam", beams=beams, batch_size=2048)])
    seconds = time.perf_counter() - start
    figures = {}
    for name, references in sets.items():
        pairs = [(truth, next(found)) for truth in references.ids]
        figures[name] = {
            "token_f1": round(float(np.mean([token_f1(a, b) for a, b in pairs])), 4),
            "exact_match": round(float(np.mean([list(a) == list(b) for a, b in pairs])), 4),
        }
    return {"beams": beams, "texts_per_second": round(len(vectors) / seconds, 1), "sets": figures}


def main() -> None:
    """Measure every number of beams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--beams", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    inverter = Inverter.from_pretrained(args.model)
    sets = {
        path.stem: refer(
            path.read_text(encoding="utf-8").splitlines()[: args.limit],
            tokenizer=inverter.tokenizer, encoder=inverter.encoder(), max_tokens=inverter.max_tokens,
        )
        for path in sorted(args.texts.glob("*.txt"))
    }  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows = [measure(inverter, sets, beams=beams) for beams in args.beams]
    args.out.write_text(json.dumps({"hardware": device, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
