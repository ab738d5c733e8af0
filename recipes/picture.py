"""Draw the picture of the README: what comes back of sentences no model has seen, as a terminal shows it."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from unembed import Inverter
from unembed.cli.shades import comparison

SENTENCES = (
    "Please send the signed contract to our lawyer by Friday.",
    "Our quarterly revenue fell by twelve percent.",
    "I love my two dogs and we go hiking every weekend.",
    "She was diagnosed with asthma when she was nine years old.",
)


def main() -> None:
    """Recover the sentences with the bundled model and save the table as SVG."""
    inverter = Inverter.from_pretrained()
    found = inverter.reconstruct(SENTENCES, strategy="confidence", steps=32, seed=0)
    console = Console(record=True, width=92, file=StringIO())
    console.print(comparison(found, tokenizer=inverter.tokenizer))
    svg = console.export_svg(title="unembed reconstruct --steps 32")
    # The picture must not fetch fonts: whatever monospace the reader has will do.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    out = Path(__file__).parent.parent / "docs" / "images" / "reconstruct.svg"
    out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
