"""A trained inverter as a folder: settings, safetensors, tokenizer, model card.

Files are written whole or not at all, and nothing that could run code is ever read. It must not
know of training or decoding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unembed.config import Config
from unembed.errors import UnembedError, unknown_name
from unembed.tokens import TextTokenizer
from unembed.whole import whole_folder

CONFIG, FACTS, CARD = "config.json", "facts.json", "README.md"
SHARD_BYTES = 16 * 2**20
HEADER_BYTES = 2**16  # kept free in each shard for the names of its tensors
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds; `facts` is what the card says of data, minutes and figures."""

    config: Config
    weights: dict[str, Tensor]
    tokenizer: TextTokenizer
    facts: dict[str, Any] = field(default_factory=dict)
    int8: bool = False  # whether the folder's weights are bytes; those here are dequantised


def bundled_models() -> dict[str, Path]:
    """Name the models that come with the package."""
    return {p.name: p for p in sorted(bundled_folder().glob("*")) if (p / CONFIG).is_file()}


def bundled_folder() -> Path:
    """Return the folder of what comes with the package."""
    return Path(str(resources.files("unembed"))) / "models"


def find_checkpoint(name: str | Path) -> Path:
    """Turn the name of a bundled model, a path or a hub id into a folder on disk."""
    bundled = bundled_models()
    if str(name) in bundled:
        return bundled[str(name)]
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise UnembedError(f"{path} is a file; expected the folder of an inverter that unembed saved.")
    if str(name).count("/") == 1 and not str(name).startswith((".", "/", "~")):
        return _download(str(name))
    raise unknown_name("model", str(name), bundled or ["a folder written by unembed train"])


