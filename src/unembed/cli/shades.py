"""How recovered text looks: each token in the colour of its confidence, beside the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import numpy as np

    from unembed.results import Reconstruction
    from unembed.tokens import TextTokenizer

# Red, amber, green: of middling lightness, so that they can be read on black and on white.
_STOPS = ((200, 70, 70), (196, 142, 40), (52, 158, 90))
_MASKED = "░░"
_BARS = "▁▂▃▄▅▆▇█"


def shade(confidence: float) -> str:
    """Give the colour of a confidence.

    >>> shade(0.0), shade(0.5), shade(1.0)
    ('rgb(200,70,70)', 'rgb(196,142,40)', 'rgb(52,158,90)')
    """
    place = min(max(confidence, 0.0), 1.0) * (len(_STOPS) - 1)
    left = min(int(place), len(_STOPS) - 2)
    mixed = (a + (b - a) * (place - left) for a, b in zip(_STOPS[left], _STOPS[left + 1], strict=True))
    return "rgb({},{},{})".format(*(round(part) for part in mixed))


def shaded(pieces: Sequence[str], confidences: Sequence[float], *, masked: Sequence[bool] = ()) -> Text:
    """Join tokens to a text, each in the colour of its confidence; masked ones are grey blocks."""
    text = Text()
    for i, (piece, confidence) in enumerate(zip(pieces, confidences, strict=True)):
        if masked and masked[i]:
            text.append(f"{' ' if i else ''}{_MASKED}", style="grey50")
        else:
            text.append(piece, style=shade(confidence))
    return text


def mean_confidence(confidences: Sequence[float]) -> float:
    """Mean over the tokens of a text; 0 for one without tokens."""
    return sum(confidences) / len(confidences) if confidences else 0.0


def comparison(found: Sequence[Reconstruction], *, tokenizer: TextTokenizer) -> Table:
    """Original, recovered text, cosine and confidence side by side."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_lines=False)
    table.add_column("original", ratio=1)
    table.add_column("recovered from the vector", ratio=1)
    table.add_column("cosine", justify="right", no_wrap=True)
    table.add_column("confidence", justify="right", no_wrap=True)
    for each in found:
        inversion = each.inversion
        table.add_row(
            Text(each.original),
            shaded(tokenizer.pieces(inversion.ids), inversion.confidences),
            Text(f"{each.cosine:.3f}", style=shade(each.cosine)),
            f"{mean_confidence(inversion.confidences):.0%}",
        )
    return table


def sparkline(vector: np.ndarray, *, width: int = 40) -> str:
    """Draw the first numbers of a vector as bars.

    >>> import numpy as np
    >>> sparkline(np.array([-1.0, 0.0, 1.0]))
    '▁▄█'
    """
    head = vector[:width]
    low, high = float(head.min()), float(head.max())
    scaled = (head - low) / (high - low or 1.0) * (len(_BARS) - 1)
    return "".join(_BARS[int(x)] for x in scaled)
