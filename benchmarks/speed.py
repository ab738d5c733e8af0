"""How fast training and inversion are, beside the plainest implementation, in the same run.

    python benchmarks/speed.py --presets tiny small --out benchmarks/results/speed-cpu.json

Plain means: logits at every position, no compilation, every text in the batch to the end. Weights
are random; only time is measured. Each figure is the median of several rounds, the two ways by turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.checkpoint import find_checkpoint
from unembed.config import Config, preset
from unembed.engine import Numbers
from unembed.inverter import Inverter
from unembed.pairs import Batch
from unembed.run import Group, Run
from unembed.step import masked_loss, train_step
from unembed.tokens import TextTokenizer


class RandomPairs:
    """Random ids and vectors, made once: the data costs nothing here."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Draw one batch."""
        m, B = config.model, config.train.batch_size
        self.ids = torch.randint(1000, m.vocab_size - 2, (B, m.max_tokens), device=device)
        self.vectors = F.normalize(torch.randn(B, m.embedding_size, device=device), dim=-1)

    def batch(self, step: int, rows: slice) -> Batch:
        """Give the same batch at every step."""
        return self.ids[rows], self.vectors[rows]

    def validation(self) -> Batch:
        """Give the batch once more."""
        return self.ids, self.vectors


def plain_loss(
    model: nn.Module,
    x0: Tensor,
    e: Tensor,
    t: Tensor,
    masked: Tensor,
    drop: Tensor,
    *,
    config: Config,
    count: int,
) -> Tensor:
    """The loss as first written down: logits everywhere, then a mask."""
    logits = model(x0.masked_fill(masked, config.model.mask_id), e, t=t, drop=drop)
    entropy = F.cross_entropy(logits.float().flatten(0, 1), x0.flatten(), reduction="none")
    return (entropy * masked.flatten()).sum()


@torch.inference_mode()
def plain_confidence(model: Any, e: Tensor, *, steps: int) -> Tensor:
    """MaskGIT as first written down: logits everywhere, every row to the last step."""
    m = model.config
    ids = torch.full((len(e), m.max_tokens), m.mask_id, device=e.device)
    for step in range(steps):
        masked = ids == m.mask_id
        sure, tokens = model(ids, e, t=masked.float().mean(1)).float().softmax(-1).max(-1)
        keep = round((step + 1) * m.max_tokens / steps) - round(step * m.max_tokens / steps)
        best = sure.masked_fill(~masked, -1).topk(keep, dim=1).indices
        ids = ids.scatter(1, best, tokens.gather(1, best))
    return ids


def rounds(ways: dict[str, Callable[[], Any]], *, device: torch.device, seconds: float) -> dict[str, float]:
    """Median seconds of each way, timed by turns until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()  # warm up
    stop = time.perf_counter() + seconds * len(ways)
    while time.perf_counter() < stop or min(map(len, times.values())) < 3:
        for name, work in ways.items():
            _wait(device)
            start = time.perf_counter()
            work()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def training(config: Config, *, device: torch.device, seconds: float, lock: Any) -> dict[str, float]:
    """Passages a second in training, as shipped and plain."""
    pairs = RandomPairs(config, device)
    shipped, plain = (Run(config, group=Group(0, 1, device)) for _ in range(2))
    compiled = torch.compile(masked_loss) if config.train.compile else masked_loss
    ways = {
        "shipped": lambda: train_step(shipped, pairs, compiled),
        "plain": lambda: train_step(plain, pairs, plain_loss),
    }
    ways["shipped"]()
    with turn(lock):
        found = rounds(ways, device=device, seconds=seconds)
    return {name: config.train.batch_size / value for name, value in found.items()}


def inversion(
    config: Config, *, batch: int, numbers: Numbers, device: torch.device, seconds: float, lock: Any
) -> dict[str, float]:
    """Texts a second in 8 passes, as shipped and plain."""
    model: Any = Run(config, group=Group(0, 1, device)).average
    tokenizer = TextTokenizer.load(find_checkpoint("all-MiniLM-L6-v2"))
    inverter = Inverter(model, config=config, tokenizer=tokenizer, precision=numbers)
    e = F.normalize(torch.randn(batch, config.model.embedding_size, device=device), dim=-1)

    def shipped() -> None:
        inverter.invert(e, strategy="confidence", steps=8, batch_size=batch)

    def plain() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            plain_confidence(model, e, steps=8)

    for _ in range(3):  # on a GPU a shape is recorded when it keeps coming
        shipped()
    with turn(lock):
        found = rounds({"shipped": shipped, "plain": plain}, device=device, seconds=seconds)
    return {name: batch / value for name, value in found.items()}


class turn:  # noqa: N801 - reads as a word: with turn(lock)
    """Hold a lock file, so that several of these processes never time at once."""

    def __init__(self, path: Path) -> None:
        """Open the file."""
        self.file = path.open("w")

    def __enter__(self) -> None:
        """Wait for the turn."""
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        """Give it up."""
        self.file.close()


def main() -> None:
    """Measure the presets and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    parser.add_argument("--batch-size", type=int, help="training batch; the preset's own if left out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="inversion batches")
    parser.add_argument("--numbers", choices=get_args(Numbers), help="of inversion; bf16 on a GPU, else fp32")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    parser.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    numbers: Numbers = args.numbers or ("bf16" if cuda else "fp32")
    hardware = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
    result: dict[str, Any] = {
        "hardware": hardware,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "inversion_numbers": numbers,
    }
    result["presets"] = {}
    for name in args.presets:
        # The plain loss knows of masks only, and random text is not reworded.
        config = preset(name).override(causal_share=0.0, embed_share=0.0, reword_share=0.0)
        chosen: dict[str, Any] = {"batch_size": args.batch_size or config.train.batch_size, "compile": cuda}
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, **chosen))
        row: dict[str, Any] = {"training_batch": config.train.batch_size}
        row["training_passages_per_second"] = training(
            config, device=device, seconds=args.seconds, lock=args.lock
        )
        row["inversion_texts_per_second"] = {
            str(b): inversion(
                config, batch=b, numbers=numbers, device=device, seconds=args.seconds, lock=args.lock
            )
            for b in args.batches
        }
        for figures in (row["training_passages_per_second"], *row["inversion_texts_per_second"].values()):
            figures["ratio"] = figures["shipped"] / figures["plain"]
        result["presets"][name] = row
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
