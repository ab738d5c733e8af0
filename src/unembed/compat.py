"""vec2text's two calls, `invert_embeddings` and `invert_strings`, for people who come from there.

Knows `Inverter` and what vec2text's arguments were called. Steps mean something else there (rounds
of correction, each with a beam search), so arguments without a meaning here are named in a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from unembed.errors import UnembedError
from unembed.inverter import DEFAULT_MODEL, Inverter
from unembed.strategies import AUTO, resolve
from unembed.vectors import Vectors

# What vec2text takes and has no counterpart in masked diffusion.
_IGNORED = ("sequence_beam_width", "max_length", "min_length", "tokenizer")


def invert_embeddings(
    embeddings: Vectors,
    inverter: Inverter | str | Path | None = None,
    num_steps: int | None = None,
    *,
    steps: int | None = None,
    **options: Any,
) -> list[str]:
    """Recover a text from each vector, as `vec2text.invert_embeddings` does.

    Args:
        embeddings: One vector or many, numpy or torch.
        inverter: What stood in the place of vec2text's corrector: an `Inverter`, a model's name
            or folder; the bundled model by default. `corrector=` is understood too.
        num_steps: vec2text's name for `steps`.
        steps: Passes through the model; as many as it has tokens by default.
        options: Those of `Inverter.invert`.
    """
    chosen = _inverter(inverter, options)
    options |= _decoding(chosen, num_steps, steps, options)
    _drop_ignored(options)
    return [found.text for found in chosen.invert(embeddings, **options)]


def invert_strings(
    strings: Sequence[str],
    inverter: Inverter | str | Path | None = None,
    num_steps: int | None = None,
    *,
    steps: int | None = None,
    **options: Any,
) -> list[str]:
    """Embed texts and recover them from the vectors alone, as `vec2text.invert_strings` does.

    The arguments are those of `invert_embeddings`; `encoder=` gives another encoder than the model's own.
    """
    chosen = _inverter(inverter, options)
    options |= _decoding(chosen, num_steps, steps, options)
    _drop_ignored(options)
    return [found.text for found in chosen.reconstruct(strings, **options)]


def _inverter(given: Inverter | str | Path | None, options: dict[str, Any]) -> Inverter:
    """Find the inverter under either of its names."""
    corrector = options.pop("corrector", None)
    if given is not None and corrector is not None:
        raise UnembedError("inverter and corrector are two names for one argument; give one of them.")
    given = corrector if given is None else given
    if given is None or isinstance(given, str | Path):
        return _load(str(given or DEFAULT_MODEL))
    if not isinstance(given, Inverter):
        raise UnembedError(
            f"expected an Inverter in the place of vec2text's corrector, not {type(given).__name__}; "
            "load one with Inverter.from_pretrained."
        )
    return given


@lru_cache(maxsize=1)
def _load(name: str) -> Inverter:
    """Load a model by name; the last one is kept, because these functions are called again and again."""
    return Inverter.from_pretrained(name)


def _decoding(
    inverter: Inverter, num_steps: int | None, steps: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Find the number of steps under either of its names, and the strategy that goes with it."""
    if num_steps is not None and steps is not None:
        raise UnembedError("steps and num_steps are two names for one argument; give one of them.")
    longest = inverter.max_tokens
    if num_steps is not None and num_steps > longest:
        # Calls written for vec2text ask for 20 or 50 rounds of correction, whatever the length.
        message = f"num_steps {num_steps} is more than the model has tokens; using {longest}."
        warnings.warn(message, stacklevel=3)
        num_steps = longest
    asked = steps if num_steps is None else num_steps
    # Here, because `auto` must not take the default of this module for a number that was asked for.
    strategy = resolve(
        options.get("strategy", AUTO),
        config=inverter.config.model,
        steps=asked,
        temperature=options.get("temperature"),
        drafts=options.get("drafts", 1),
    )
    return {"strategy": strategy.name, "steps": longest if asked is None else asked}


def _drop_ignored(options: dict[str, Any]) -> None:
    """Take out what has no meaning here, with a warning."""
    for name in _IGNORED:
        if options.pop(name, None) is not None:
            warnings.warn(f"{name} has no meaning in masked diffusion and was ignored.", stacklevel=3)
