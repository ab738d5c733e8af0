"""How well the search does on held-out text: one JSON file a text file, written to a folder.

    python recipes/search.py --texts heldout/*.txt --out benchmarks/results \
        --rounds 80 --candidates 64 --budget 5000 --batch 256
    python recipes/search.py --texts heldout/*.txt --out benchmarks/results --guidance --limit 100

The first writes search-NAME.json: exact match, token F1 and cosine of the answers and of the open loop;
the same against encoder calls; how far the belief in an answer can be trusted; which moves paid, round by
round; seconds a text, and where they went. The second writes guidance-NAME.json: token F1 and cosine of the
open loop, by strategy and guidance. A file that is there already, made with the same settings, is left as
it is: so a run that was ended goes on. `--model` and `--encoder` take what the library takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from unembed import Inverter, load_encoder
from unembed.decode import DecodeOptions
from unembed.metrics import token_f1
from unembed.moves import MOVES
from unembed.readable import content_lengths
from unembed.reader import Reader
from unembed.search import EXACT, Refine, Searcher, SearchOptions
from unembed.strategies import AUTO, STRATEGIES
from unembed.vectors import similarity

CALLS = (1, 10, 100, 1000, 3200, 5000)
WEIGHTS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
# Edges of the calibration table, in cosine.
EDGES = (0.0, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999, EXACT)
COUNTS = ("tries", "entered", "improved")


@dataclasses.dataclass
class Stopwatch:
    """Adds up the time spent in some calls; on a GPU the GPU's own time, without waiting for it."""

    cuda: bool
    spent: dict[str, list[Callable[[], float]]] = dataclasses.field(default_factory=dict)
    watched: list[tuple[Any, str, Any]] = dataclasses.field(default_factory=list)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Put a method that is timed in the place of another."""
        plain, readings = getattr(owner, method), self.spent.setdefault(part, [])

        def timed(*args: Any, **options: Any) -> Any:
            start = self._mark()
            result = plain(*args, **options)
            stop = self._mark()
            readings.append(lambda: self._between(start, stop))
            return result

        self.watched.append((owner, method, plain))
        setattr(owner, method, timed)

    def leave(self) -> None:
        """Put the methods back."""
        for owner, method, plain in self.watched:
            setattr(owner, method, plain)

    def seconds(self) -> dict[str, float]:
        """Give the seconds of each part."""
        if self.cuda:
            torch.cuda.synchronize()
        return {part: sum(read() for read in readings) for part, readings in self.spent.items()}

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1000 if self.cuda else stop - start


@dataclasses.dataclass
class Course:
    """What became of each text of a file, round by round."""

    calls: list[Tensor]  # (N,) after the drafts and each round
    cosines: list[Tensor]  # (N,)
    ids: list[Tensor]  # (N, T)
    moves: np.ndarray  # (rounds, M, 3), of all files that were searched together
    seconds: float  # a text
    spent: dict[str, float]  # seconds a text, by part

    def take(self, some: slice) -> Course:
        """Return the course of some of the texts."""
        calls, cosines, ids = ([each[some] for each in kept] for kept in (self.calls, self.cosines, self.ids))
        return Course(calls, cosines, ids, self.moves, self.seconds, self.spent)


def search_texts(
    inverter: Inverter, vectors: Any, *, options: SearchOptions, decoding: DecodeOptions, batch: int,
    encoder: Any = None,
) -> Course:  # fmt: skip
    """Search for the texts of vectors, batch by batch, and note every standing."""
    cuda = inverter.device.type == "cuda"
    reader = Reader(encoder or inverter.encoder(), inverter.tokenizer)
    model: Any = inverter.ready
    searcher = Searcher(model, reader, inverter.config.diffusion, decoding, options)
    watch = Stopwatch(cuda)
    parts = (
        *((model, name, "model") for name in ("hidden", "head", "cache", "read")),
        (searcher.reader, "embed", "encoder"),
        (searcher.reader, "respell", "spelling"),
    )
    for owner, method, part in parts:
        if getattr(owner, method, None) is not None:  # not every model reads left to right
            watch.watch(owner, method, part)
    e = inverter.check_vectors(vectors)
    noted: list[list[list[Tensor]]] = [[[] for _ in range(options.rounds + 1)] for _ in range(3)]
    moves = np.zeros((options.rounds + 1, len(MOVES), len(COUNTS)), dtype=np.int64)
    start = time.perf_counter()
    for first in range(0, len(e), batch):
        for index, standing in enumerate(searcher.run(e[first : first + batch], first=first)):
            counts = torch.stack([getattr(standing, name).sum(0) for name in COUNTS], 1)
            moves[index] += counts.cpu().numpy()
            last = standing.calls.cpu(), standing.cosine[:, 0].cpu(), standing.ids[:, 0].cpu()
            for kept, value in zip(noted, last, strict=True):
                kept[index].append(value)
        for kept, value in zip(noted, last, strict=True):
            for rest in kept[index + 1 :]:  # all were found, or had spent their budget
                rest.append(value)
    seconds = (time.perf_counter() - start) / len(e)
    spent = {part: total / len(e) for part, total in watch.seconds().items()}
    watch.leave()
    calls, cosines, ids = ([torch.cat(each) for each in kept] for kept in noted)
    return Course(calls, cosines, ids, moves[1:], seconds, spent)


def figures(rows: np.ndarray, truth: Any, cosines: np.ndarray, *, end_id: int) -> dict[str, float]:
    """Exact match, token F1 and cosine, each a mean."""
    lengths = content_lengths(rows, end_id=end_id)
    pairs = zip(truth.ids, truth.lengths, rows, lengths, strict=True)
    f1 = [token_f1(a[:n], b[:m]) for a, n, b, m in pairs]
    exact = (rows == truth.ids).all(1)
    means = {"exact": exact.mean(), "f1": np.mean(f1), "cosine": np.nan_to_num(cosines, neginf=0.0).mean()}
    return {name: round(float(value), 4) for name, value in means.items()}


def measure(inverter: Inverter, files: list[list[str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Search for the texts of all files together, since a GPU likes large batches, and count file by file."""
    encoder = load_encoder(args.encoder or inverter.encoder_name, device=str(inverter.device))
    truths = [inverter.tokenizer.encode(lines, max_tokens=inverter.max_tokens) for lines in files]
    vectors = [encoder.encode(truth.texts, batch_size=256) for truth in truths]
    options = SearchOptions(args.refine, args.rounds, args.candidates, args.pool, args.budget, args.seed)
    rankers: dict[str, Callable[[], Any]] = {
        "encoder": lambda: encoder,
        "self": inverter.guesses,
        "distilled": lambda: inverter.distilled(args.distilled),
    }
    asked = rankers[args.refine]()
    decoding = DecodeOptions(args.strategy, args.steps).fit(inverter.config.model)
    course = search_texts(
        inverter, np.concatenate(vectors), options=options, decoding=decoding, batch=args.batch, encoder=asked
    )
    records, first = [], 0
    for truth, target in zip(truths, vectors, strict=True):
        part = course.take(slice(first, first + len(target)))
        records.append(tell(inverter, truth, target, part, encoder, args))
        first += len(target)
    return records


