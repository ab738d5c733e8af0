"""How long a search takes, and in what: seconds a text, shares of model, encoder, spelling and the rest.

    python benchmarks/search.py --out benchmarks/results/search-speed-h200.json

On a GPU 20 rounds of 64 candidates in batches of 256 texts, on a CPU 10 of 32 with one text at a time; the
bundled model, and sentences of the demo. Texts that are found leave the search, as they do in life.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
from pathlib import Path

import torch

from unembed import Inverter
from unembed.decode import DecodeOptions
from unembed.search import SearchOptions

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Search once to warm up, then measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=512 if cuda else 5)
    parser.add_argument("--batch", type=int, default=256 if cuda else 1)
    parser.add_argument("--rounds", type=int, default=20 if cuda else 10)
    parser.add_argument("--candidates", type=int, default=64 if cuda else 32)
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    recipe = runpy.run_path(str(ROOT / "recipes" / "search.py"))
    inverter = Inverter.from_pretrained(args.model, precision=args.precision)
    lines = (ROOT / "src" / "unembed" / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()
    lines = (lines * (1 + args.texts // len(lines)))[: args.texts]
    vectors = inverter.encoder().encode(lines, batch_size=256)

    def search(rounds: int, count: int):  # noqa: ANN202 - a type of the recipe
        options = SearchOptions(rounds=rounds, candidates=args.candidates, seed=0)
        return recipe["search_texts"](
            inverter, vectors[:count], options=options, decoding=DecodeOptions(), batch=args.batch
        )

    search(1, args.batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    course = search(args.rounds, args.texts)
    record = {
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": inverter.numbers,
        "texts": args.texts,
        "batch": args.batch,
        "rounds": args.rounds,
        "candidates": args.candidates,
        "calls_a_text": round(float(course.calls[-1].float().mean()), 1),
        "found": round(float((course.cosines[-1] >= recipe["EXACT"]).float().mean()), 3),
        "seconds_a_text": round(course.seconds, 4),
        "share": recipe["shares"](course),
        "gpu_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
