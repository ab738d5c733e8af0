"""Compare variants of a preset at equal GPU minutes: one process trains and measures one variant.

    python recipes/compare.py NAME --data DIR --texts DIR --minutes 1.3 [field=value ...]

Prints one line of JSON. Processes that share a lock file take turns on the GPU: the next one loads
and compiles while the one before trains, so no minute is spent waiting.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import time
from pathlib import Path

import numpy as np
import torch

from unembed.config import preset
from unembed.corpus import PreparedData
from unembed.encoders import load_encoder
from unembed.evaluate import refer
from unembed.inverter import Inverter, similarity
from unembed.metrics import token_accuracy, token_f1
from unembed.run import Group, Run
from unembed.train import fit_to_data, masked_loss, open_pairs, train_step, validate


def measure(
    inverter: Inverter, texts: list[str], *, steps: int, strategy: str = "confidence"
) -> dict[str, float]:
    """Held-out figures that need no extra package."""
    encoder = inverter.encoder()
    references = refer(texts, tokenizer=inverter.tokenizer, encoder=encoder, max_tokens=inverter.max_tokens)
    found = inverter.invert(references.vectors, strategy=strategy, steps=steps, seed=0, batch_size=512)
    pairs = list(zip(references.ids, [np.array(i.ids) for i in found], strict=True))
    return {
        "f1": float(np.mean([token_f1(a, b) for a, b in pairs])),
        "exact": float(np.mean([len(a) == len(b) and bool((a == b).all()) for a, b in pairs])),
        "accuracy": float(np.mean([token_accuracy(a, b) for a, b in pairs])),
        "cosine": float(np.mean(similarity(encoder, references.vectors, [i.text for i in found]))),
    }


def main() -> None:
    """Train one variant for the given minutes and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("fields", nargs="*")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.3)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    parser.add_argument("--limit", type=int, default=400)
    args = parser.parse_intermixed_args()
    fields = dict(field.split("=", 1) for field in args.fields)
    values = {k: ast.literal_eval(v) if v[:1] in "0123456789TF-" else v for k, v in fields.items()}
    data = PreparedData.open(args.data)
    config = fit_to_data(preset(args.preset).override(minutes=args.minutes, **values), data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(config, group=Group(0, 1, device))
    pairs = open_pairs(config, data, run.group)
    loss_function = torch.compile(masked_loss) if config.train.compile else masked_loss
    run.set_rate()
    for _ in range(2):
        float(train_step(run, pairs, loss_function))
    with args.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        while not run.finished():
            run.set_rate()
            loss = train_step(run, pairs, loss_function)
            run.step += 1
            if run.step % 10 == 0:
                float(loss)  # waits for the device, so that the clock is true
            run.seconds = time.monotonic() - start
        figures = validate(run, pairs.validation())
        inverter = Inverter(run.average, config=config, tokenizer=data.tokenizer)
        inverter._encoder = load_encoder(config.encoder, device=str(device))
        sets = {}
        for path in sorted(args.texts.glob("*.txt")):
            texts = path.read_text(encoding="utf-8").splitlines()[: args.limit]
            modes = {"c8": (8, "confidence"), "c32": (32, "confidence"), "s32": (32, "sequential")}
            sets[path.stem] = {
                mode: {k: round(v, 4) for k, v in measure(inverter, texts, steps=n, strategy=s).items()}
                for mode, (n, s) in modes.items()
            }
    total = sum(p.numel() for p in run.model.parameters())
    rate = run.step * config.train.batch_size / run.seconds
    summary = {
        "name": args.name,
        "fields": fields,
        "parameters": total,
        "steps": run.step,
        "per_second": round(rate),
    }
    print(json.dumps({**summary, **{k: round(v, 4) for k, v in figures.items()}, "sets": sets}))


if __name__ == "__main__":
    main()
