"""What encoders of different kinds give away: an inverter for each, trained for equal minutes.

    python recipes/encoders.py static --model2vec DIR --data DATA --out DIR   (see recipes/static.sh)
    python recipes/encoders.py lsa --data DATA --out DIR [--passages 200000 --size 300]
    python recipes/encoders.py prepare ENCODER FILE... --data DATA --out DIR [--trust-remote-code]
    python recipes/encoders.py train ENCODER --data DATA --texts DIR --out RUN --minutes 5 [--set layers=4]
        [--trust-remote-code]
    python recipes/encoders.py table RUN... --out encoders.json

DATA is one folder of passages, prepared for all-MiniLM-L6-v2: all three encoders share its vocabulary, so
the same passages serve. An encoder with a vocabulary of its own needs passages of its own: `prepare` makes
them of files of text, with the settings of DATA, and goes on where it was stopped. `train` may be called
again and again: each call stops after `--piece` minutes on the clock at the latest, goes on where the last
one stopped, and measures when the minutes are complete. recipes/encoders.sh does it all.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unembed.classical import fit_lsa, save_table, table_of_model2vec
from unembed.config import Config, preset
from unembed.corpus import PreparedData, prepare
from unembed.encoders import Encoder, load_encoder
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.metrics import rouge_l, token_accuracy, token_f1
from unembed.scoring import refer
from unembed.shards import MANIFEST
from unembed.sources import read_texts
from unembed.strategies import STRATEGIES
from unembed.train import TrainResult, train
from unembed.vectors import similarity

# Ways of decoding, by the names of the tables: strategy and passes.
MODES = {
    "c8": ("confidence", 8),
    "c32": ("confidence", 32),
    "s32": ("sequential", 32),
    "t32": ("two-stage", 32),
    "e32": ("euler", 32),
    "r32": ("euler-remask", 32),
    "causal": ("causal", 32),
    "beam": ("beam", 32),
}


def make_static(args: argparse.Namespace) -> None:
    """Bring a model of model2vec into the vocabulary of the data."""
    tokenizer = PreparedData.open(args.data).tokenizer
    settings = json.loads((args.model2vec / "config.json").read_text(encoding="utf-8"))
    kept = ("apply_pca", "sif_coefficient", "pooling", "normalize", "embedding_dtype")
    facts = {"distilled_from": "all-MiniLM-L6-v2", **{key: settings.get(key) for key in kept}}
    table = table_of_model2vec(args.model2vec, tokenizer)
    save_table(args.out, table, tokenizer=tokenizer, kind="static", facts=facts)
    if args.check:  # the vectors that model2vec itself gives for the same lines
        theirs = np.load(args.check)
        ours = load_encoder(args.out, device="cpu").encode(
            args.lines.read_text(encoding="utf-8").splitlines()
        )
        difference = float(np.abs(ours - theirs).max())
        print(json.dumps({"texts": len(ours), "largest_difference_from_model2vec": difference}))
        if difference > 1e-5:
            sys.exit("the table does not give the vectors of model2vec.")


def make_lsa(args: argparse.Namespace) -> None:
    """Fit TF-IDF and SVD to the first passages of the data."""
    import sklearn

    data = PreparedData.open(args.data)
    passages = min(args.passages, data.count)
    offsets = data.offsets[: passages + 1]
    tokens = data.tokens[: offsets[-1]]
    table = fit_lsa(tokens, offsets, vocab_size=data.tokenizer.size, size=args.size, seed=args.seed)
    used = int((np.bincount(tokens, minlength=data.tokenizer.size) > 0).sum())
    facts = {"passages": passages, "terms_seen": used, "seed": args.seed, "scikit_learn": sklearn.__version__}
    save_table(args.out, table, tokenizer=data.tokenizer, kind="lsa", facts=facts)


def open_encoder(args: argparse.Namespace) -> Any:
    """Load the encoder that was named, running its code only if that is allowed."""
    return load_encoder(args.encoder, trust_remote_code=args.trust or None)


def prepare_own(args: argparse.Namespace) -> None:
    """Prepare passages in an encoder's own vocabulary, with the settings of the data; or go on with it."""
    settings = PreparedData.open(args.data).manifest
    encoder = open_encoder(args)
    if hasattr(encoder, "id_function"):
        encoder.id_function()  # refuses a prompt that joins the text, before all of it is tokenised
    data = prepare(
        read_texts(args.files),
        encoder=encoder,
        out=args.out,
        kind="passages",
        source_names=args.files,
        show_progress=sys.stderr.isatty(),
        **{key: settings[key] for key in ("max_tokens", "min_tokens", "shard_size")},
    )
    line = {"encoder": data.encoder_name, "passages": data.count, "vocabulary": data.tokenizer.size}
    print(json.dumps(line))


