"""The unmasking, step by step, in the terminal."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unembed.cli.shades import mean_confidence, shade, shaded, sparkline
from unembed.cli.terminal import console

if TYPE_CHECKING:
    import numpy as np

    from unembed.encoders import Encoder
    from unembed.inverter import Inverter
    from unembed.results import Round, Step


def play(
    texts: list[str], *, inverter: Inverter, encoder: Encoder, options: dict[str, Any], pace: float
) -> None:
    """Embed each text, forget it, and show how it comes back."""
    from unembed.vectors import similarity

    inverter.check_encoder(encoder)
    cut = inverter.tokenizer.encode(texts, max_tokens=inverter.max_tokens)
    if cut.truncated.any():
        warnings.warn(
            f"{int(cut.truncated.sum())} of {len(texts)} texts are longer than {inverter.max_tokens} tokens "
            "and were cut.",
            stacklevel=2,
        )
    vectors = encoder.encode(cut.texts)
    out = console()
    rest = pace if out.is_terminal else 0.0
    for text, vector in zip(cut.texts, vectors, strict=True):
        with Live(console=out, auto_refresh=False) as live:
            live.update(_frame(text, vector, None, inverter), refresh=True)
            time.sleep(rest)
            if options.get("refine") is not None:
                for round_ in inverter.search(vector, encoder=encoder, **options):
                    live.update(_round(text, vector, round_), refresh=True)
                    time.sleep(rest)
            else:
                shown: list[int] = []
                for step in inverter.stream(vector, **options):
                    live.update(_frame(text, vector, step, inverter), refresh=True)
                    # A text that is done before the last step is not waited for.
                    time.sleep(rest if step.ids != shown else 0.0)
                    shown = step.ids
                cosine = float(similarity(encoder, vector[None], [step.text])[0])
                live.update(_frame(text, vector, step, inverter, cosine=cosine), refresh=True)
        out.print()


def _frame(
    text: str, vector: np.ndarray, step: Step | None, inverter: Inverter, *, cosine: float | None = None
) -> RenderableType:
    """Draw the original, its vector and the draft after a step."""
    grid = _given(text, vector)
    if step is None:
        blank = [True] * inverter.max_tokens
        grid.add_row("all masked", shaded(["_"] * len(blank), [0.0] * len(blank), masked=blank))
        return grid
    masked = [token == inverter.tokenizer.mask_id for token in step.ids]
    draft = shaded(step.pieces, step.confidences, masked=masked)
    grid.add_row("recovered" if cosine is not None else f"step {step.index}/{step.total}", draft)
    if cosine is None:
        return grid
    guess = Text()
    if step.likeness is not None:
        guess = Text.assemble(("   likeness ", "grey50"), f"{step.likeness:.3f}")
    figures = Text.assemble(
        ("cosine ", "grey50"),
        (f"{cosine:.3f}", shade(cosine)),
        guess,
        ("   confidence ", "grey50"),
        f"{mean_confidence(step.confidences):.0%}",
        ("   steps ", "grey50"),
        str(step.total),
    )
    grid.add_row("", figures)
    return grid


def _round(text: str, vector: np.ndarray, round_: Round) -> RenderableType:
    """Draw the original, its vector and the best text after a round of a search."""
    grid = _given(text, vector)
    grid.add_row(f"round {round_.index}/{round_.total}", Text(round_.text, style=shade(round_.cosine)))
    figures = Text.assemble(
        ("cosine ", "grey50"),
        (f"{round_.cosine:.5f}", shade(round_.cosine)),
        ("   encoder calls ", "grey50"),
        str(round_.encoder_calls),
        ("   exact" if round_.exact else "", shade(1.0)),
    )
    grid.add_row("", figures)
    return grid


def _given(text: str, vector: np.ndarray) -> Table:
    """Draw the original and its vector."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="grey50", justify="right", no_wrap=True)
    grid.add_column()
    grid.add_row("original", Text(text))
    numbers = Text.assemble((sparkline(vector), "cyan"), (f"  {len(vector)} numbers", "grey50"))
    grid.add_row("vector", numbers)
    return grid
