"""What can go wrong at the user's hands, and how it is said.

Knows nothing of the rest of the package; everything else may import it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return UnembedError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}.")
