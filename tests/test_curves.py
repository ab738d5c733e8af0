"""The picture of a run: written where there is something to show, and only there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from unembed.curves import PANELS, draw_curves

LOSSES = [{"step": s, "loss": 5 / s, "rate": 1.0, "seconds": 0.1 * s} for s in (20, 40, 60)]
VALIDATIONS: list[dict[str, Any]] = [
    {"step": s, "validation_loss": 6 / s, "token_accuracy": s / 100, "token_f1": s / 90} for s in (30, 60)
]


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    assert draw_curves(LOSSES + VALIDATIONS, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5_000


def test_every_panel_is_drawn_with_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[Axes, list[tuple[list[float], list[float]]]] = {}
    plot = Axes.plot

    def spy(axes: Axes, x: list[float], y: list[float], **style: Any) -> Any:
        drawn.setdefault(axes, []).append((x, y))
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", spy)
    assert draw_curves(LOSSES + VALIDATIONS, tmp_path / "curves.png")
    assert [axes.get_title() for axes in drawn] == [title for *_, title in PANELS]
    steps = [30, 60]
    loss, accuracy, f1 = drawn.values()
    assert loss == [([20, 40, 60], [5 / 20, 5 / 40, 5 / 60]), (steps, [6 / 30, 6 / 60])]
    assert accuracy == [(steps, [0.3, 0.6])]
    assert f1 == [(steps, [30 / 90, 60 / 90])]
    drawn.clear()
    both = [*VALIDATIONS[:1], {**VALIDATIONS[1], "causal_loss": 0.07, "causal_f1": 0.8}]
    assert draw_curves(both, tmp_path / "curves.png")
    loss, accuracy, f1 = drawn.values()
    assert len(accuracy) == 1 and [list(map(list, one)) for one in (loss[-1], f1[-1])] == [
        [[60], [0.07]],
        [[60], [0.8]],
    ]


def test_a_run_shorter_than_a_line_of_losses_is_drawn(tmp_path: Path) -> None:
    assert draw_curves(VALIDATIONS[:1], tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("rows", [[], LOSSES])
def test_without_validations_nothing_is_written(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert not draw_curves(rows, tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curves(VALIDATIONS, tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())
