"""Plots as inline SVG that grows and shrinks with the page: bars with intervals, lines with bands.

Knows numbers, labels and the names of colours; places are in per cent, and text is the page's own, so
that it stays as large on a phone as anywhere else. Must not know records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Interval = tuple[float, float]
TICKS = ("0", ".25", ".5", ".75", "1")


@dataclass(frozen=True)
class Bar:
    """A figure with its interval, to be drawn as a bar."""

    label: str
    value: float
    interval: Interval
    colour: int  # of the palette; -1 for what is only there to compare with
    shown: str = ""  # the figure in words; the value by default


def bars(groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Draw groups of bars from 0 to 1."""
    rows = []
    for title, group in groups:
        rows.append(f"<h4>{escape(title)}</h4>" if title else "")
        rows += [_row(bar) for bar in group]
    ticks = "".join(f"<span>{tick}</span>" for tick in TICKS)
    body = "\n".join(filter(None, rows))
    axis = f'<div class="axis"><i></i><div>{ticks}</div><i></i></div>'
    return f'<figure class="bars">\n{body}\n{axis}</figure>'


def _row(bar: Bar) -> str:
    """Draw one bar with its label and figure."""
    low, high = bar.interval
    shown = bar.shown or f"{bar.value:.3f}"
    said = f"{bar.label}: {shown}, 95 % interval {low:.3f} to {high:.3f}"
    grid = "".join(f'<line class="grid" x1="{x}%" x2="{x}%" y1="0" y2="100%"/>' for x in (25, 50, 75))
    start, stop = _percent(low), _percent(high)
    whisker = f'<line class="whisker" x1="{start}%" x2="{stop}%" y1="50%" y2="50%"/>' + "".join(
        f'<line class="whisker" x1="{x}%" x2="{x}%" y1="28%" y2="72%"/>' for x in (start, stop)
    )
    width = _percent(bar.value)
    return (
        f'<div class="row"><span class="label">{escape(bar.label)}</span>'
        f'<svg role="img" aria-label="{escape(said)}" width="100%" height="100%">'
        f'<rect class="track" width="100%" height="100%" rx="3"/>{grid}'
        f'<rect class="{_colour(bar.colour)}" width="{width}%" height="100%" rx="3"/>{whisker}</svg>'
        f'<span class="value">{escape(shown)}</span></div>'
    )


@dataclass(frozen=True)
class Line:
    """Figures with intervals at some of the places of an axis."""

    label: str
    points: dict[int, tuple[float, Interval]]
    colour: int


def lines(series: Sequence[Line], *, ticks: Sequence[str], axis: str) -> str:
    """Draw lines from 0 to 1 over named places, each with the band of its intervals."""
    step = 100 / max(len(ticks), 1)
    parts = [f'<path class="grid" d="M0 {y}H100"/>' for y in (0, 25, 50, 75, 100)]
    for line in series:
        places = [(round(step * (i + 0.5), 2), *line.points[i]) for i in sorted(line.points)]
        colour = _colour(line.colour)
        if len(places) > 1:
            upper = " ".join(f"{x},{_height(high)}" for x, _, (_, high) in places)
            lower = " ".join(f"{x},{_height(low)}" for x, _, (low, _) in reversed(places))
            parts.append(f'<polygon class="band {colour}" points="{upper} {lower}"/>')
            path = " ".join(f"{x},{_height(value)}" for x, value, _ in places)
            parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        # A stroke of no length with round ends is a dot that the stretching leaves round.
        parts += [f'<path class="dot {colour}" d="M{x} {_height(value)}h0"/>' for x, value, _ in places]
    said = "; ".join(
        f"{line.label}: " + ", ".join(f"{ticks[i]} {line.points[i][0]:.2f}" for i in sorted(line.points))
        for line in series
    )
    levels = "".join(f"<span>{tick}</span>" for tick in reversed(TICKS))
    marks = "".join(f"<span>{escape(tick)}</span>" for tick in ticks)
    return (
        f'<figure class="lines"><div class="y">{levels}</div>'
        f'<svg role="img" aria-label="{escape(said)}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none">{"".join(parts)}</svg><div class="x">{marks}</div>'
        f'<div class="name">{escape(axis)}</div></figure>'
    )


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """Say which colour is what."""
    items = "".join(f'<li><i class="{_colour(colour)}"></i>{escape(label)}</li>' for label, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def _colour(number: int) -> str:
    """The class of a colour of the palette."""
    return "c-base" if number < 0 else f"c{number % 6}"


def _percent(share: float) -> float:
    """Where a share lies on an axis, kept inside it."""
    return round(100 * min(max(share, 0.0), 1.0), 2)


def _height(value: float) -> float:
    """Where a share lies from above."""
    return round(100 - _percent(value), 2)
