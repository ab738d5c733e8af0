"""The report: what stands in it, that it asks nobody for anything, and how it looks in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, FLAGS, needs_chromium
from playwright.sync_api import Browser, sync_playwright
from recovering import WORDS

from unembed.cli import main
from unembed.errors import UnembedError
from unembed.records import Method, Records, Row, read_records
from unembed.report import write_report
from unembed.report.page import page
from unembed.report.story import by_length, examples, marked, spoken, tell

NASTY = '<script>alert("x")</script> & "quoted" | `code` $body *bold*'
METHODS = [
    Method("confidence-8", "confidence", 8),
    Method("euler-32", "euler", 32, guidance=1.5),
    Method("random", "random", baseline=True),
]


def make(path: Path, *, texts: int = 60, methods: list[Method] = METHODS, languages: bool = True) -> Path:
    """Write a file of records as an evaluation would."""
    rng = np.random.default_rng(0)
    spoken = ["en", "de", "ar"] if languages else [None]
    suites = {"letters": [None], "many_tongues": spoken}
    rows = []
    for quality, method in enumerate(reversed(methods)):
        for suite, tongues in suites.items():
            for number in range(texts):
                words = [str(w) for w in rng.choice(WORDS, size=int(rng.integers(3, 28)))]
                kept = [w if rng.random() < 0.3 * quality + 0.1 else "zzz" for w in words]
                f1 = sum(a == b for a, b in zip(words, kept, strict=True)) / len(words)
                text = NASTY if number == 0 else " ".join(words)
                item = {"kind": "name", "text": NASTY if number == 0 else words[0], "recovered": f1 > 0.5}
                row = Row(
                    method=method.name, suite=suite, number=number, key=f"{suite}{number}",
                    language=tongues[number % len(tongues)], text=text, reference=text,
                    recovered={0: NASTY, 1: "", 2: NASTY}.get(number, " ".join(kept)), tokens=len(words),
                    token_accuracy=f1, unknown=int(suite == "many_tongues" and number % 3 == 2),
                    token_f1={0: 1.0, 1: 0.0, 2: 0.0}.get(number, round(f1, 6)),
                    exact_match=float(f1 == 1), rouge_l=f1, cosine=f1, forward_passes=method.steps,
                    encoder_calls=0, seconds=0.01,
                    personal=[item] if number % 3 == 0 else [],
                )  # fmt: skip
                rows.append(row)
    settings = {
        "model": "a/model", "weights": "0" * 64, "encoder": "an-encoder", "max_tokens": 32, "seed": 0,
        "batch_size": 8, "nearest_from": None, "methods": [asdict(m) for m in methods],
        "suites": [{"name": s, "texts": texts, "languages": [], "sha256": "1" * 64} for s in suites],
    }  # fmt: skip
    header = {
        "record": "header", "format": 1, "started": "2030-01-02T03:04:05Z", "settings": settings,
        "versions": {"unembed": "9.9", "torch": "1.0"},
        "hardware": {"device": "cpu", "precision": "fp32", "machine": "m", "cores": 2, "threads": 1},
    }  # fmt: skip
    lines = [header, *({"record": "text", **asdict(row)} for row in rows)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(make(tmp_path_factory.mktemp("records") / "a.jsonl"))


@pytest.fixture(scope="module")
def html(records: Records) -> str:
    return page(tell([records]))


class Tags(HTMLParser):
    """Gathers the tags of a page, checking that they close in order."""

    VOID = ("meta", "link", "line", "rect", "path", "polyline", "polygon", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing(html: str) -> None:
    tags = Tags(html).seen
    names = {tag for tag, _ in tags}
    assert "svg" in names and "table" in names
    assert not names & {"script", "img", "iframe", "object", "embed"}
    for tag, attributes in tags:
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import|https?://", html)


def test_texts_are_escaped(html: str, records: Records, tmp_path: Path) -> None:
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    written = write_report([records], tmp_path / "out", title="<b>&amp;")
    markdown, page = (path.read_text(encoding="utf-8") for path in written)
    assert "<title>&lt;b&gt;&amp;amp;</title>" in page
    assert "\\<script\\>" in markdown and "\n<script>" not in markdown
    # No cell of a table is cut by a bar in a text.
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} <= {5, 11, 12}


def test_what_stands_in_it(html: str, records: Records, tmp_path: Path) -> None:
    markdown = write_report([records], tmp_path)[0].read_text(encoding="utf-8")
    story = tell([records])
    leader = story.leader("letters")
    assert leader is not None and leader.label == "confidence, 8 passes"
    found = leader.of("letters")
    assert found is not None
    low, high = found.intervals["token_f1"]
    assert f"{found.values['token_f1']:.3f} ({low:.3f}–{high:.3f})" in markdown
    assert f"{found.values['token_f1']:.3f}<small>{low:.3f}–{high:.3f}</small>" in html
    for said in ("euler, 32 passes, guidance 1.5", "random tokens", "a/model", "an-encoder", "torch 1.0"):
        assert said in html and said.replace("_", "\\_") in markdown
    assert "German<" in html and re.search(r"Arabic \(\d+ % unknown\)", html)
    leak = found.leaks[0]
    assert f"{leak.recovered} of {leak.items}" in html and f"{leak.recovered} of {leak.items}" in markdown
    assert "Not finished" not in html + markdown
    for word in ("Best", "Median", "Worst"):
        assert f"<b>{word.lower()}</b>" in html


def test_an_unfinished_file_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "a.jsonl", texts=5)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:9]), encoding="utf-8")
    for written in write_report([read_records(path)], tmp_path / "out"):
        assert "a.jsonl holds 8 of 30 records" in written.read_text(encoding="utf-8")
    path.write_text(lines[0], encoding="utf-8")
    with pytest.raises(UnembedError, match="hold no text yet"):
        write_report([read_records(path)], tmp_path / "out")


def test_several_files_are_told_apart(tmp_path: Path) -> None:
    files = [make(tmp_path / f"{name}.jsonl", texts=4) for name in ("one", "two")]
    story = tell([read_records(file) for file in files])
    assert len({s.label for s in story.series}) == 6
    assert {"one: random tokens", "two: random tokens"} <= {s.label for s in story.series}
    Tags(page(story))


def test_a_single_text_makes_a_page(tmp_path: Path) -> None:
    Tags(page(tell([read_records(make(tmp_path / "a.jsonl", texts=1, languages=False))])))


def rows_of(*f1: float) -> list[Row]:
    base: dict[str, Any] = dict(
        method="m", suite="s", language=None, text="", reference="", recovered="", token_accuracy=0.0,
        exact_match=0.0, rouge_l=0.0, cosine=0.0, forward_passes=1, encoder_calls=0, seconds=0.0,
    )  # fmt: skip
    return [Row(number=i, key=str(i), tokens=i + 1, token_f1=x, **base) for i, x in enumerate(f1)]


def test_examples_are_chosen_by_rule() -> None:
    rows = rows_of(0.5, 1.0, 0.0, 0.5, 1.0, 0.25, 0.0, 0.75, 0.5)
    chosen = [(e.place, e.row.number) for e in examples(rows, count=1)]
    assert chosen == [("best", 1), ("median", 3), ("worst", 2)]
    chosen = [(e.place, e.row.number) for e in examples(rows)]
    assert chosen == [
        ("best", 1), ("best", 4), ("best", 7), ("median", 0), ("median", 3), ("median", 8),
        ("worst", 2), ("worst", 6), ("worst", 5),
    ]  # fmt: skip
    assert [e.place for e in examples(rows_of(0.3))] == ["best"]
    equal = [(e.place, e.row.number) for e in examples(rows_of(*[0.5] * 9), count=1)]
    assert equal[0] == ("best", 0) and len({number for _, number in equal}) == len(equal)


def test_f1_by_length() -> None:
    rows = rows_of(*[1.0] * 4, *[0.5] * 3, *[0.0] * 20)
    assert by_length(rows, seed=0).keys() == set()
    many = [row for row in rows for _ in range(2)]
    found = by_length(many, seed=0)
    assert found[0] == (1.0, (1.0, 1.0))
    assert found[1][0] == pytest.approx((3 * 0.5) / 4)
    assert 6 in found or len(found) >= 5


def test_marks() -> None:
    left, right = marked("the old cat, sat", "cat. the sat now")
    assert [mark for _, mark in left].count("lost") == 1 and ("old", "lost") in left
    assert ("now", "new") in right
    assert [w for w, _ in left] == ["the", "old", "cat,", "sat"]
    assert {mark for _, mark in left if mark} == {"lost", "moved"}
    assert marked("", "a") == ([], [("a", "new")])
    same, _ = marked("a b", "a b")
    assert all(mark == "" for _, mark in same)


def test_methods_in_words() -> None:
    search = {"refine": "encoder", "rounds": 20, "candidates": 32, "pool": 8, "budget": 100}
    said = spoken(Method("x", "confidence", 1, temperature=0.5, search=search))
    assert said == "confidence, 1 pass, temperature 0.5, search with the encoder (20 x 32, at most 100 calls)"
    search = {"refine": "self", "rounds": 4, "candidates": 8, "pool": 8, "budget": None}
    assert spoken(Method("x", "beam", 32, search=search)).endswith("the model's own guesses (4 x 8)")
    several = Method("x", "euler", 8, temperature=0.5, drafts=4)
    assert spoken(several) == "euler, 8 passes, temperature 0.5, the best of 4 drafts"
    assert spoken(Method("unconditional-8", "unconditional", 8, 0.0)) == "model without the vector"
    assert spoken(Method("nearest", "nearest")) == "nearest passage"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "a.jsonl", texts=4)
    main(["report", str(path), "-o", str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "md": str(tmp_path / "out" / "report.md"), "html": str(tmp_path / "out" / "index.html")
    }  # fmt: skip
    for argv, said in (
        (["report", "-o", str(tmp_path)], "no records to report on"),
        (["report", str(tmp_path / "none.jsonl"), "-o", str(tmp_path)], "there is no file"),
        (["report", str(path), "-o", str(path)], "must be a folder that can be written to"),
    ):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2
        assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_browser(browser: Browser, records: Records, tmp_path: Path, width: int, scheme: Any) -> None:
    path = write_report([records], tmp_path)[1]
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view, requests, complaints = context.new_page(), [], []
    view.on("request", lambda request: requests.append(request.url))
    view.on("console", lambda message: complaints.append(message.text))
    view.goto(path.as_uri())
    view.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    # Nothing makes the page wider than the screen, and no text is too small to read.
    assert view.evaluate("document.documentElement.scrollWidth") == width
    small = view.evaluate(
        "[...document.querySelectorAll('body *')].filter((e) => e.innerText && e.children.length === 0)"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)).filter((size) => size < 11)"
    )
    assert small == []
    paper = view.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == ("rgb(247, 245, 240)" if scheme == "light" else "rgb(18, 20, 23)")
    bar = view.evaluate("document.querySelector('.bars svg').getBoundingClientRect().width")
    assert bar > width / 3
    fills = view.evaluate(
        "[...document.querySelectorAll('.bars rect.c0')].map((e) => e.getBoundingClientRect().width)"
    )
    assert max(fills) > 20
    assert requests == [path.as_uri()] and complaints == []
    context.close()