def _download(repo: str) -> Path:
    """Fetch a model from the hub: safetensors and JSON only."""
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", CARD]
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except ImportError as error:
        raise UnembedError(
            f"there is no folder {repo!r}, and the hub needs: pip install 'unembed[hub]'."
        ) from error
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise UnembedError(f"there is no folder {repo!r}, and the hub did not give it ({cause}).") from error


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, int8: bool = False) -> None:
    """Write a checkpoint; int8 stores matrices in one byte a weight and one scale a row."""
    foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file()
    if folder.is_file() or foreign:  # writing takes the place of what is there: other things must not be lost
        raise UnembedError(f"{folder} exists and is not an unembed model; choose a new or empty folder.")
    weights = quantise(checkpoint.weights) if int8 else checkpoint.weights
    with whole_folder(folder) as draft:
        (draft / CONFIG).write_text(checkpoint.config.to_json(), encoding="utf-8")
        (draft / FACTS).write_text(json.dumps(checkpoint.facts, indent=2) + "\n", encoding="utf-8")
        (draft / CARD).write_text(model_card(checkpoint, int8=int8), encoding="utf-8")
        checkpoint.tokenizer.save(draft)
        write_weights(draft, weights)


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write weights into a folder, in numbered shards."""
    shards = list(_shards(weights))
    for number, shard in enumerate(shards, 1):
        save_file(shard, folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors")


def _shards(weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Group tensors into shards of bounded size; a tensor that is larger is cut into row blocks."""
    shard: dict[str, Tensor] = {}
    size, room = 0, SHARD_BYTES - HEADER_BYTES
    for name, tensor in weights.items():
        tensor = tensor.detach().cpu().contiguous()
        parts = [tensor]
        if tensor.nbytes > room:
            rows = max(1, room * len(tensor) // tensor.nbytes)
            # Each block is a copy: safetensors refuses views that share memory.
            parts = [part.clone() for part in tensor.split(rows)]
        for i, part in enumerate(parts):
            if shard and size + part.nbytes > room:
                yield shard
                shard, size = {}, 0
            shard[name if len(parts) == 1 else f"{name}@{i:03d}"] = part
            size += part.nbytes
    yield shard


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder that `save_checkpoint` wrote, checking that it is one."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UnembedError(f"{folder} is not an unembed model: it has no {CONFIG}.")
    try:
        config = Config.from_json((folder / CONFIG).read_text(encoding="utf-8"))
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8")) if (folder / FACTS).is_file() else {}
    except ValueError as error:
        raise UnembedError(f"{folder} was not written by unembed: {str(error).rstrip('.')}.") from error
    raw = _read_shards(folder)
    int8 = any(tensor.dtype == torch.int8 for tensor in raw.values())
    return Checkpoint(config, dequantise(_join(raw)), TextTokenizer.load(folder), facts, int8)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, numbers with a point as float32."""
    return dequantise(_join(_read_shards(folder)))


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Read all shards of a folder as they are."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in folder.iterdir() if p.suffix in _PICKLES]
        found = f"only {pickles[0]}, a pickle, which unembed never loads" if pickles else "no weights"
        raise UnembedError(f"{folder} holds {found}; expected .safetensors files.")
    raw: dict[str, Tensor] = {}
    for file in files:
        if not os.access(file, os.R_OK):  # of which safetensors says that there is no such file
            raise UnembedError(f"cannot read {file}: permission denied; change its permissions.")
        try:
            with safe_open(file, framework="pt") as shard:
                raw.update({name: shard.get_tensor(name) for name in shard.keys()})
        except (SafetensorError, OSError) as error:
            raise UnembedError(f"{file} is damaged ({error}); fetch or save the model again.") from error
    total = files[0].stem.rpartition("-of-")[2]
    if total.isdecimal() and int(total) != len(files):
        raise UnembedError(f"{folder} has {len(files)} of {int(total)} weight files; fetch the missing ones.")
    return raw


def _join(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put row blocks of large tensors together again."""
    blocks: dict[str, list[str]] = {}
    for name in sorted(raw):
        blocks.setdefault(name.partition("@")[0], []).append(name)
    return {name: torch.cat([raw[p] for p in parts]) if "@" in parts[0] else raw[name]
            for name, parts in blocks.items()}  # fmt: skip


def quantise(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store each matrix as int8 with one float32 scale a row (symmetric); the rest as it is.

    >>> q = quantise({"w": torch.tensor([[1.0, -0.5], [0.0, 0.0]])})
    >>> q["w"].tolist(), round(dequantise(q)["w"][0, 0].item(), 4)
    ([[127, -64], [0, 0]], 1.0)
    """
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            out[name] = tensor
            continue
        scale = _short(tensor.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 127)
        out[name] = (tensor.float() / scale).round().to(torch.int8)
        out[f"{name}.scale"] = scale
    return out


def _short(scale: Tensor) -> Tensor:
    """Round to 17 bits: times a byte, they fit into 24, and what was read from bytes is saved as the same."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**17).round() / 2**17, exponent)


def dequantise(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantise`; other weights pass through, integers as integers."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if (scale := weights.get(f"{name}.scale")) is not None:
            out[name] = tensor.float() * scale
        elif not (name.endswith(".scale") and name.removesuffix(".scale") in weights):
            out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out


def load_into(model: torch.nn.Module, weights: dict[str, Tensor], *, source: str) -> None:
    """Copy weights into a model of the same shape; anything else is a foreign checkpoint."""
    own = model.state_dict()
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or surplus:
        odd = f"lacks {missing[0]}" if missing else f"has {surplus[0]}, which the model has not"
        raise UnembedError(f"the weights in {source} are not of this model: the file {odd}.")
    for name, tensor in own.items():
        given = weights[name]
        if tensor.shape != given.shape or tensor.is_floating_point() != given.is_floating_point():
            raise UnembedError(
                f"the weights in {source} are not of this model: {name} is {given.dtype} of "
                f"{tuple(given.shape)}, expected {tensor.dtype} of {tuple(tensor.shape)}."
            )
    model.load_state_dict(weights, assign=next(iter(own.values())).is_meta)


def model_card(checkpoint: Checkpoint, *, int8: bool = False) -> str:
    """Write the card: what the model is, what it was trained on, its figures, limits and use."""
    config, facts = checkpoint.config, checkpoint.facts
    m, d = config.model, config.diffusion
    count = sum(t.numel() for t in checkpoint.weights.values())
    lines = [
        "---", "license: apache-2.0", "library_name: unembed", "tags: [embedding-inversion]", "---", "",
        f"# unembed inverter for {config.encoder}", "",
        f"Turns vectors of `{config.encoder}` ({m.embedding_size} numbers) back into text of up to "
        f"{m.max_tokens} tokens, by conditional masked diffusion.", "",
        "```python", "from unembed import Inverter", "",
        'inverter = Inverter.from_pretrained("path/to/this/folder")', "inverter.invert(vectors)", "```", "",
        "## Model", "",
        f"{count / 1e6:.1f}M parameters{', int8' if int8 else ''}; {m.layers} layers x {m.hidden}; "
        f"schedule {d.schedule}, weight {d.weight}.", "",
    ]  # fmt: skip
    sections: list[tuple[str, Callable[[Any], list[str]]]] = [
        ("training", lambda rows: [f"- {name}: {value}" for name, value in rows.items()]),
        ("data", lambda rows: [f"- {row}" for row in rows]),
        ("figures", figures_table),
    ]
    for name, render in sections:
        if facts.get(name):
            lines += [f"## {name.capitalize()}", "", *render(facts[name]), ""]
    lines += [
        "## Limits", "",
        f"Vectors of `{config.encoder}` only, made from at most {m.max_tokens} tokens; longer texts come "
        "back as their beginning at best. What is recovered is a guess: check the confidence, and the "
        "cosine where the encoder is at hand.", "",
        "## Intended use", "",
        "To show and to measure what stored embeddings give away, on data you own or may audit. Not to "
        "read other people's data.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def figures_table(rows: list[dict[str, Any]]) -> list[str]:
    """Render records of equal keys as a Markdown table."""
    head = list(rows[0])
    body = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