def passages_for(encoder: Encoder, data: Path) -> PreparedData:
    """Open passages as if they had been prepared for another encoder of the same vocabulary."""
    prepared = PreparedData.open(data)
    own: Any = getattr(encoder, "tokenizer", None)
    if prepared.kind != "passages" or own is None or own.to_json() != prepared.tokenizer.to_json():
        sys.exit(f"{data} must hold passages in the vocabulary of {encoder.name}; see encoders.py prepare.")
    changes = {"encoder": encoder.name, "embedding_size": encoder.size}
    return PreparedData(prepared.path, prepared.manifest | changes)


def data_for(encoder: Encoder, data: Path, out: Path) -> Path:
    """Make a folder of the same passages that names another encoder; the shards are linked, not copied."""
    manifest = passages_for(encoder, data).manifest
    out.mkdir(parents=True, exist_ok=True)
    for file in data.iterdir():
        link = out / file.name
        if file.name != MANIFEST and not link.is_symlink():
            link.symlink_to(file.resolve())
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return out


def train_piece(config: Config, *, data: Path, out: Path, minutes: float, trust: bool = False) -> TrainResult:
    """Train, or go on training, for so many minutes on the clock at most."""
    done = threading.Event()

    def stop() -> None:
        if not done.wait(minutes * 60):
            os.kill(os.getpid(), signal.SIGTERM)  # which a run takes as a wish to save and stop

    watch = threading.Thread(target=stop, daemon=True)
    watch.start()
    try:
        return train(config, data=data, out=out, resume=(out / "state").exists(), trust_remote_code=trust)
    finally:
        done.set()
        watch.join()


def measure(
    inverter: Inverter,
    sets: dict[str, list[str]],
    *,
    modes: Iterable[str] = MODES,
    batch_size: int = 2048,
    unknown: int | None = None,
    encoder: Encoder | None = None,
) -> dict[str, dict[str, Any]]:
    """Held-out figures of each set of texts, for each way of decoding that the model has.

    `unknown` is an id that stands for any word: with it, F1 without that token is given too, over the
    texts that have another. `encoder` is the model's own, if it is loaded already.
    """
    encoder = encoder or inverter.encoder()
    references = {
        name: refer(texts, tokenizer=inverter.tokenizer, encoder=encoder, max_tokens=inverter.max_tokens)
        for name, texts in sets.items()
    }
    # A text without a known token has no vector to speak of; it is answered by nothing, and so not recovered.
    known = {name: np.abs(r.vectors).sum(1) > 0 for name, r in references.items()}
    vectors = {name: r.vectors[known[name]] for name, r in references.items()}
    figures: dict[str, dict[str, Any]] = {
        name: {
            "texts": len(r.texts),
            # As cut: as many tokens are more text in one vocabulary than in another.
            "characters": round(float(np.mean([len(text) for text in r.texts])), 1),
            "without_vector": int((~known[name]).sum()),
        }
        for name, r in references.items()
    }
    for mode in modes:
        strategy, steps = MODES[mode]
        if STRATEGIES[strategy].causal and not inverter.config.model.causal:
            continue
        # All sets at once: what a GPU does for a few hundred texts takes as long as for a few thousand.
        every = np.concatenate(list(vectors.values()))
        found = iter(inverter.invert(every, strategy=strategy, steps=steps, seed=0, batch_size=batch_size))
        for name, r in references.items():
            own = [next(found) if k else None for k in known[name]]
            answers = [np.array(i.ids if i else [], np.int64) for i in own]
            texts = [i.text if i else "" for i in own]
            near = similarity(encoder, r.vectors, texts)
            figures[name][mode] = score(list(zip(r.ids, answers, strict=True)), near, unknown=unknown)
            shared = [rouge_l(a, b) for a, b in zip(r.texts, texts, strict=True)]
            figures[name][mode]["rouge_l"] = round(float(np.mean(shared)), 4)
    return figures


def score(
    pairs: list[tuple[np.ndarray, np.ndarray]], near: np.ndarray, *, unknown: int | None
) -> dict[str, float]:
    """Mean figures of true and found tokens, and of cosines."""
    figures = {
        "f1": np.mean([token_f1(a, b) for a, b in pairs]),
        "exact": np.mean([np.array_equal(a, b) for a, b in pairs]),
        "accuracy": np.mean([token_accuracy(a, b) for a, b in pairs]),
        "same_tokens": np.mean([sorted(a) == sorted(b) for a, b in pairs]),
        "cosine": np.mean(near),
    }
    found = {name: round(float(value), 4) for name, value in figures.items()}
    if unknown is not None:
        spelt = [(a[a != unknown], b[b != unknown]) for a, b in pairs]
        each = [token_f1(a, b) for a, b in spelt if len(a)]
        found["f1_known"] = round(float(np.mean(each)), 4) if each else 0.0
    return found


def read_fields(fields: list[str]) -> dict[str, Any]:
    """Read settings given as field=value."""
    pairs = dict(field.split("=", 1) for field in fields)
    return {k: ast.literal_eval(v) if v[:1] in "0123456789TF-" else v for k, v in pairs.items()}


