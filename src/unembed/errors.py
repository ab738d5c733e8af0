"""What can go wrong at the user's hands, and how it is said.

Knows nothing of the rest of the package; everything else may import it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import inf
from numbers import Integral, Real
from typing import Any


class UnembedError(ValueError):
    """A mistake in the input: one sentence that says what, what was expected, what to do.

    The command line prints the sentence and exits with code 2; a traceback means a bug.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnembedError:
    """Build the error for a name that is not in a registry, with the nearest names.

    >>> print(unknown_name("strategy", "confidense", ["confidence", "euler"]))
    unknown strategy 'confidense'; did you mean 'confidence'? Known: confidence, euler.
    """
    known = list(known)
    wanted, spelt = name.lower(), {each.lower(): each for each in known}
    near = difflib.get_close_matches(wanted, spelt, n=3, cutoff=0.4)
    # A part of a long name is far from it by spelling and yet what was meant.
    near += [each for each in spelt if each not in near and wanted and (wanted in each or each in wanted)]
    hint = f"; did you mean {' or '.join(repr(spelt[each]) for each in near[:3])}?" if near else "."
    return UnembedError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}.")


def check_number(
    name: str, value: Any, expected: str, *, low: float = -inf, high: float = inf, whole: bool = False
) -> None:
    """Refuse a value that is no number, Python's or numpy's, from low to high.

    >>> check_number("steps", "8", "a whole number", whole=True)
    Traceback (most recent call last):
    unembed.errors.UnembedError: steps must be a whole number, not '8'.
    """
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not (is_number and -inf < value < inf and low <= value <= high):
        raise UnembedError(f"{name} must be {expected}, not {value!r}.")


def check_seed(seed: Any) -> None:
    """Refuse what numpy's counter-based generator takes for no key."""
    check_number("seed", seed, "0 or more, a whole number below 2**128", low=0, high=2**128 - 1, whole=True)


def check_batch_size(size: Any) -> None:
    """Refuse a batch of nothing."""
    check_number("batch_size", size, "at least 1", low=1, whole=True)


def first_line(error: BaseException) -> str:
    r"""The first line of what a library said, to be quoted in a sentence; its type if it said nothing.

    >>> first_line(OSError("no route to host.\nTry again."))
    'no route to host'
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .;:")[:200] if lines else type(error).__name__
