"""Compare variants of a preset at equal GPU minutes: one process trains and measures one variant.

    python recipes/compare.py NAME --data DIR --texts DIR --minutes 1.3 [field=value ...]
        [--start-from MODEL] [--encoder ENCODER] [--modes c8,beam]

Prints one line of JSON. Processes that share a lock file take turns on the GPU: the next one loads
and compiles while the one before trains, so no minute is spent waiting. Variants that are more than
a field live in variants.py and flexible.py, which train and measure by the functions here; comparisons.sh,
ratios.sh and depth.sh hold the fields that are compared.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from encoders import MODES, passages_for
from torch import Tensor, nn

from unembed.config import Config, ModelConfig, preset
from unembed.corpus import PreparedData
from unembed.encoders import Encoder, load_encoder
from unembed.inverter import Inverter
from unembed.metrics import token_accuracy, token_f1
from unembed.model import parameter_counts
from unembed.pairs import Pairs
from unembed.run import Group, Run
from unembed.scoring import References, refer
from unembed.step import masked_loss, train_step
from unembed.tokens import TextTokenizer
from unembed.train import fit_to_data, open_pairs
from unembed.validation import causal_loss, validate
from unembed.vectors import similarity

Invert = Callable[[np.ndarray], list[list[int]]]  # vectors (N, E) -> ids of each text
Modes = dict[str, Invert]

# Sizes for a rehearsal on a CPU: every line of a variant runs, nothing is learned.
TINY = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "adaln_rank": 8, "batch_size": 16,
        "compile": False, "warmup": 10, "validation": 64}  # fmt: skip


def arguments(description: str) -> argparse.ArgumentParser:
    """What every comparison is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("fields", nargs="*")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.3)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--modes", type=modes_named, help="ways to decode, as c8,beam; all if not said")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    return parser


def modes_named(given: str) -> list[str]:
    """Read names of ways to decode, joined by commas."""
    names = given.split(",")
    if unknown := set(names) - set(MODES):
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(sorted(unknown))}; there are {', '.join(MODES)}"
        )
    return names


def settings(
    args: argparse.Namespace, *, encoder: str | None = None
) -> tuple[Config, PreparedData, dict[str, Any]]:
    """Read the configuration that the arguments ask for, the data, and the fields that were changed.

    With an `encoder` the passages are taken as its own.
    """
    fields = dict(field.split("=", 1) for field in args.fields)
    values = {k: ast.literal_eval(v) if v[:1] in "0123456789TF-" else v for k, v in fields.items()}
    data = passages_for(load_encoder(encoder), args.data) if encoder else PreparedData.open(args.data)
    sizes = TINY if args.tiny else {}
    config = preset(args.preset).override(**{**sizes, "minutes": args.minutes, **values})
    return fit_to_data(config, data), data, fields


def alone() -> Group:
    """The group of this one process, on the GPU if there is one."""
    return Group(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def warm_up(run: Run, step: Callable[[], Tensor]) -> None:
    """Compile, by two steps that do not count."""
    run.set_rate()
    for _ in range(2):
        float(step())


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Hold the GPU, so to speak: nobody else who asks trains or decodes meanwhile."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def train_on_time(run: Run, step: Callable[[], Tensor]) -> None:
    """Step until the minutes are over."""
    start = time.monotonic()
    while not run.finished():
        run.set_rate()
        loss = step()
        run.step += 1
        if run.step % 10 == 0:
            float(loss)  # waits for the device, so that the clock is true
        run.seconds = time.monotonic() - start


def has_vector(references: References) -> np.ndarray:
    """Which texts (N,) have a vector; one without a token that the encoder knows has zeros instead."""
    return np.abs(references.vectors).sum(1) > 0


def measure(
    references: References, invert: Invert, *, tokenizer: TextTokenizer, encoder: Encoder
) -> dict[str, float]:
    """Held-out figures that need no extra package."""
    known = has_vector(references)
    vectors = references.vectors[known]
    found = [np.array(ids, np.int64) for ids in invert(vectors)]
    pairs = list(zip([references.ids[i] for i in known.nonzero()[0]], found, strict=True))
    figures = {
        "f1": np.mean([token_f1(a, b) for a, b in pairs]),
        "exact": np.mean([len(a) == len(b) and bool((a == b).all()) for a, b in pairs]),
        "accuracy": np.mean([token_accuracy(a, b) for a, b in pairs]),
        "cosine": np.mean(similarity(encoder, vectors, tokenizer.decode(found))),
    }
    return {name: round(float(known.mean() * value), 4) for name, value in figures.items()}


def refer_sets(
    texts: Path, *, data: PreparedData, encoder: Encoder, limit: int | None = None
) -> dict[str, References]:
    """The texts of every file of a folder, or the first of them, as they are measured against."""
    return {
        path.stem: refer(
            path.read_text(encoding="utf-8").splitlines()[:limit],
            tokenizer=data.tokenizer, encoder=encoder, max_tokens=data.max_tokens,
        )
        for path in sorted(texts.glob("*.txt"))
    }  # fmt: skip


def rows_of(references: References, model: Any) -> tuple[Tensor, Tensor]:
    """Ids (N, T) of the texts that have a vector, with ends and padding, and the vectors (N, E)."""
    m, device = model.config, next(model.parameters()).device
    known = has_vector(references)
    rows = [torch.tensor([*references.ids[i], m.end_id][: m.max_tokens]) for i in known.nonzero()[0]]
    x0 = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=m.pad_id)
    return x0.to(device), torch.from_numpy(references.vectors[known]).to(device)


