"""Distil an encoder on one GPU: train for some minutes on passages, save in int8, measure the agreement.

    python recipes/distill.py --data DIR --texts DIR --out DIR --minutes 2 [field=value ...]

Prints one line of JSON. `--texts` holds files of held-out text, a text a line. Processes that share a
lock file take turns on the GPU: this one loads and compiles while another trains, and the minutes begin
when it has the lock. What is measured is what was saved, read back from int8.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from pathlib import Path
from typing import Any

import compare
import torch

from unembed.corpus import PreparedData
from unembed.distill import (
    DISTILLED,
    NearTexts,
    agreement,
    begin_with_tokens,
    distillation_loss,
    distillation_step,
    open_near_pairs,
    validate,
    wrap,
)
from unembed.encoders import Encoder, load_encoder
from unembed.pairs import Pairs
from unembed.run import Run
from unembed.surrogate import DistilledEncoder, Surrogate
from unembed.train import fit_to_data


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fields", nargs="*", help="settings to change, such as layers=6 batch_size=2048")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    parser.add_argument("--limit", type=int, default=300, help="texts of each file")
    return parser.parse_intermixed_args()


def train_for(run: Run, pairs: Pairs, loss_function: Any) -> list[tuple[float, float]]:
    """Train until the minutes are over; return seconds and loss on the way."""
    curve = []
    start = time.monotonic()
    while not run.finished():
        run.set_rate()
        loss = distillation_step(run, pairs, loss_function)
        run.step += 1
        if run.step % 20 == 0:  # waits for the device, so that the clock is true
            curve.append((round(time.monotonic() - start, 1), round(float(loss), 4)))
        run.seconds = time.monotonic() - start
    return curve


def measure(distilled: DistilledEncoder, target: Encoder, texts: Path, *, limit: int) -> list[dict[str, Any]]:
    """Agreement on each file of held-out text."""
    rows = []
    for path in sorted(texts.glob("*.txt")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
        figures = agreement(distilled, target, lines).figures()
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        rows.append({"text": path.stem, **rounded})
    return rows


def main() -> None:
    """Train, save, measure and print."""
    args = read_options()
    fields = dict(field.split("=", 1) for field in args.fields)
    values = {k: ast.literal_eval(v) if v[:1] in "0123456789TF-" else v for k, v in fields.items()}
    data = PreparedData.open(args.data)
    pairs_kind = "fresh" if data.kind == "passages" else "cached"
    group = compare.alone()
    device = group.device
    settings = {"minutes": args.minutes, "pairs": pairs_kind, "compile": device.type == "cuda", **values}
    config = fit_to_data(DISTILLED.override(**settings), data)
    run = Run(config, group=group, network=Surrogate)
    pairs = open_near_pairs(config, data, group)
    if isinstance(pairs, NearTexts):
        begin_with_tokens(run, pairs.encoder)
    loss_function = torch.compile(distillation_loss) if config.train.compile else distillation_loss
    compare.warm_up(run, lambda: distillation_step(run, pairs, loss_function))
    with compare.turn(args.lock):
        curve = train_for(run, pairs, loss_function)
        figures = validate(run, pairs.validation()) if config.train.validation else {}
        encoder = wrap(run, data)
        encoder.save_pretrained(args.out)  # before anything else can go wrong
    target = load_encoder(config.encoder, device=str(device))
    rows = measure(
        DistilledEncoder.from_pretrained(args.out, device=device), target, args.texts, limit=args.limit
    )
    encoder.facts["agreement"] = rows
    encoder.save_pretrained(args.out)
    summary = {
        "fields": fields,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "bytes": sum(p.stat().st_size for p in args.out.iterdir()),
        "steps": run.step,
        "per_second": round(run.step * config.train.batch_size / run.seconds),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if device.type == "cuda" else None,
        "curve": curve[:: max(1, len(curve) // 12)],
        "agreement": rows,
    }
    print(json.dumps({**summary, **{k: round(v, 4) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
