"""The browser that tests look at pages with, if there is one: Chromium on the path."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here; make browser installs it"
)
