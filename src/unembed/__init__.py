"""unembed recovers text from its embedding by masked diffusion.

Public names load on first use, so importing `unembed` imports no torch.

>>> import unembed
>>> unembed.preset("tiny").model.layers
3
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unembed.compat import invert_embeddings, invert_strings
    from unembed.config import PRESETS, Config, preset
    from unembed.encoders import load_encoder
    from unembed.errors import UnembedError
    from unembed.evaluate import evaluate
    from unembed.inverter import Inverter
    from unembed.results import Inversion, Step
    from unembed.strategies import STRATEGIES
    from unembed.train import train

__version__ = "0.1.0"

# Torch's threads spin while they wait; on cores that others use, too, that makes a decoding forty times as
# long (docs/log.md). Read when torch is loaded, so it helps those who import unembed first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "PRESETS",
    "STRATEGIES",
    "Config",
    "Inversion",
    "Inverter",
    "Step",
    "UnembedError",
    "evaluate",
    "invert_embeddings",
    "invert_strings",
    "load_encoder",
    "preset",
    "train",
]

# Where each public name lives.
_HOMES = {
    "PRESETS": "config",
    "STRATEGIES": "strategies",
    "Config": "config",
    "Inversion": "results",
    "Inverter": "inverter",
    "Step": "results",
    "UnembedError": "errors",
    "evaluate": "evaluate",
    "invert_embeddings": "compat",
    "invert_strings": "compat",
    "load_encoder": "encoders",
    "preset": "config",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which `train` and `evaluate` are functions and never the modules they live in."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse the module that the import system binds over a public name of the same spelling."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
