"""Draw the picture of the README: what comes back of the demo's sentences, as a terminal shows it."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from unembed import Inverter
from unembed.cli.shades import comparison
from unembed.demo import SENTENCES  # all of them: the picture must not choose


def main() -> None:
    """Recover the sentences with the bundled model and save the table as SVG."""
    inverter = Inverter.from_pretrained()
    found = inverter.reconstruct(SENTENCES, seed=0)
    console = Console(record=True, width=92, file=StringIO())
    console.print(comparison(found, tokenizer=inverter.tokenizer))
    svg = console.export_svg(title="unembed reconstruct")
    # The picture must not fetch fonts: whatever monospace the reader has will do.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    out = Path(__file__).parent.parent / "docs" / "images" / "reconstruct.svg"
    out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
