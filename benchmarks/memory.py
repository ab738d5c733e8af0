"""What it brings to keep freed memory: the same inversions with and without, by turns, each in a new process.

    python benchmarks/memory.py --out benchmarks/results/memory-cpu.json

Without is glibc as it comes: its own thresholds, said aloud, which `unembed.engine.keep_freed_memory` takes
for the user's wish.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, str]] = {"kept": {}, "as it comes": {"MALLOC_ARENA_TEST": "8"}}  # 8 is usual
WORK = """
import json, resource, sys, time
from unembed import Inverter
from unembed.suites import builtin_suite

options, count = json.loads(sys.argv[1]), int(sys.argv[2])
inverter = Inverter.from_pretrained(device="cpu")
texts = [sample.text for sample in builtin_suite("english").samples[:count]]
vectors = inverter.encoder().encode(texts)
inverter.invert(vectors[:2], **options)
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
inverter.invert(vectors, **options)
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "texts_per_second": count / (time.perf_counter() - start),
    "kernel_share": (after.ru_stime - before.ru_stime)
    / (after.ru_stime - before.ru_stime + after.ru_utime - before.ru_utime),
    "peak_mb": after.ru_maxrss / 1024,
}))
"""
METHODS: dict[str, dict[str, Any]] = {"beam": {"strategy": "beam"}, "confidence, 8 passes": {"steps": 8}}


def run(way: str, options: dict[str, Any], count: int) -> dict[str, float]:
    """Invert in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", WORK, json.dumps(options), str(count)],
        env=clean | WAYS[way], check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure both ways by turns, and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "libc": " ".join(platform.libc_ver()),
        "texts": args.texts,
    }
    for method, options in METHODS.items():
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way in WAYS:
                runs[way].append(run(way, options, args.texts))
        found[method] = {
            way: {key: round(statistics.median(each[key] for each in measured), 3) for key in measured[0]}
            for way, measured in runs.items()
        }
        kept, plain = (found[method][way]["texts_per_second"] for way in WAYS)
        found[method]["ratio"] = round(kept / plain, 2)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
