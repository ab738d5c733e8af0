"""A report as Markdown, for a repository or a message. Knows the story, and nothing of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unembed.figures import METRICS, Figures
from unembed.report.story import MEANINGS, NAMES, Series, Story, examples


def markdown(story: Story) -> str:
    """Write the report."""
    parts = [f"# {_plain(story.title)}", ""]
    for name, rows, expected in story.unfinished:
        parts += [f"**Not finished: {_plain(name)} holds {rows} of {expected} records.**", ""]
    for suite in story.suites:
        parts += [f"## {_plain(suite)}", "", *_figures(story, suite), *_languages(story, suite)]
        parts += [*_personal(story, suite), *_examples(story, suite)]
    parts += _settings(story)
    return "\n".join(parts).rstrip() + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay cells out; all columns but the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def _figure(found: Figures, name: str) -> str:
    """A figure with its interval."""
    if name not in found.values:
        return "–"
    digits = 1 if name == "bleu" else 3
    low, high = found.intervals[name]
    return f"{found.values[name]:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _line(label: str, found: Figures) -> list[str]:
    """The figures of a series."""
    cells = [_figure(found, name) for name in sorted(METRICS, key=list(NAMES).index)]
    calls = f" + {found.encoder_calls:.0f} calls" if found.encoder_calls else ""
    speed = f"{found.texts_per_second:.1f}" if found.texts_per_second < 1000 else "–"
    return [_plain(label), str(found.texts), *cells, f"{found.forward_passes:.1f}{calls}", speed]


HEADS = ["texts", *NAMES.values(), "passes", "texts/s"]


def _figures(story: Story, suite: str) -> list[str]:
    """All methods on a suite."""
    rows = [_line(s.label, found) for s in story.series if (found := s.of(suite))]
    return ["Figures with their 95 % intervals.", "", *_table(["method", *HEADS], rows)]


def _languages(story: Story, suite: str) -> list[str]:
    """Each language of a suite, by its leader."""
    leader, languages = story.leader(suite), story.languages(suite)
    if leader is None or not languages:
        return []
    rows = [
        [*_line(str(each), found), f"{found.unknown:.1%}"]
        for each in languages
        if (found := leader.of(suite, each))
    ]
    heads = ["language", *HEADS, "unknown tokens"]
    return [f"By language, {_plain(leader.label)}:", "", *_table(heads, rows)]


def _personal(story: Story, suite: str) -> list[str]:
    """What personal data came back."""
    rows = []
    for series in story.series:
        found = series.of(suite)
        for leak in found.leaks if found else []:
            (a, b), (c, d) = leak.share_interval, leak.per_1000_interval
            rows.append(
                [
                    f"{_plain(series.label)}: {_plain(leak.kind)}",
                    f"{leak.recovered} of {leak.items}",
                    f"{leak.share:.1%} ({a:.1%}–{b:.1%})",
                    f"{leak.per_1000:.1f} ({c:.1f}–{d:.1f})",
                ]
            )
    if not rows:
        return []
    heads = ["personal data", "recovered", "share", "per 1,000 vectors"]
    return ["### Personal data", "", *_table(heads, rows)]


def _examples(story: Story, suite: str) -> list[str]:
    """Best, median and worst of the leader."""
    leader: Series | None = story.leader(suite)
    if leader is None:
        return []
    rows = [row for row in leader.rows if row.suite == suite]
    out = ["### Examples", "", f"Best, median and worst by token F1, {_plain(leader.label)}.", ""]
    for each in examples(rows):
        out += [
            f"- **{each.place}**, F1 {each.row.token_f1:.3f}, cosine {each.row.cosine:.3f}  ",
            f"  original: {_plain(each.row.reference)}  ",
            f"  recovered: {_plain(each.row.recovered) or '*nothing*'}",
        ]
    return [*out, ""]


def _settings(story: Story) -> list[str]:
    """How it was measured."""
    out = ["## How this was measured", ""]
    for each in story.records:
        s, v, h = each.settings, each.header["versions"], each.header["hardware"]
        out += [
            f"- {_plain(each.path.name)}: model {_plain(s['model'])} (weights {s['weights'][:12]}), encoder "
            f"{_plain(s['encoder'])}, {s['max_tokens']} tokens, seed {s['seed']}; "
            f"{', '.join(f'{k} {n}' for k, n in v.items() if n)}; {h['device']}, {h['precision']}, "
            f"cores {h['cores']}, threads {h['threads']}; {each.header['started']}"
            + (f", resumed {len(each.resumed)} times" if each.resumed else "")
        ]
    out += ["", "What the figures mean:", ""]
    return out + [f"- **{name}**: {meaning}" for name, meaning in MEANINGS.items()]


def _plain(text: str) -> str:
    """Take the meaning from the marks of Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", " ".join(str(text).split()))
