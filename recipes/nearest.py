"""The baseline of somebody who has the training text and no inverter: the nearest passage by cosine.

    python recipes/nearest.py --data DATA --texts DIR --out benchmarks/results/nearest.json

DATA holds passages prepared for the encoder; all of them are cut into windows and embedded, a minute on a
GPU. Writes token F1, exact match, position accuracy and cosine of every file of held-out text.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import measure

from unembed.baselines import nearest
from unembed.corpus import PreparedData
from unembed.encoders import load_encoder
from unembed.scoring import References, refer


def main() -> None:
    """Embed everything once, for the texts of all files together; count file by file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="look at the first so many passages only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start = time.monotonic()
    cuda = torch.cuda.is_available()
    data = PreparedData.open(args.data)
    encoder: Any = load_encoder(data.encoder_name, dtype="float16" if cuda else None)
    sets = {
        path.stem: refer(
            path.read_text(encoding="utf-8").splitlines(),
            tokenizer=data.tokenizer, encoder=encoder, max_tokens=data.max_tokens,
        )
        for path in sorted(args.texts.glob("*.txt"))
    }  # fmt: skip
    parts = sets.values()
    every = References(
        ids=[row for part in parts for row in part.ids],
        texts=[text for part in parts for text in part.texts],
        vectors=np.concatenate([part.vectors for part in parts]),
    )
    found = iter(nearest(every, data=data, encoder=encoder, limit=args.limit).ids)
    figures = {}
    for name, part in sets.items():
        own = [next(found).tolist() for _ in part.ids]
        figures[name] = {
            "texts": len(own),
            **measure(part, lambda _, own=own: own, tokenizer=data.tokenizer, encoder=encoder),  # type: ignore[misc]
        }
    record = {
        "passages": min(data.count, args.limit or data.count),
        "encoder": data.encoder_name,
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "seconds": round(time.monotonic() - start, 1),
        "sets": figures,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
