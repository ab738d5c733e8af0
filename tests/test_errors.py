"""errors: the nearest names are offered, however they are spelt."""

from __future__ import annotations

import pytest

from unembed.errors import first_line, unknown_name

NAMES = ["all-MiniLM-L6-v2", "jina-embeddings-v3", "qwen3-embedding-0.6b", "embeddinggemma-300m"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("minilm-l6", "all-MiniLM-L6-v2"),
        ("ALL-MINILM-L6-V2", "all-MiniLM-L6-v2"),
        ("jina", "jina-embeddings-v3"),
        ("qwen3", "qwen3-embedding-0.6b"),
        ("gemma", "embeddinggemma-300m"),
    ],
)
def test_nearest_name(name: str, nearest: str) -> None:
    assert f"unknown encoder {name!r}; did you mean {nearest!r}?" in str(unknown_name("encoder", name, NAMES))


@pytest.mark.parametrize("name", ["", "bge", "xyzzy"])
def test_nothing_near(name: str) -> None:
    assert (
        str(unknown_name("encoder", name, NAMES)) == f"unknown encoder {name!r}. Known: {', '.join(NAMES)}."
    )


def test_first_line() -> None:
    assert first_line(ValueError("\n one; \n two")) == "one"
    assert first_line(TimeoutError()) == "TimeoutError"
