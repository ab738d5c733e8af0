"""What threads that share texts, and heads of a text's own words, bring on a CPU: ways by turns, in one run.

    python benchmarks/crew.py --out benchmarks/results/crew-cpu.json

`shipped` is what users have; the others leave out the crew (torch's threads share each operation instead),
the shortlists (beams look at the whole vocabulary), or both. Texts are those that come with the package. A
text alone is never shared; it is timed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unembed import Inverter, inverter, shortlist
from unembed.suites import builtin_suite

WAYS = {
    "shipped": (),
    "no shortlists": ("shortlists",),
    "no crew": ("crew",),
    "neither": ("crew", "shortlists"),
}
METHODS: dict[str, dict[str, Any]] = {
    "beam": {"strategy": "beam"},
    "beam, 64 beams": {"strategy": "beam", "beams": 64},
    "beam, no looks": {"strategy": "beam", "looks": 0},
    "confidence, 8 passes": {"strategy": "confidence", "steps": 8},
}


@contextmanager
def without(*parts: str) -> Iterator[None]:
    """Leave parts out."""
    before = inverter.crew_size, shortlist.WORDS
    try:
        if "crew" in parts:
            inverter.crew_size = lambda: 1
        if "shortlists" in parts:
            shortlist.WORDS = 10**9
        yield
    finally:
        inverter.crew_size, shortlist.WORDS = before


def rates(model: Inverter, vectors: np.ndarray, options: dict[str, Any], *, repeats: int) -> dict[str, float]:
    """Texts a second of each way that differs for these options, by turns: medians."""
    ways = {
        way: parts
        for way, parts in WAYS.items()
        if not (
            options["strategy"] != "beam" and "shortlists" in parts or len(vectors) == 1 and "crew" in parts
        )
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, parts in ways.items():
            with without(*parts):
                start = time.perf_counter()
                model.invert(vectors, **options)
                seconds[way].append(time.perf_counter() - start)
    return {way: round(len(vectors) / statistics.median(each), 2) for way, each in seconds.items()}


def main() -> None:
    """Measure each method in batches and alone, and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = Inverter.from_pretrained(device="cpu")
    texts = [sample.text for sample in builtin_suite("english").samples[: args.texts]]
    vectors = model.encoder().encode(texts)
    found: dict[str, Any] = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found |= {"numbers": model.numbers, "texts": len(texts), "texts_per_second": {}}
    for method, options in METHODS.items():
        model.invert(vectors[:4], **options)
        found["texts_per_second"][method] = {
            "together": rates(model, vectors, options, repeats=args.repeats),
            "alone": rates(model, vectors[:1], options, repeats=4 * args.repeats),
        }
        print(json.dumps({method: found["texts_per_second"][method]}), flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
