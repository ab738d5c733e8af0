"""Bring the tables of figures in README.md and docs/peers.md up to what is published.

    python recipes/tables.py

A table between `<!-- figures: FILE -->` and `<!-- end of figures -->` keeps its head and the first two cells
of each row, the set and the method; all other cells are those of the file, with an interval where there was
one. One behind `<!-- leaks: FILE -->` has a row for each kind of personal data with five items or more.
"""

from __future__ import annotations

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = "README.md", "docs/peers.md"
SETS = {
    "chat turns": "persona_chat",
    "web answers": "web_answers_msmarco",
    "scientific claims": "science_claims_scifact",
    "tweets": "tweets_tweeteval",
    "biomedical abstracts": "biomedical_pubmedqa",
}
METHODS = {"beam": "beam-32", "confidence, 8 passes": "confidence-8"}  # others are named as in the file
COLUMNS = {
    "token F1": "token_f1",
    "exact": "exact_match",
    "BLEU": "bleu",
    "ROUGE-L": "rouge_l",
    "accuracy": "token_accuracy",
    "cosine": "cosine",
}
FEWEST = 5  # items of a kind of personal data that are worth a row


def shown(value: float, digits: int = 3) -> str:
    """Write a number with so many digits, a half upwards, and no zero in front of the point.

    >>> shown(0.1625), shown(41.75, 1), shown(0.0)
    ('.163', '41.8', '.000')
    """
    number = str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
    return number.removeprefix("0") if digits > 1 else number


def cells_of(row: str) -> list[str]:
    """Return what stands between the bars of a row."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def row_of(cells: list[str]) -> str:
    """Put bars around cells."""
    return f"| {' | '.join(cells)} |"


def fill_figures(table: list[str], part: dict[str, Any]) -> list[str]:
    """Fill in the rows of a table of sets and methods."""
    head, rule, *rows = table
    found = {(each["suite"], each["method"]): each for each in part["figures"]}
    filled = []
    for row in rows:
        name, how, *old = cells_of(row)
        method = how.replace("`", "")
        figures = found[SETS[name], METHODS.get(method, method)]
        cells = []
        for column, cell in zip(cells_of(head)[2:], old, strict=True):
            key, digits = COLUMNS[column], 1 if column == "BLEU" else 3
            interval = [shown(bound, digits) for bound in figures["intervals"][key]] if "[" in cell else []
            value = shown(figures["values"][key], digits)
            cells.append(f"{value} [{', '.join(interval)}]" if interval else value)
        filled.append(row_of([name, how, *cells]))
    return [head, rule, *filled]


def fill_leaks(table: list[str], part: dict[str, Any]) -> list[str]:
    """Write the rows of a table of personal data."""
    (figures,) = part["figures"]
    rows = []
    for leak in figures["leaks"]:
        if leak["items"] >= FEWEST:
            low, high = leak["share_interval"]
            share = f"[{low:.2f}, {high:.2f}]"
            came_back = f"{leak['recovered']} of {leak['items']}"
            rows.append(row_of([leak["kind"], came_back, share, f"{leak['per_1000']:.0f}"]))
    return table[:2] + rows


def fill(page: str) -> str:
    """Return a page with all its tables filled in."""

    def replace(found: re.Match[str]) -> str:
        kind, file, table = found.groups()
        (part,) = json.loads((ROOT / file).read_text(encoding="utf-8"))["parts"]
        rows = {"figures": fill_figures, "leaks": fill_leaks}[kind](table.strip().splitlines(), part)
        return f"<!-- {kind}: {file} -->\n" + "\n".join(rows) + f"\n<!-- end of {kind} -->"

    return re.sub(
        r"<!-- (figures|leaks): (\S+) -->\n(.+?)\n<!-- end of \1 -->", replace, page, flags=re.DOTALL
    )


def main() -> None:
    """Rewrite the pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
