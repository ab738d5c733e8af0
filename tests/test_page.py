"""The page in a real browser: the whole story, and what happens when something goes wrong.

Needs Chromium on the path (`make browser` installs it where apt is at hand); skipped without.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import CHROMIUM, FLAGS, needs_chromium
from playwright.sync_api import Browser, BrowserContext, FilePayload, Page, Request, expect, sync_playwright
from serving import SIZE, Served, serving

pytestmark = needs_chromium

SAMPLE = "Our flight was cancelled because of the snow."
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


class Visit:
    """A page, with what it asked for and what it complained of."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page, self.url = context.new_page(), url
        self.errors: list[str] = []
        self.requests: list[Request] = []
        self.page.on(
            "console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))

    def open(self, fragment: str = "") -> Page:
        """Go there, and wait until the model is known."""
        self.page.goto(self.url + fragment)
        expect(self.page.locator("#model")).not_to_be_empty()
        return self.page

    def sent(self, path: str) -> list[dict[str, Any]]:
        """The bodies sent to a path."""
        return [json.loads(r.post_data or "") for r in self.requests if urlsplit(r.url).path == path]

    def check(self) -> None:
        """No complaint in the console, and no request to anyone else."""
        assert self.errors == []
        assert {urlsplit(request.url).netloc for request in self.requests} == {urlsplit(self.url).netloc}


@contextlib.contextmanager
def visiting(browser: Browser, served: Served, **options: Any) -> Iterator[Visit]:
    """Look at a server's page; options are those of the browser's context."""
    defaults: dict[str, Any] = {"viewport": {"width": 1180, "height": 900}, "reduced_motion": "reduce"}
    context = browser.new_context(**(defaults | options))
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    yield Visit(context, served.url)
    context.close()


@pytest.fixture
def visit(browser: Browser, served: Served) -> Iterator[Visit]:
    """A visit that has to go well."""
    with visiting(browser, served) as visit:
        yield visit
        visit.check()


def slide(page: Page, name: str, value: float) -> None:
    """Set a slider as a hand would: one event while it moves, one when it is let go."""
    page.locator(f"input[name={name}]").evaluate(
        """(input, value) => {
            input.closest("details").open = true;
            input.value = value;
            for (const type of ["input", "change"]) input.dispatchEvent(new Event(type, { bubbles: true }));
        }""",
        value,
    )


def colours(page: Page, canvas: str) -> int:
    """How many different colours a strip has."""
    return page.locator(canvas).evaluate(
        """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )


def test_the_whole_story(browser: Browser, served: Served) -> None:
    with visiting(browser, served, reduced_motion="no-preference") as visit:
        page = visit.open()
        expect(page.get_by_label("Your sentence")).to_have_value(SAMPLE)
        expect(page.locator(".tokens .mask")).to_have_count(12)
        page.get_by_role("button", name="Throw it away and recover it").click()
        # The text is gone: from sight, and from the page.
        expect(page.get_by_text("Thrown away. From here on there are only numbers.")).to_be_visible()
        expect(page.locator("#text")).to_be_hidden()
        expect(page.locator(".tokens .word").first).to_be_visible()
        expect(page.locator("#ghost")).to_be_empty()
        expect(page.locator("#text")).to_have_value("")
        assert colours(page, "#strip") == SIZE
        # What comes back stands beside it, compared.
        result = page.locator("#result")
        expect(result).to_be_visible()
        expect(result).to_contain_text("Our flight was cancelled")
        expect(result.locator(".lost").first).to_be_visible()
        expect(result.locator(".new").first).to_be_visible()
        expect(result.locator("dl")).to_have_text(re.compile(r"cosine-?\d\.\d{3}likeness-?\d\.\d{3}token F1"))
        explained = result.get_by_title("the model’s own guess of the cosine; no encoder was asked")
        expect(explained.locator("dt")).to_have_text("likeness")
        expect(page.locator("#status")).to_contain_text("Token F1")
        # The request that recovered it carried numbers only.
        (body,) = visit.sent("/api/stream")
        assert set(body) == {"strategy", "steps", "guidance", "temperature", "seed", "vector"}
        np.testing.assert_allclose(body["vector"], served.encoder.encode([SAMPLE])[0], rtol=1e-6)
        assert (body["strategy"], body["steps"]) == ("auto", None)
        text = served.inverter.invert(body["vector"], strategy="beam")[0].text
        expect(page.locator("#pair p").nth(1)).to_have_text(text)
        expect(page.locator("#pair p").nth(2)).to_contain_text(re.compile(r"^beam, \d+ passes, "))
        visit.check()


def test_the_slider_goes_through_the_steps(visit: Visit) -> None:
    page = visit.open()
    slide(page, "steps", 8)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#result")).to_be_visible()
    slider = page.get_by_label("Steps", exact=True)
    expect(slider).to_have_value("8")
    expect(page.locator(".tokens .mask")).to_have_count(0)
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#slider-out")).to_have_text("1 of 8")
    assert page.locator(".tokens .mask").count() > 0
    assert "step 1:" in (slider.get_attribute("aria-valuetext") or "")
    sure = page.locator(".tokens .word").first
    expect(sure).to_have_attribute("title", re.compile(r"confidence \d+ %"))


def test_a_beam_grows_from_the_left(visit: Visit, served: Served) -> None:
    page = visit.open()
    expect(page.get_by_role("combobox", name="Strategy")).to_have_value("auto")
    page.locator("#run").click()
    expect(page.locator("#result")).to_be_visible()
    vector = visit.sent("/api/stream")[0]["vector"]
    slider = page.get_by_label("Steps", exact=True)
    for number, step in enumerate(served.inverter.stream(vector, strategy="beam"), 1):
        slider.fill(str(number))
        expect(page.locator("#slider-out")).to_have_text(f"{number} of 12")
        # What the best beginning has not come to is masked, and stands on its right.
        kinds = page.locator(".tokens > span").evaluate_all("(all) => all.map((each) => each.classList[0])")
        hidden = [token == served.inverter.tokenizer.mask_id for token in step.ids]
        assert kinds == ["mask" if each else "word" for each in hidden]
        assert hidden == sorted(hidden)


def test_two_strategies_side_by_side(visit: Visit) -> None:
    page = visit.open()
    page.get_by_label("Side by side with").select_option("euler")
    page.get_by_role("button", name="My password").click()
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator(".board")).to_have_count(2)
    expect(page.locator("#pair h3")).to_have_text(
        ["Original, kept by your browser only", "Recovered by beam", "Recovered by euler"]
    )
    expect(page.locator(".board h3")).to_have_text(["beam", "euler"])
    assert [body["strategy"] for body in visit.sent("/api/stream")] == ["auto", "euler"]


def test_settings_reach_the_server(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("combobox", name="Strategy").select_option("two-stage")
    for name, value in (("steps", 5), ("guidance", 2), ("temperature", 0.5)):
        slide(page, name, value)
    page.get_by_label("Seed").fill("42")
    page.locator("#run").click()
    expect(page.locator("#result")).to_be_visible()
    (body,) = visit.sent("/api/stream")
    body.pop("vector")
    assert body == {"strategy": "two-stage", "steps": 5, "guidance": 2, "temperature": 0.5, "seed": 42}


def test_refine_by_search(visit: Visit) -> None:
    page = visit.open()
    slide(page, "rounds", 3)
    page.locator("#run").click()
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator(".curve figcaption")).to_contain_text("round 3 of 3: best cosine")
    points = page.locator(".curve polyline").get_attribute("points") or ""
    assert len(points.split()) == 4
    expect(page.locator("#pair")).to_contain_text("texts tried")


# --- the attacker and the defender ----------------------------------------------------------------


def test_a_vector_alone(visit: Visit, served: Served) -> None:
    vector = np.random.default_rng(3).standard_normal(SIZE)
    page = visit.open()
    page.get_by_text("I only have a vector").click()
    page.get_by_label("The attacker’s view").fill(json.dumps(vector.tolist()))
    page.get_by_role("button", name="Recover the text").click()
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator("#pair h3")).to_have_text(["Recovered from the vector"])
    expect(page.locator("#pair p").first).to_have_text(served.inverter.invert(vector, seed=1)[0].text)
    assert visit.sent("/api/encode") == []


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "json", "openai"])
def test_a_file_with_a_vector(visit: Visit, kind: str) -> None:
    vector = np.random.default_rng(4).standard_normal((2, SIZE))
    if kind in ("json", "openai"):
        rows = vector.tolist()
        made = rows if kind == "json" else {"data": [{"embedding": row} for row in rows]}
        name, content = "leak.json", json.dumps(made).encode()
    else:
        buffer = io.BytesIO()
        np.save(buffer, vector.astype(kind))
        name, content = "leak.npy", buffer.getvalue()
    page = visit.open()
    page.locator("#file").set_input_files(FilePayload(name=name, mimeType="", buffer=content))
    expect(page.locator("#result")).to_be_visible()
    np.testing.assert_allclose(visit.sent("/api/stream")[0]["vector"], vector[0], rtol=2e-3)


@pytest.mark.parametrize(
    ("pasted", "expected"),
    [
        ("[1, 2, 3]", f"This vector has 3 numbers; words makes {SIZE}"),
        ("hello", "This is not a vector"),
        ("", "This is not a vector"),
        ('{"a": 1}', "This is not a vector"),
        ("[1e999, 1, 1, 1, 1, 1, 1, 1]", "This is not a vector"),
    ],
)
def test_a_wrong_vector(visit: Visit, pasted: str, expected: str) -> None:
    page = visit.open()
    page.get_by_text("I only have a vector").click()
    page.locator("#pasted").fill(pasted)
    page.get_by_role("button", name="Recover the text").click()
    expect(page.get_by_role("alert")).to_contain_text(expected)
    assert visit.sent("/api/stream") == []
    # And the way on is open.
    page.locator("#pasted").fill("[1, 2, 3, 4, 5, 6, 7, 8]")
    page.get_by_role("button", name="Recover the text").click()
    expect(page.locator("#result")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_file_that_is_no_vector(visit: Visit) -> None:
    page = visit.open()
    file = FilePayload(name="x.npy", mimeType="", buffer=b"\x93NUMPY nothing at all")
    page.locator("#file").set_input_files(file)
    expect(page.get_by_role("alert")).to_contain_text(".npy")


@pytest.mark.parametrize(("name", "value"), [("noise", 0.5), ("bits", 6), ("drop", 0.5)])
def test_what_survives_a_defence(visit: Visit, name: str, value: float) -> None:
    page = visit.open()
    page.locator("#run").click()
    expect(page.locator("#result")).to_be_visible()
    slide(page, name, value)  # runs again, with the vector that is there
    expect(page.locator("#changed-note")).to_contain_text(re.compile(r"cosine 0\.\d{3} to the true vector"))
    expect(page.locator("#result dt").first).to_have_text("cosine to what was stored")
    plain, changed = (np.asarray(body["vector"]) for body in visit.sent("/api/stream"))
    if name == "drop":
        assert (changed == 0).sum() == SIZE // 2
    if name == "bits":
        assert len(np.unique(np.abs(changed.round(9)))) <= 2**2
    assert not np.allclose(plain, changed)
    assert len(visit.sent("/api/encode")) == 1
    page.get_by_role("button", name="No defence").click()
    expect(page.locator("#changed")).to_be_hidden()


# --- what one takes along -------------------------------------------------------------------------


def test_links_carry_the_settings(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("combobox", name="Strategy").select_option("sequential")
    slide(page, "steps", 3)
    slide(page, "noise", 0.25)
    assert urlsplit(page.url).fragment == "strategy=sequential&steps=3&noise=0.25"
    page.locator("#text").fill("Rain & <b>sun</i>")
    page.locator("#share-panel summary").click()
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#copied")).to_contain_text("copied")
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    # A link with a sentence plays at once; and what it holds is text, whatever it looks like.
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator("#pair p").first).to_have_text("Rain & <b>sun</i>")
    expect(page.get_by_role("combobox", name="Strategy")).to_have_value("sequential")
    expect(page.locator("#changed")).to_be_visible()
    visit.requests = [r for r in visit.requests if r.url != "about:blank"]


def test_copies_for_programs(visit: Visit, served: Served) -> None:
    page = visit.open()
    page.locator("#run").click()
    expect(page.locator("#result")).to_be_visible()
    page.locator("#share-panel summary").click()
    page.get_by_role("button", name="Copy as Python").click()
    snippet = page.get_by_label("What was copied")
    expect(snippet).to_have_value(re.compile("inverter.reconstruct"))
    compile(snippet.input_value(), "snippet", "exec")
    assert json.dumps(SAMPLE) in snippet.input_value()
    page.get_by_role("button", name="Copy as curl").click()
    expect(snippet).to_have_value(re.compile(rf"curl -N {served.url}/api/stream"))
    body = json.loads(re.search(r"-d '(.*)'", snippet.input_value())[1])  # type: ignore[index]
    assert (len(body["vector"]), body["seed"]) == (SIZE, 1)
    page.get_by_role("button", name="Copy vector").click()
    expect(snippet).to_have_value(re.compile(r"^\[-?\d"))


def test_dark_and_light(browser: Browser, served: Served) -> None:
    with visiting(browser, served, color_scheme="dark") as visit:
        page = visit.open()
        dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        page.get_by_role("button", name="Switch between dark and light").click()
        light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (dark, light) == ("rgb(18, 20, 23)", "rgb(247, 245, 240)")
        visit.check()


def test_everything_has_a_name(visit: Visit) -> None:
    page = visit.open()
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button")]
            .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim()))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    snapshot = page.locator("aside").aria_snapshot()
    for name in ("Passes", "Guidance", "Temperature", "Noise", "Rounding", "Numbers dropped"):
        assert f'slider "{name}' in snapshot
    assert page.locator("h1").count() == 1


def test_phone_size(browser: Browser, served: Served) -> None:
    with visiting(browser, served, viewport={"width": 375, "height": 700}, has_touch=True) as visit:
        page = visit.open()
        page.get_by_role("button", name="Throw it away").tap()
        expect(page.locator("#result")).to_be_visible()
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        expect(page.locator("#boards")).to_be_in_viewport()
        visit.check()


# --- when something breaks ------------------------------------------------------------------------


def test_a_server_that_dies_on_the_way(browser: Browser) -> None:
    with serving() as served:
        with visiting(browser, served) as visit:
            page = visit.open()
            served.gate.close_after = 2
            page.locator("#run").click()
            expect(page.locator("#progress")).to_have_text("step 2 of 12")
            served.stop()
            alert = page.get_by_role("alert")
            expect(alert).to_contain_text("The connection to the server broke off")
            assert page.locator(".tokens .word").count() > 0  # what had come is still there
            expect(page.locator("#result")).to_be_hidden()
            page.locator("#run").click()
            expect(alert).to_contain_text("The server cannot be reached")
            # The browser itself notes requests that failed; the page adds nothing.
            assert all("net::ERR" in error for error in visit.errors)


def test_a_run_can_be_stopped(visit: Visit, served: Served) -> None:
    page = visit.open()
    served.gate.close_after = 2
    page.locator("#run").click()
    expect(page.locator("#progress")).to_have_text("step 2 of 12")
    page.keyboard.press("Escape")
    expect(page.locator("#run")).to_have_text("Throw it away and recover it")
    served.gate.close_after = None
    served.gate.open.set()
    page.locator("#run").click()  # again, with the sentence it still compares with
    expect(page.locator("#result")).to_be_visible()


def test_a_token(browser: Browser) -> None:
    with serving(token="sesame") as served:
        with visiting(browser, served) as visit:
            page = visit.page
            page.goto(served.url)
            expect(page.get_by_role("alert")).to_contain_text("asks for a token")
            page.get_by_label("This server asks for a token").fill("sesame")
            page.get_by_role("button", name="Use it").click()
            expect(page.locator("#model")).not_to_be_empty()
            page.locator("#run").click()
            expect(page.locator("#result")).to_be_visible()
            assert "sesame" not in page.url


def test_without_an_encoder(browser: Browser) -> None:
    with serving(encoder=None) as served:
        with visiting(browser, served) as visit:
            page = visit.open()
            expect(page.get_by_role("radio", name="I have a text")).to_be_disabled()
            page.locator("#pasted").fill(json.dumps([0.5] * SIZE))
            page.locator("#run").click()
            expect(page.locator("#result")).to_be_visible()
            visit.check()


def test_the_list_of_the_interface(visit: Visit) -> None:
    visit.page.goto(f"{visit.url}/docs")
    expect(visit.page.locator("h2")).to_contain_text(["POST /api/invert", "POST /api/stream"])
    assert visit.page.locator("pre").count() > 10