def tell(
    inverter: Inverter,
    truth: Any,
    vectors: np.ndarray,
    course: Course,
    encoder: Any,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Count what became of one file's texts, beside what the open loop makes of them."""
    end, by_target = inverter.config.model.end_id, args.refine == "encoder"
    plain = inverter.invert(
        vectors, strategy=args.strategy, steps=args.steps, seed=args.seed, batch_size=args.batch
    )
    open_rows = inverter.tokenizer.encode(
        [p.text for p in plain], max_tokens=inverter.max_tokens, allow_empty=True
    ).ids
    open_cosines = similarity(encoder, vectors, [p.text for p in plain])
    calls = torch.stack(course.calls).numpy()
    final = course.ids[-1].numpy()
    ranked = course.cosines[-1].numpy()
    # The belief is the ranking encoder's; the cosine reported is always the target encoder's.
    true = ranked if by_target else similarity(encoder, vectors, inverter.tokenizer.decode(final))

    curve = {}
    for most in CALLS:
        if most == 1:  # the first draft is the open loop's answer
            curve["1"] = figures(open_rows, truth, open_cosines, end_id=end)
            continue
        upto = ((calls <= most).sum(0) - 1).clip(min=0)  # the last standing that cost no more
        rows = np.stack([course.ids[r][n].numpy() for n, r in enumerate(upto)])
        cosines = np.array([float(course.cosines[r][n]) for n, r in enumerate(upto)])
        curve[str(most)] = figures(rows, truth, cosines, end_id=end)
        curve[str(most)]["calls"] = round(float(calls[upto, np.arange(len(rows))].mean()), 1)
    exact = (final == truth.ids).all(1)
    believed = ranked >= EXACT
    bins = np.digitize(ranked, EDGES[1:])
    return {
        "texts": len(final),
        "tokens_a_text": round(float(truth.lengths.mean()), 1),
        "open_loop": figures(open_rows, truth, open_cosines, end_id=end),
        "search": figures(final, truth, true, end_id=end),
        "calls": round(float(calls[-1].mean()), 1),
        "curve": curve,
        "calibration": {
            "believed_and_exact": int((believed & exact).sum()),
            "believed_not_exact": int((believed & ~exact).sum()),
            "exact_not_believed": int((~believed & exact).sum()),
            "neither": int((~believed & ~exact).sum()),
            "bins": [
                {"from": low, "texts": int((bins == b).sum()), "exact": int(exact[bins == b].sum())}
                for b, low in enumerate(EDGES)
            ],
        },
        "cosine": [round(float(c.clamp(min=0).mean()), 5) for c in course.cosines],
        "moves": {
            name: {key: course.moves[:, m, k].tolist() for k, key in enumerate(COUNTS)}
            for m, name in enumerate(MOVES)
        },
        "missed": [
            {"text": truth.texts[n], "found": text, "cosine": round(float(true[n]), 5)}
            for n, text in enumerate(inverter.tokenizer.decode(final))
            if not exact[n]
        ][: args.misses],
        "seconds_a_text": round(course.seconds, 4),
        "share": shares(course),
    }


def shares(course: Course) -> dict[str, float]:
    """Share of the time spent in each part."""
    parts = {part: seconds / course.seconds for part, seconds in course.spent.items()}
    return {part: round(share, 3) for part, share in (parts | {"rest": 1 - sum(parts.values())}).items()}


def sweep(inverter: Inverter, lines: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Invert in the open loop with every strategy and guidance."""
    truth = inverter.tokenizer.encode(lines, max_tokens=inverter.max_tokens)
    encoder = load_encoder(args.encoder or inverter.encoder_name, device=str(inverter.device))
    vectors = encoder.encode(truth.texts, batch_size=256)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for strategy in STRATEGIES:
        for guidance in WEIGHTS:
            found = inverter.invert(
                vectors, strategy=strategy, steps=args.steps, guidance=guidance, seed=args.seed,
                batch_size=args.batch,
            )  # fmt: skip
            texts = [one.text for one in found]
            rows = inverter.tokenizer.encode(texts, max_tokens=inverter.max_tokens, allow_empty=True).ids
            cosines = similarity(encoder, vectors, texts)
            row = figures(rows, truth, cosines, end_id=inverter.config.model.end_id)
            table.setdefault(strategy, {})[str(guidance)] = row
    return {"texts": len(lines), "guidance": table}


def main() -> None:
    """Measure the files that have not been measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files of one text a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--limit", type=int, help="lines of each file")
    parser.add_argument("--guidance", action="store_true", help="sweep guidance instead of searching")
    parser.add_argument("--refine", default="encoder", choices=get_args(Refine))
    parser.add_argument("--distilled", help="folder of the distilled encoder; the bundled one if left out")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--pool", type=int, default=SearchOptions.pool)
    parser.add_argument("--budget", type=int, default=5000)
    parser.add_argument("--misses", type=int, default=0, help="texts not found to show; mind their licence")
    parser.add_argument("--strategy", default=AUTO, help="of the first draft and the open loop")
    parser.add_argument("--steps", type=int, help="of the first draft and the open loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--encoder", help="the model's own if left out")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--label", default="", help="put into the names of the files")
    args = parser.parse_args()

    inverter = Inverter.from_pretrained(args.model, precision=args.precision)
    args.strategy = DecodeOptions(args.strategy, args.steps).fit(inverter.config.model).strategy
    unlike = ("texts", "out", "label")
    settings = {name: value for name, value in vars(args).items() if name not in unlike}
    settings["moves"] = list(MOVES)
    cuda = inverter.device.type == "cuda"
    machine = {
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": inverter.numbers,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "guidance" if args.guidance else "search"
    wanted: dict[Path, tuple[str, list[str]]] = {}  # path of the record -> name of the file, texts
    for file in args.texts:
        path = args.out / f"{'-'.join(filter(None, (kind, args.label, file.stem)))}.json"
        if path.exists() and json.loads(path.read_text())["settings"] == settings:
            print(f"{path} is there")
            continue
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        wanted[path] = file.name, lines[: args.limit]
    if not wanted:
        return
    texts = [lines for _, lines in wanted.values()]
    records = (
        [sweep(inverter, lines, args) for lines in texts] if args.guidance else measure(inverter, texts, args)
    )
    for (path, (name, _)), record in zip(wanted.items(), records, strict=True):
        whole = {"file": name, "settings": settings, **machine, **record}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        summary = {
            key: record[key] for key in ("search", "calls", "seconds_a_text", "share") if key in record
        }
        print(path, json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