@torch.inference_mode()
def reading_losses(model: Any, sets: dict[str, References]) -> dict[str, float]:
    """Mean cross entropy of each set's tokens and ends, left to right: steadier than what is decoded."""
    rows = {name: rows_of(references, model) for name, references in sets.items()}
    return {name: round(causal_loss(model, x0, e), 4) for name, (x0, e) in rows.items()}


@torch.inference_mode()
def guess_cosines(model: Any, sets: dict[str, References]) -> dict[str, float]:
    """Mean cosine of each set's vectors with what the model guesses of the texts."""
    rows = {name: rows_of(references, model) for name, references in sets.items()}
    return {
        name: round(float(F.cosine_similarity(model.embed(x0), e).mean()), 4)
        for name, (x0, e) in rows.items()
    }


def read_sets(model: Any, sets: dict[str, References], config: Config) -> dict[str, dict[str, float]]:
    """What a model makes of texts that it is shown: the loss of its reading, and its guesses."""
    found = {}
    if config.model.causal:
        found["reading_losses"] = reading_losses(model, sets)
    if config.diffusion.embed_share:
        found["guess_cosines"] = guess_cosines(model, sets)
    return found


def measure_sets(
    texts: Path, modes: Modes, *, limit: int, data: PreparedData, encoder: Encoder
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of every text file of a folder in every mode of decoding."""
    sets = refer_sets(texts, data=data, encoder=encoder, limit=limit)
    figures: dict[str, dict[str, dict[str, float]]] = {name: {} for name in sets}
    for mode, invert in modes.items():
        # All sets at once: what a GPU does for a few hundred texts takes as long as for a few thousand.
        found = iter(invert(np.concatenate([r.vectors[has_vector(r)] for r in sets.values()])))
        for name, references in sets.items():
            figures[name][mode] = measure(
                references,
                lambda some, found=found: list(islice(found, len(some))),  # type: ignore[misc]
                tokenizer=data.tokenizer,
                encoder=encoder,
            )
    return figures


def plain_modes(inverter: Inverter) -> Modes:
    """The ways to decode that every fixed-length variant is measured by."""

    def by(strategy: str, steps: int) -> Invert:
        return lambda vectors: [
            list(i.ids)
            for i in inverter.invert(vectors, strategy=strategy, steps=steps, seed=0, batch_size=2048)
        ]

    modes = {"c8": by("confidence", 8), "c32": by("confidence", 32), "s32": by("sequential", 32)}
    if inverter.config.model.causal:
        modes |= {"causal": by("causal", 32), "beam": by("beam", 32)}
    return modes


def print_line(
    args: argparse.Namespace,
    fields: dict[str, Any],
    run: Run,
    *,
    figures: dict[str, float],
    sets: dict[str, Any],
    read: dict[str, dict[str, float]] | None = None,
) -> None:
    """Print what became of a variant."""
    parameters, trainable = parameter_counts(run.model)
    summary = {
        "name": args.name,
        "fields": fields,
        "parameters": parameters,
        "trainable": trainable,
        "steps": run.step,
        "per_second": round(run.step * run.config.train.batch_size / run.seconds),
    }
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({**summary, **rounded, **(read or {}), "sets": sets}))


def train_and_measure(
    args: argparse.Namespace,
    *,
    network: Callable[[ModelConfig], nn.Module] | None = None,
    loss: Callable[..., Tensor] = masked_loss,
    pairs: Callable[[Config, PreparedData, Group], Pairs] = open_pairs,
    modes: Callable[[Run, Inverter], Modes] = lambda _, inverter: plain_modes(inverter),
    start_from: str | None = None,
    encoder: str | None = None,
) -> None:
    """Train one variant for the given minutes and print its figures."""
    config, data, fields = settings(args, encoder=encoder)
    run = Run(config, group=alone(), network=network, start_from=start_from)
    batches = pairs(config, data, run.group)
    loss_function = torch.compile(loss) if config.train.compile else loss

    def step() -> Tensor:
        return train_step(run, batches, loss_function)

    warm_up(run, step)
    print(f"{args.name} is ready", file=sys.stderr, flush=True)  # who holds the lock may wait for all to be
    with turn(args.lock):
        train_on_time(run, step)
        figures = validate(run, batches.validation())
        judge = load_encoder(config.encoder, device=str(run.group.device))
        ways = modes(run, Inverter(run.average, config=config, tokenizer=data.tokenizer))
        if args.modes:
            ways = {name: invert for name, invert in ways.items() if name in args.modes}
        every = refer_sets(args.texts, data=data, encoder=judge)  # all texts: they are only read
        with run.half():
            read = read_sets(run.average, every, config)
        sets = measure_sets(args.texts, ways, limit=args.limit, data=data, encoder=judge)
    given = {"encoder": encoder and Path(encoder).name, "start_from": start_from and Path(start_from).name}
    fields = {**{name: value for name, value in given.items() if value}, **fields}
    print_line(args, fields, run, figures=figures, sets=sets, read=read)


def main() -> None:
    """Compare what differs in fields alone."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--start-from", help="a model to take the first weights from: a folder or a name")
    parser.add_argument("--encoder", help="train for this one; the passages must be in its vocabulary")
    args = parser.parse_intermixed_args()
    train_and_measure(args, start_from=args.start_from, encoder=args.encoder)


if __name__ == "__main__":
    main()
