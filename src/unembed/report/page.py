"""A report as one page of HTML that asks nobody for anything: style, plots and text are all inside.

Knows the story, HTML and the plots; must not know how a figure is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from string import Template

from unembed.figures import Figures
from unembed.metrics import bleu_tokenizer
from unembed.records import Records, Row
from unembed.report import plots
from unembed.report.story import (
    BIN,
    BIN_TEXTS,
    MEANINGS,
    NAMES,
    Mark,
    Series,
    Story,
    by_length,
    examples,
    marked,
    recovered_items,
)

LANGUAGES = {
    "en": "English", "zh": "Chinese", "de": "German", "ja": "Japanese", "fr": "French", "es": "Spanish",
    "ko": "Korean", "ru": "Russian", "ar": "Arabic", "pt": "Portuguese",
}  # fmt: skip


def page(story: Story) -> str:
    """Write the page."""
    body = [_top(story), _intro(story)]
    for name, rows, expected in story.unfinished:
        body.append(f'<p class="alert">Not finished: {escape(name)} holds {rows} of {expected} records.</p>')
    body.append(_overview(story))
    body += [_suite(story, suite) for suite in story.suites]
    body += [_measured(story), _footer()]
    folder = resources.files("unembed.report")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    style = (folder / "page.css").read_text(encoding="utf-8").strip()
    return template.substitute(title=escape(story.title), style=style, body="\n".join(filter(None, body)))


def _top(story: Story) -> str:
    """The line above all."""
    models = ", ".join(dict.fromkeys(r.settings["model"] for r in story.records))
    days = sorted({r.header["started"][:10] for r in story.records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f'<header class="top"><b>unembed</b><span>{escape(models)}</span><span>{escape(when)}</span></header>'
    )


def _intro(story: Story) -> str:
    """What was done, and what came of it."""
    encoders = ", ".join(dict.fromkeys(r.settings["encoder"] for r in story.records))
    texts = len({(row.suite, row.key) for s in story.series for row in s.rows})
    helped = any((s.method.search or {}).get("refine") == "encoder" for s in story.series)
    what = (
        f"{texts:,} text{'s were' if texts != 1 else ' was'} turned into vectors by {escape(encoders)}, "
        f"thrown away, and read back <em>from the vectors{'' if helped else ' alone'}</em>."
    )
    return f'<div class="intro"><h1>{escape(story.title)}</h1><p>{what}</p></div>'


def _overview(story: Story) -> str:
    """All suites at a glance, where there are several."""
    if len(story.suites) < 2:
        return ""
    palette = colours(story)
    shown = [s for s in story.series if not s.method.baseline] or story.series
    groups = []
    for suite in story.suites:
        drawn = [
            plots.Bar(s.label, f.values["token_f1"], f.intervals["token_f1"], palette[s.label])
            for s in shown
            if (f := s.of(suite))
        ]
        groups.append((_spaced(suite), drawn))
    if len(shown) == 1:
        # One bar a suite needs no headings.
        groups = [("", [replace(bar, label=title) for title, group in groups for bar in group])]
    links = ", ".join(f'<a href="#{_anchor(story, s)}">{escape(_spaced(s))}</a>' for s in story.suites)
    note = f"Token F1 with 95 % intervals. More on each below: {links}."
    return _grid([_card("At a glance", note, plots.bars(groups))])


def _anchor(story: Story, suite: str) -> str:
    """Where on the page a suite is told of."""
    return f"suite-{story.suites.index(suite) + 1}"


def _spaced(suite: str) -> str:
    """The name of a suite as people write it."""
    return suite.replace("_", " ")


def _suite(story: Story, suite: str) -> str:
    """All that is told of one suite."""
    leader = story.leader(suite)
    found = leader.of(suite) if leader else None
    if leader is None or found is None:
        return ""
    languages = story.languages(suite)
    counted = f"{found.texts:,} texts" + (f" in {len(languages)} languages" if languages else "")
    head = f'<h2 id="{_anchor(story, suite)}">{escape(_spaced(suite))} <small>{counted}</small></h2>'
    cards = [_figures(story, suite, leader)]
    halves = [_lengths(story, suite), _languages(story, suite, leader, languages)]
    cards.append(_grid(halves))
    cards += [_personal(story, suite, leader), _examples(suite, leader)]
    return "\n".join(
        filter(None, [f"<section>{head}", _tiles(story, suite, leader, found), *cards, "</section>"])
    )


def _grid(cards: Sequence[str]) -> str:
    """Put cards side by side where there is room."""
    cards = [card for card in cards if card]
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _card(title: str, quiet: str, body: str) -> str:
    """A box with a title and what is to be known about it."""
    note = f'<p class="quiet">{quiet}</p>' if quiet else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{note}{body}</div>'


def _tiles(story: Story, suite: str, leader: Series, found: Figures) -> str:
    """The four figures to remember."""
    base = [(s.label, f) for s in story.series if s.method.baseline and (f := s.of(suite))]
    tiles = []
    for name in ("token_f1", "exact_match", "cosine"):
        low, high = found.intervals[name]
        percent = name == "exact_match"
        shown = f"{100 * found.values[name]:.1f}<small> %</small>" if percent else f"{found.values[name]:.2f}"
        span = f"{100 * low:.1f} to {100 * high:.1f} %" if percent else f"{low:.2f} to {high:.2f}"
        compared = max(base, key=lambda each: each[1].values[name], default=None)
        note = f"95 % interval {span}"
        if percent and low == high:  # an interval of no width would pass for certainty
            note = (
                f"{'none' if high == 0 else 'all'} of {found.texts:,} text{'s' if found.texts != 1 else ''}"
            )
        if compared is not None:
            value = compared[1].values[name]
            shown_base = f"{100 * value:.1f} %" if percent else f"{value:.2f}"
            note += f"; {compared[0]}: {shown_base}"
        tiles.append(("of texts, to the letter" if percent else NAMES[name], shown, note))
    if found.leaks:
        total = sum(leak.per_1000 for leak in found.leaks)
        held = sum(leak.items for leak in found.leaks) * 1000 / found.texts
        tiles.append(
            ("personal items per 1,000 vectors", f"{total:,.0f}", f"of {held:,.0f} that the texts hold")
        )
    else:
        calls = f", {found.encoder_calls:,.0f} encoder calls" if found.encoder_calls else ""
        speed = f"{found.texts_per_second:.1f} texts a second"
        tiles.append(("passes through the model, a text", f"{found.forward_passes:,.0f}", f"{speed}{calls}"))
    cells = "".join(
        f'<div><dt>{escape(title)}</dt><dd class="big">{big}</dd><dd class="note">{escape(note)}</dd></div>'
        for title, big, note in tiles
    )
    several = sum(not s.method.baseline for s in story.series if s.of(suite)) > 1
    of = ", the best of those measured here" if several else ""
    return f'<p class="quiet">By {escape(leader.label)}{of}.</p><dl class="tiles">{cells}</dl>'


def colours(story: Story) -> dict[str, int]:
    """Give each series a colour, baselines none."""
    own = [s.label for s in story.series if not s.method.baseline]
    return {s.label: own.index(s.label) if s.label in own else -1 for s in story.series}


def _figures(story: Story, suite: str, leader: Series) -> str:
    """All methods on a suite: a plot and a table."""
    palette = colours(story)
    drawn = [
        plots.Bar(s.label, f.values["token_f1"], f.intervals["token_f1"], palette[s.label])
        for s in story.series
        if (f := s.of(suite))
    ]
    chart = plots.bars([("", drawn)]) if len(drawn) > 1 else ""
    title = "Token F1 by method" if len(drawn) > 1 else "All figures"
    rows = [(s.label, f, _kind(s, leader)) for s in story.series if (f := s.of(suite))]
    table = _table("method", rows)
    if chart:
        table = f"<details open><summary>All figures</summary>{table}</details>"
    return _grid([_card(title, "Small figures and whiskers are 95 % intervals.", chart + table)])


def _kind(series: Series, leader: Series) -> str:
    """How a row is to be shown."""
    return "lead" if series is leader else "base" if series.method.baseline else ""


def _table(head: str, rows: Sequence[tuple[str, Figures, str]]) -> str:
    """Figures with their intervals."""
    calls = any(found.encoder_calls for _, found, _ in rows)
    heads = [head, "texts", *NAMES.values(), "passes", *["calls"] * calls, "texts/s"]
    lines = []
    for label, found, kind in rows:
        cells = [escape(label), f"{found.texts:,}", *(_figure(found, name) for name in NAMES)]
        cells.append(f"{found.forward_passes:,.1f}" if found.forward_passes else "–")
        if calls:
            cells.append(f"{found.encoder_calls:,.0f}")
        # How fast random tokens are drawn interests nobody.
        cells.append(f"{found.texts_per_second:,.1f}" if found.forward_passes else "–")
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    top = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return _scrolling(top, lines)


def _scrolling(top: str, lines: Sequence[str]) -> str:
    """A table that is moved sideways where it is too wide."""
    body = "".join(lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(found: Figures, name: str) -> str:
    """A figure with its interval below."""
    if name not in found.values:
        return "–"
    digits = 1 if name == "bleu" else 3
    low, high = found.intervals[name]
    return f"{found.values[name]:.{digits}f}<small>{low:.{digits}f}–{high:.{digits}f}</small>"


def _lengths(story: Story, suite: str) -> str:
    """Token F1 by the length of the text."""
    palette, series = colours(story), []
    for each in story.series:
        rows = [row for row in each.rows if row.suite == suite]
        points = by_length(rows, seed=int(each.records.settings["seed"])) if rows else {}
        if points and each.method.strategy != "random":
            series.append(plots.Line(each.label, points, palette[each.label]))
    if not series or max(len(line.points) for line in series) < 2:
        return ""
    first, last = (pick(i for line in series for i in line.points) for pick in (min, max))
    ticks = [f"{BIN * i + 1}–{BIN * i + BIN}" for i in range(first, last + 1)]
    series = [replace(line, points={i - first: p for i, p in line.points.items()}) for line in series]
    chart = plots.lines(series, ticks=ticks, axis="tokens of the text")
    note = f"Token F1; bands are 95 % intervals. Lengths with fewer than {BIN_TEXTS} texts are left out."
    key = plots.legend([(line.label, line.colour) for line in series]) if len(series) > 1 else ""
    return _card("By length", note, key + chart)


def _languages(story: Story, suite: str, leader: Series, languages: Sequence[str | None]) -> str:
    """Token F1 by language."""
    if not languages:
        return ""
    found = {_called(each): f for each in languages if (f := leader.of(suite, each))}
    colour = colours(story)[leader.label]
    drawn = [
        plots.Bar(
            name + (f" ({100 * f.unknown:.0f} % unknown)" if f.unknown >= 0.005 else ""),
            f.values["token_f1"],
            f.intervals["token_f1"],
            colour,
        )
        for name, f in found.items()
    ]
    chart = plots.bars([("", drawn)])
    rows = [(name, f, "") for name, f in found.items()]
    table = f"<details><summary>All figures by language</summary>{_table('language', rows)}</details>"
    note = f"Token F1, {escape(leader.label)}."
    if any(f.unknown >= 0.005 for f in found.values()):
        note += " Unknown: tokens that the model's vocabulary cannot write, and so nobody recovers with it."
    return _card("By language", note, chart + table)


def _called(language: str | None) -> str:
    """What a language is called."""
    return LANGUAGES.get(str(language), str(language))


def _personal(story: Story, suite: str, leader: Series) -> str:
    """What personal data came back."""
    found = leader.of(suite)
    if found is None or not found.leaks:
        return ""
    drawn = [
        plots.Bar(
            f"{leak.kind} ({leak.recovered} of {leak.items})",
            leak.share,
            leak.share_interval,
            colours(story)[leader.label],
            f"{100 * leak.share:.0f} %",
        )
        for leak in found.leaks
    ]
    rows = []
    for series in story.series:
        of = series.of(suite)
        for leak in of.leaks if of else []:
            (a, b), (c, d) = leak.share_interval, leak.per_1000_interval
            cells = [
                f"{escape(series.label)}: {escape(leak.kind)}",
                f"{leak.recovered} of {leak.items}",
                f"{100 * leak.share:.1f} %<small>{100 * a:.1f}–{100 * b:.1f}</small>",
                f"{leak.per_1000:.1f}<small>{c:.1f}–{d:.1f}</small>",
            ]
            kind = _kind(series, leader)
            rows.append(f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{each}</th>" for each in ("", "recovered", "share", "per 1,000 vectors"))
    table = (
        "<details><summary>Counts, rates per 1,000 vectors, and all methods</summary>"
        f"{_scrolling(heads, rows)}</details>"
    )
    mine = recovered_items([row for row in leader.rows if row.suite == suite])
    chips = "".join(f"<li><small>{escape(kind)}</small>{escape(text)}</li>" for kind, text in mine)
    chips = f'<ul class="chips">{chips}</ul>' if chips else ""
    note = "Items of the texts that stand in what came back, whole, whatever their case and spacing." + (
        f" The first of those that {escape(leader.label)} gave away:" if mine else " None came back."
    )
    return _grid([_card("Personal data that came back", note, chips + plots.bars([("", drawn)]) + table)])


def _examples(suite: str, leader: Series) -> str:
    """Best, median and worst."""
    rows = [row for row in leader.rows if row.suite == suite]
    cards = "".join(_example(each.place, each.row) for each in examples(rows))
    note = (
        f"The best, the median and the worst by token F1 of {escape(leader.label)}; of equals, the first. "
        '<span class="lost">Lost</span> words did not come back, <span class="new">new</span> ones were not '
        'there, <span class="moved">moved</span> ones changed their place.'
    )
    return _grid([_card("Examples", note, f'<div class="examples">{cards}</div>')])


def _example(place: str, row: Row) -> str:
    """A text and what came back of it, side by side."""
    reference, recovered = marked(row.reference, row.recovered)
    language = f' lang="{escape(row.language)}"' if row.language else ""
    came = _words(recovered) or '<span class="nothing">nothing</span>'
    return (
        f'<div class="example"><div class="place"><b>{place}</b><span>F1 {row.token_f1:.2f}</span> '
        f"<span>cosine {row.cosine:.2f}</span></div>"
        f'<div><h5>original</h5><p dir="auto"{language}>{_words(reference)}</p></div>'
        f'<div><h5>from the vector</h5><p dir="auto"{language}>{came}</p></div></div>'
    )


def _words(words: Sequence[tuple[str, Mark]]) -> str:
    """Join words, marked ones in their colour."""
    return " ".join(
        f'<span class="{mark}">{escape(word)}</span>' if mark else escape(word) for word, mark in words
    )


def _measured(story: Story) -> str:
    """Settings, versions, hardware, and what the figures mean."""
    meanings = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
    cards = [_card("What the figures mean", "", f'<dl class="facts">{meanings}</dl>')]
    cards += [_card(each.path.name, "", _facts(each)) for each in story.records]
    return f"<section><h2>How this was measured</h2>{_grid(cards)}</section>"


def _facts(records: Records) -> str:
    """The settings of one file."""
    settings, hardware = records.settings, records.header["hardware"]
    versions = ", ".join(
        f"{name} {version}" for name, version in records.header["versions"].items() if version
    )
    suites = "; ".join(f"{s['name']}, {s['texts']} texts ({s['sha256'][:12]})" for s in settings["suites"])
    tokenizers = sorted({(row.language or "", bleu_tokenizer(row.language)) for row in records.rows})
    facts = {
        "model": f"{settings['model']}, weights {settings['weights'][:12]}",
        "encoder": f"{settings['encoder']}; texts cut to {settings['max_tokens']} tokens, embedded as cut",
        "texts": suites,
        "seed": f"{settings['seed']}, batches of {settings['batch_size']}",
        "BLEU": "tokenizer "
        + ", ".join(f"{t} ({language})" if language else t for language, t in tokenizers),
        "intervals": "95 %, percentile bootstrap over the texts, 1,000 resamples",
        "versions": versions,
        "hardware": f"{hardware['device']} ({hardware['machine']}), {hardware['precision']}, "
        f"cores {hardware['cores']}, threads {hardware['threads']}",
        "started": records.header["started"]
        + (f", resumed {len(records.resumed)} times" if records.resumed else ""),
    }
    if settings.get("distilled"):
        facts["distilled encoder"] = f"weights {settings['distilled'][:12]}"
    nearest = settings.get("nearest_from")
    if nearest:
        limit = f", the first {nearest['limit']:,}" if nearest.get("limit") else ""
        facts["nearest passage of"] = f"{nearest['name']} ({nearest['sha256'][:12]}){limit}"
    return (
        '<dl class="facts">'
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
        + "</dl>"
    )


def _footer() -> str:
    """Who says so, and what it is for."""
    return (
        "<footer>Made by unembed from records of single texts; nothing on this page is loaded from "
        "elsewhere. It shows why embeddings of private text deserve the care that the text itself "
        "gets.</footer>"
    )
