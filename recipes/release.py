"""Turn a trained inverter or distilled encoder into a release: int8 shards, and a card that names its data.

    python recipes/release.py runs/minilm/model src/unembed/models/all-MiniLM-L6-v2 \
        --sources recipes/minilm-sources.txt --figures benchmarks/results/heldout-h200.json \
        benchmarks/results/heldout-cpu.json

Figures are what publish.py joined or what summary.py wrote; those of a later file take the place of others
of the same set and method. A model that was trained in stretches is released with the earlier ones named
(`--after`, as often as need be): its card then tells the minutes of all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unembed import STRATEGIES, Inverter
from unembed.surrogate import DistilledEncoder

FIGURES = ("token_f1", "exact_match", "token_accuracy", "cosine")


def joined(files: list[Path]) -> list[dict[str, Any]]:
    """Read the figures of files, one for each set and method, in the order of sets and of the first file."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for file in files:
        for row in rows_of(json.loads(file.read_text(encoding="utf-8"))):
            found[row["set"], row["strategy"], row["steps"]] = row
    return sorted(found.values(), key=lambda row: row["set"])  # a stable sort: methods stay as they were


def rows_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each set and strategy of a file of either kind, without baselines."""
    if "records" in content:
        rows: list[dict[str, Any]] = content["records"]
        return rows
    return [
        {"set": each["suite"], "strategy": strategy, "steps": int(steps)}
        | {key: each["values"][key] for key in FIGURES}
        for part in content["parts"]
        for each in part["figures"]
        for strategy, _, steps in [each["method"].rpartition("-")]
        if strategy in STRATEGIES
    ]


def main() -> None:
    """Load, state the facts, save in int8."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sources", type=Path, required=True, help="one source of text a line")
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="what earlier stretches saved")
    parser.add_argument("--figures", type=Path, nargs="*", default=[], help="measured on held-out text")
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
        released.facts["figures"] = joined(args.figures)
    released.save_pretrained(args.out, int8=True)


if __name__ == "__main__":
    main()
