"""Where records come from: the header that a file of them opens with.

Knows what a run is set to, its weights, the packages and the machine. Must not know how texts are
recovered or measured.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unembed import __version__
from unembed.inverter import Inverter
from unembed.records import FORMAT, Method
from unembed.suites import Suite

if TYPE_CHECKING:
    from unembed.corpus import PreparedData
    from unembed.encoders import Encoder

PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "numpy", "sacrebleu")


def describe(
    suites: Sequence[Suite],
    inverter: Inverter,
    encoder: Encoder,
    methods: Sequence[Method],
    seed: int,
    batch_size: int,
    data: PreparedData | None,
    data_limit: int | None,
    model_name: str,
) -> dict[str, Any]:
    """Write the header of a run: all that decides its results, and where it ran."""
    guessed = any((method.search or {}).get("refine") == "distilled" for method in methods)
    distilled = weights_digest(inverter.distilled().model) if guessed else None
    nearest_from = None
    if data is not None:
        nearest_from = {
            "name": Path(data.path).name,
            "sha256": hashlib.sha256(str(data.manifest["shards"]).encode()).hexdigest(),
            "limit": data_limit,
        }
    return {
        "format": FORMAT,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {
            "model": model_name or inverter.encoder_name,
            "weights": weights_digest(inverter.model),
            "encoder": encoder.name,
            "distilled": distilled,
            "max_tokens": inverter.max_tokens,
            "methods": [asdict(method) for method in methods],
            "suites": [
                {
                    "name": suite.name,
                    "texts": len(suite.samples),
                    "languages": suite.languages,
                    "sha256": suite.digest,
                }
                for suite in suites
            ],
            "seed": seed,
            "batch_size": batch_size,
            "nearest_from": nearest_from,
        },
        "versions": {"unembed": __version__, "python": platform.python_version(), **_versions()},
        "hardware": {
            "device": torch.cuda.get_device_name(inverter.device)
            if inverter.device.type == "cuda"
            else "cpu",
            "precision": inverter.numbers,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def weights_digest(model: torch.nn.Module) -> str:
    """A hash of all weights with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    """Versions of the packages that may change a figure; None where one is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
