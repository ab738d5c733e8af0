# One command each: `make demo` from a fresh clone needs only Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup browser test lint demo serve clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with pinned dependencies

# torch comes first and alone: it is the one pin that decides which builds of the rest fit.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "unembed needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV); the first time takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

browser:  ## install Chromium for the tests of the page, where apt is at hand
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null \
		|| { apt-get update && apt-get install -y --no-install-recommends chromium; } \
		|| echo "no Chromium and no apt: the tests of the page will be skipped" >&2

test: setup browser  ## run all tests
	$(BIN)/python -m pytest

lint: setup  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: setup  ## recover sentences from their vectors alone
	$(BIN)/python -m unembed.demo

serve: setup  ## show it on a page, http://127.0.0.1:8000
	$(BIN)/unembed serve --open

clean:  ## remove the environment and caches
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
