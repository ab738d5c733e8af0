"""Texts a second, and how far one pass is from the least time its arithmetic can take.

    python benchmarks/throughput.py --out benchmarks/results/throughput-h200.json
    python benchmarks/throughput.py --devices cpu --threads 2 --out benchmarks/results/throughput-cpu.json

Each way of running the same model is timed by turns with the others and with the plain loop of
`speed.py`; figures are medians. Weights are random, so no text ends early. The floor of a pass is its
multiplications at the rate that a large product of matrices reaches in the same numbers and the same
run, or the time to read its weights once, whichever is more. On a GPU one decoding of each way runs
with waits forbidden; what it says then is kept under `waits`, null if nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from speed import plain_confidence
from torch import Tensor

from unembed.backbone import build
from unembed.config import Config, ModelConfig, preset
from unembed.decode import DecodeOptions, decode, draw_uniforms
from unembed.engine import HalfModel, Int8Model, RecordedModel
from unembed.trunk import Trunk

Work = Callable[[], Any]


def pass_flops(m: ModelConfig) -> dict[str, int]:
    """Multiplications and additions of one pass, by row: the trunk, and the head at every place."""
    D, T, L = m.hidden, m.max_tokens, m.layers
    rank = m.adaln_rank
    blocks = L * T * 2 * (4 * D * D + 2 * D * m.ffn)
    attention = L * 4 * T * T * D
    projection = 2 * (m.embedding_size * D + D * D)
    modulation = sum(2 * (D * rank + rank * n * D if rank else D * n * D) for n in [6] * L + [2])
    return {"trunk": blocks + attention + projection + modulation, "head": 2 * T * D * m.vocab_size}


def median_times(ways: dict[str, Work], *, device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each way, by turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def peaks(device: torch.device) -> dict[str, float]:
    """Operations a second of a large product in each kind of number, and bytes read a second."""
    cuda = device.type == "cuda"
    n = 8192 if cuda else 1024
    a = torch.randn(n, n, device=device)
    half, whole = a.bfloat16(), a.mul(10).clamp(-127, 127).to(torch.int8)
    ways: dict[str, Work] = {"bf16": lambda: half @ half.T, "fp32": lambda: a @ a.T}
    if not cuda:
        ways["int8"] = lambda: torch._int_mm(whole, whole.T)
    block = torch.empty((2**31 if cuda else 2**28) // 4, device=device).fill_(1.0)
    ways["read"] = lambda: block.sum()
    for work in ways.values():
        work()
    found = median_times(ways, device=device, repeats=10 if cuda else 5)
    rates = {name: 2 * n**3 / value for name, value in found.items() if name != "read"}
    return {**rates, "read": block.nbytes / found["read"]}


def ways_of(model: Any, device: torch.device, *, compiled: bool) -> dict[str, tuple[Any, str]]:
    """Ways to run a model, each with the numbers it multiplies."""
    if device.type != "cuda":
        half, whole = HalfModel(model), Int8Model(model)
        return {"fp32": (model, "fp32"), "bf16": (half, "bf16"), "int8": (whole, "int8")}
    half = HalfModel(model)
    ways: dict[str, tuple[Any, str]] = {
        "autocast": (model, "bf16"),
        "bf16": (half, "bf16"),
        "bf16 recorded": (RecordedModel(half, record_after=0), "bf16"),
    }
    if compiled:
        ways["bf16 compiled"] = (RecordedModel(half, record_after=0, compile=True), "bf16")
    return ways


def forbid_waits(work: Work) -> str | None:
    """Run with waits forbidden; say what waited, if anything did."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@dataclass(frozen=True)
class Job:
    """The same vectors for every way."""

    config: Config
    steps: int
    e: Tensor
    uniforms: Tensor
    blank: Tensor  # (B, T), all masked
    t: Tensor

    @staticmethod
    def of(config: Config, *, batch: int, steps: int, device: torch.device) -> Job:
        """Draw random vectors."""
        m = config.model
        e = F.normalize(torch.randn(batch, m.embedding_size, device=device), dim=-1)
        uniforms = draw_uniforms(0, batch, steps=steps, length=m.max_tokens, seed=0).to(device)
        blank = torch.full((batch, m.max_tokens), m.mask_id, device=device)
        return Job(config, steps, e, uniforms, blank, torch.ones(batch, device=device))

    def texts(self, way: Any, *, autocast: bool) -> Tensor:
        """Decode to the end."""
        options = DecodeOptions(steps=self.steps)
        with torch.autocast(self.e.device.type, torch.bfloat16, enabled=autocast):
            for draft in decode(
                way, self.e, options=options, diffusion=self.config.diffusion, uniforms=self.uniforms
            ):
                last = draft.ids
        return last

    @torch.inference_mode()
    def one_pass(self, way: Any, *, autocast: bool) -> Tensor:
        """Run the model once, with logits at every place."""
        with torch.autocast(self.e.device.type, torch.bfloat16, enabled=autocast):
            (h,) = Trunk.of(way, self.e, guidance=1.0).hidden(self.blank, self.t)
            return way.head(h)

    def plain(self, model: Any) -> Tensor:
        """Decode by the plain loop."""
        with torch.autocast(self.e.device.type, torch.bfloat16, enabled=self.e.is_cuda):
            return plain_confidence(model, self.e, steps=self.steps)


