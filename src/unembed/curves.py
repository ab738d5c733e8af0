"""The measurements of a training run as a picture: held-out accuracy and validation loss.

Knows rows of numbers and matplotlib, which it imports only to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PANELS = (  # what is drawn, what besides if the model reads left to right, too, and the title
    ("validation_loss", "causal_loss", "validation loss"),
    ("token_accuracy", None, "held-out token accuracy, all masked"),
    ("token_f1", "causal_f1", "held-out token F1, 8 passes"),
)


def draw_curves(rows: list[dict[str, Any]], path: Path) -> bool:
    """Draw the curves of a run to a PNG or SVG; without validations or matplotlib, draw nothing.

    Returns:
        Whether the picture was written.
    """
    points = [row for row in rows if "validation_loss" in row]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not points:
        return False
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    losses = [row for row in rows if "loss" in row]
    for axes, (key, causal, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        if key == "validation_loss" and losses:
            axes.plot([r["step"] for r in losses], [r["loss"] for r in losses], color="0.8", label="training")
        axes.plot([r["step"] for r in points], [r[key] for r in points], marker=".", label="held out")
        if read := [(r["step"], r[causal]) for r in points if causal in r]:
            axes.plot(*zip(*read, strict=True), marker=".", label="held out, left to right")
        axes.set(title=title, xlabel="step")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
        if key == "validation_loss" or read:
            axes.legend()
        if key == "validation_loss":
            # The first steps fall so far that they would flatten all that follows.
            settled = [r["loss"] for r in losses[len(losses) // 30 :]] + [r[key] for r in points]
            axes.set_ylim(top=1.05 * max(settled))
    figure.savefig(path, dpi=120)
    return True
