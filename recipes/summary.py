"""The figures of records without their texts, as one JSON file: what may be published of held-out text.

python recipes/summary.py runs/measured/records.jsonl -o benchmarks/results/heldout-cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from unembed.figures import figures_of
from unembed.records import read_records


def rounded(value: Any) -> Any:
    """Round all numbers in a value to four digits."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Read the records, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    parts = []
    for path in args.records:
        records = read_records(path)
        header, settings = records.header, records.settings
        about = {
            "hardware": header["hardware"],
            "versions": header["versions"],
            "weights": settings["weights"],
        }
        figures = [rounded(dataclasses.asdict(each)) for each in figures_of(records)]
        parts.append({**about, "seed": settings["seed"], "figures": figures})
    args.out.write_text(json.dumps({"parts": parts}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
