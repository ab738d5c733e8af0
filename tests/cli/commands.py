"""What tests of the command line share: texts, how a command is run and what it said."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

SIZE = 384
TEXTS = [
    "The kettle clicked off just as the rain began.",
    "We left the umbrella on the bus.",
    "Could you pick up two lemons on your way home?",
    "The bakery sells out of rye bread before nine.",
    "My neighbour's cat has decided to move in.",
    "Nobody has seen the blue folder since Monday.",
    "The lift stops between the third and fourth floor.",
    "Her brother repairs clocks in a tiny workshop.",
]
LONG = "word " * 60
SMALL = "--layers 1 --hidden 32 --heads 2 --ffn 64 --batch-size 4 --adaln-rank 0".split()


class Result:
    """How a command ended and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one line of stderr of a command that refused."""
        assert self.code == 2, self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("unembed: ")
        assert "Traceback" not in self.err
        return lines[0]


Run = Callable[..., Result]


def feed(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Put bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def full_disk(*args: object, **kwargs: object) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")