def train_one(args: argparse.Namespace) -> None:
    """Train an inverter for one encoder, or go on with it; measure when it is trained."""
    start = time.monotonic()
    if (args.out / "figures.json").exists():
        return
    encoder = open_encoder(args)
    config = preset(args.preset).override(minutes=args.minutes, **read_fields(args.fields))
    data = data_for(encoder, args.data, args.out / "data")
    with args.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        result = train_piece(config, data=data, out=args.out / "run", minutes=args.piece, trust=args.trust)
        spent = (time.monotonic() - start) / 60
        line = {
            "encoder": Path(args.encoder).name,
            "steps": result.steps,
            "minutes": round(result.seconds / 60, 2),
        }
        if result.interrupted:
            print(json.dumps({**line, "finished": False}))
            return
        inverter = Inverter.from_pretrained(result.model)
        texts = {
            path.stem: path.read_text(encoding="utf-8").splitlines()[: args.limit]
            for path in sorted(args.texts.glob("*.txt"))
        }
        sets = measure(inverter, texts, encoder=encoder)
    figures = {
        **line,
        "kind": getattr(encoder, "kind", "transformer"),
        "size": encoder.size,
        "vocabulary": inverter.tokenizer.size,
        "facts": getattr(encoder, "facts", {}),
        "parameters": sum(p.numel() for p in inverter.model.parameters()),
        "passages": result.steps * inverter.config.train.batch_size,
        "validation_loss": result.validation_loss,
        "clock_minutes_of_last_piece": round(spent, 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "fields": args.fields,
        "sets": sets,
    }
    (args.out / "figures.json.draft").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    os.replace(args.out / "figures.json.draft", args.out / "figures.json")
    print(json.dumps(figures))


def join_runs(runs: list[Path], out: Path) -> list[dict[str, Any]]:
    """Write the figures of runs into one file, in the order given; return them."""
    rows = [json.loads((run / "figures.json").read_text(encoding="utf-8")) for run in runs]
    out.write_text(json.dumps({"encoders": rows}, indent=1) + "\n", encoding="utf-8")
    return rows


def make_table(args: argparse.Namespace) -> None:
    """Gather the figures of runs into one file, and print them side by side."""
    rows = join_runs(args.runs, args.out)
    columns = ("f1", "same_tokens", "exact", "rouge_l", "cosine")
    print("| encoder | kind | size | vocabulary | set | mode | F1 | same tokens | exact | ROUGE-L | cosine |")
    print("|---" * (6 + len(columns)) + "|")
    for row in rows:
        # Older figures have neither the vocabulary's size nor ROUGE-L.
        head = f"| {row['encoder']} | {row['kind']} | {row['size']} | {row.get('vocabulary', '')} "
        for name, figures in row["sets"].items():
            for mode in (m for m in MODES if m in figures):
                cells = [f"{figures[mode][c]:.3f}" if c in figures[mode] else "" for c in columns]
                print(f"{head}| {name} | {mode} | {' | '.join(cells)} |")


def main() -> None:
    """Do one of the five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    static = commands.add_parser("static")
    static.add_argument("--model2vec", type=Path, required=True)
    static.add_argument("--check", type=Path, help="vectors by model2vec, .npy")
    static.add_argument("--lines", type=Path, help="the texts of these vectors, one a line")
    static.set_defaults(do=make_static)
    lsa = commands.add_parser("lsa")
    lsa.add_argument("--passages", type=int, default=200_000)
    lsa.add_argument("--size", type=int, default=300)
    lsa.add_argument("--seed", type=int, default=0)
    lsa.set_defaults(do=make_lsa)
    own = commands.add_parser("prepare")
    own.set_defaults(do=prepare_own)
    one = commands.add_parser("train")
    for command in (own, one):
        command.add_argument("encoder", help="a name, a folder or a hub id; #CHOICE behind it for a prompt")
        command.add_argument(
            "--trust-remote-code", action="store_true", dest="trust", help="run code that the encoder brings"
        )
    own.add_argument("files", nargs="+", help="text, a passage a line, .jsonl or .parquet")
    one.add_argument("--set", nargs="*", default=[], dest="fields", metavar="FIELD=VALUE")
    one.add_argument("--preset", default="small")
    one.add_argument("--texts", type=Path, required=True)
    one.add_argument("--minutes", type=float, default=5.0)
    one.add_argument("--piece", type=float, default=8.5)
    one.add_argument("--limit", type=int, default=400)
    one.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    one.set_defaults(do=train_one)
    table = commands.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.set_defaults(do=make_table)
    for command in (static, lsa, own, one):
        command.add_argument("--data", type=Path, required=True)
    for command in (static, lsa, own, one, table):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        args.do(args)
    except UnembedError as error:
        sys.exit(
            str(error).replace(
                "pass trust_remote_code=True", "add --trust-remote-code (TRUST=1 for encoders.sh)"
            )
        )


if __name__ == "__main__":
    main()