def try_out(
    job: Job, way: Any, *, autocast: bool, first: Tensor | None
) -> tuple[Tensor | None, dict[str, Any]]:
    """Run a way once and say how it went: its tokens, or None if it failed, and what is to be kept of it."""
    device, start = job.e.device, time.perf_counter()
    try:
        ids = job.texts(way, autocast=autocast)
        wait(device)
        row: dict[str, Any] = {"first_seconds": time.perf_counter() - start}
        row["tokens_as_in_first_way"] = float((ids == (ids if first is None else first)).float().mean())
        job.one_pass(way, autocast=autocast)
        if device.type == "cuda":
            row["waits"] = forbid_waits(lambda: job.texts(way, autocast=autocast))
    except (RuntimeError, NotImplementedError) as error:
        return None, {"error": str(error).splitlines()[0]}
    return ids, row


def measure(job: Job, *, repeats: int, compiled: bool, plain: bool) -> dict[str, Any]:
    """Time every way with the same random weights."""
    device, batch = job.e.device, len(job.e)
    torch.manual_seed(0)
    model = build(job.config.model, pretrained=False).to(device).eval().requires_grad_(False)
    rows: dict[str, dict[str, Any]] = {}
    decoding: dict[str, Work] = {}
    passing: dict[str, Work] = {}
    first: Tensor | None = None
    for name, (way, numbers) in ways_of(model, device, compiled=compiled).items():
        autocast = name == "autocast"
        ids, row = try_out(job, way, autocast=autocast, first=first)
        rows[name] = {"numbers": numbers, **row}
        if ids is not None:
            first = ids if first is None else first
            decoding[name] = partial(job.texts, way, autocast=autocast)
            passing[name] = partial(job.one_pass, way, autocast=autocast)
    if plain:
        job.plain(model)
        decoding["plain"] = partial(job.plain, model)
        rows["plain"] = {"numbers": "bf16" if device.type == "cuda" else "fp32"}
    seconds = median_times(decoding, device=device, repeats=repeats)
    for name, value in seconds.items():
        rows[name] |= {"texts_per_second": batch / value, "milliseconds": 1e3 * value}
        if plain:
            rows[name]["times_plain"] = seconds["plain"] / value
    return {
        "rows": rows,
        "passes": median_times(passing, device=device, repeats=repeats),
        "flops": batch * sum(pass_flops(job.config.model).values()),
        "weights": sum(p.numel() for p in model.parameters()),
    }


def with_floors(found: dict[str, Any], peak: dict[str, float]) -> dict[str, Any]:
    """Set the time of one pass beside the least it can take."""
    size = {"fp32": 4, "bf16": 2, "int8": 1}
    for name, seconds in found["passes"].items():
        row = found["rows"][name]
        arithmetic = found["flops"] / peak[row["numbers"]]
        reading = found["weights"] * size[row["numbers"]] / peak["read"]
        row["pass"] = {
            "milliseconds": 1e3 * seconds,
            "arithmetic_floor_milliseconds": 1e3 * arithmetic,
            "reading_floor_milliseconds": 1e3 * reading,
            "times_arithmetic_floor": seconds / arithmetic,
            "times_higher_floor": seconds / max(arithmetic, reading),
        }
    return found["rows"]


def processor() -> str:
    """Name the CPU, where the system tells."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor()


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--devices", nargs="+", help="cuda if there is one, else cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=8, help="passes a text")
    parser.add_argument("--repeats", type=int, help="20 on a GPU, 3 on a CPU")
    parser.add_argument("--threads", type=int, help="of the CPU; torch's own choice if left out")
    parser.add_argument("--compile", action="store_true", help="also fuse the trunk (some 30 s more a batch)")
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain loop")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    config, begin = preset(args.preset), time.perf_counter()
    m = config.model
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": {"name": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "numpy": np.__version__,
        },
        "preset": args.preset,
        "steps": args.steps,
        "tokens": m.max_tokens,
        "flops_of_a_pass_by_row": pass_flops(m),
        "devices": {},
    }  # fmt: skip
    for kind in args.devices or ["cuda" if torch.cuda.is_available() else "cpu"]:
        device = torch.device(kind)
        peak = peaks(device)
        batches = {
            str(batch): with_floors(
                measure(
                    Job.of(config, batch=batch, steps=args.steps, device=device),
                    repeats=args.repeats or (20 if kind == "cuda" else 3),
                    compiled=args.compile,
                    plain=not args.no_plain,
                ),
                peak,
            )
            for batch in args.batches
        }
        result["devices"][kind] = {"operations_per_second": peak, "batches": batches}
    result["seconds_in_all"] = time.perf_counter() - begin
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
