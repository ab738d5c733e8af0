"""Take the README's two pictures of the page: docs/images/page-light.png and page-dark.png.

    unembed serve --port 8765 &
    python recipes/page.py http://127.0.0.1:8765

Needs playwright and a Chromium on the path. The sentence is the page's sample of a password, whatever comes
back.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SAMPLE = "My password for the bank is sunflower."


def main() -> None:
    """Recover the sample in light and in dark colours, and save the whole page."""
    (url,) = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1180, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
            )
            page.goto(url)
            expect(page.locator("#model")).not_to_be_empty(timeout=60_000)
            page.locator("#samples").get_by_text(SAMPLE).click()  # which starts it
            expect(page.locator("#result")).to_be_visible(timeout=60_000)
            page.wait_for_timeout(1_000)
            page.screenshot(path=IMAGES / f"page-{scheme}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
