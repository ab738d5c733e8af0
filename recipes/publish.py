"""Bring what GPU runs wrote into the files of benchmarks/results that several runs share.

    python recipes/publish.py stretch OUT_OF_STRETCH --before all-MiniLM-L6-v2
    python recipes/publish.py round LINE.json ... --minutes 0.45 --note "what they have in common"
    python recipes/publish.py search SEARCHED.json ... --as search-self-twelfth-cpu.json

`stretch` adds a stretch of the released model to stretches-h200.json and its curve to the training log, and
makes its figures those of heldout-h200.json, if it was decoded; `--before` says which weights it began with.
`round` adds what compare.py, variants.py, flexible.py and peer.py printed, side by side, to
compare-h200.json. `search` makes one file of those that search.py wrote with the same settings, one for each
set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from encoders import MODES

from unembed.beam import BEAMS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CURVE = "training-all-MiniLM-L6-v2.jsonl"
ALIKE = ("hardware", "cores", "torch", "python", "precision", "settings")  # of searches that are joined
NAMES = {"f1": "token_f1", "exact": "exact_match", "accuracy": "token_accuracy", "cosine": "cosine"}


def read(name: str) -> Any:
    """Read a published file."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def write(name: str, value: Any) -> None:
    """Write a published file."""
    (RESULTS / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def records(sets: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """One record for each set and way to decode, as cards and tables read them."""
    return [
        {"set": name, "strategy": MODES[mode][0], "steps": MODES[mode][1]}
        | {NAMES[key]: value for key, value in figures.items()}
        for name, modes in sets.items()
        for mode, figures in modes.items()
    ]


def thin_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep what was measured, and of the losses between every tenth: more than a picture shows."""
    return [row for number, row in enumerate(rows) if "validation_loss" in row or number % 10 == 0]


def join_curves(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Continue the curve of earlier stretches by the rows of one more."""
    last = earlier[-1]
    more = {"stretch": last["stretch"] + 1}
    return earlier + [
        row
        | {"step": last["step"] + row["step"], "seconds": round(last["seconds"] + row["seconds"], 2)}
        | more
        for row in thin_out(rows)
    ]


def add_stretch(args: argparse.Namespace) -> None:
    """Publish a stretch."""
    figures = json.loads((args.out / "figures.json").read_text(encoding="utf-8"))
    figures["start_from"] = args.before
    known = read("stretches-h200.json")
    write("stretches-h200.json", known | {"stretches": [*known["stretches"], figures]})
    if "sets" in figures:  # else nothing was decoded
        measured = {"records": records(figures["sets"]), "unquantised": records(figures["unquantised"])}
        write("heldout-h200.json", read("heldout-h200.json") | {"weights": "int8", "beams": BEAMS} | measured)
    lines = [(RESULTS / CURVE), args.out / "run" / "metrics.jsonl"]
    earlier, rows = ([json.loads(line) for line in path.read_text().splitlines()] for path in lines)
    joined = "".join(json.dumps(row) + "\n" for row in join_curves(earlier, rows))
    (RESULTS / CURVE).write_text(joined, encoding="utf-8")


def add_round(args: argparse.Namespace) -> None:
    """Publish variants that were trained for equal minutes."""
    variants = [json.loads(path.read_text(encoding="utf-8")) for path in args.lines]
    known = read("compare-h200.json")
    more = {"minutes_each": args.minutes, "note": args.note, "variants": variants}
    write("compare-h200.json", known | {"rounds": [*known["rounds"], more]})


def join_searches(args: argparse.Namespace) -> None:
    """Publish searches of several sets."""
    searches = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    common = {key: searches[0][key] for key in ALIKE}
    for path, found in zip(args.files, searches, strict=True):
        if {key: found[key] for key in ALIKE} != common:
            raise SystemExit(f"{path} is of other settings or of another machine than {args.files[0]}.")
    own = {found["file"]: {k: v for k, v in found.items() if k not in ALIKE} for found in searches}
    write(args.name, common | {"sets": {Path(name).stem: own[name] for name in sorted(own)}})


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    stretch = commands.add_parser("stretch")
    stretch.add_argument("out", type=Path)
    stretch.add_argument("--before", required=True)
    stretch.set_defaults(do=add_stretch)
    equal = commands.add_parser("round")
    equal.add_argument("lines", type=Path, nargs="+")
    equal.add_argument("--minutes", type=float, required=True)
    equal.add_argument("--note", required=True)
    equal.set_defaults(do=add_round)
    searched = commands.add_parser("search")
    searched.add_argument("files", type=Path, nargs="+")
    searched.add_argument("--as", dest="name", required=True)
    searched.set_defaults(do=join_searches)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
