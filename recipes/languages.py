"""Ten languages in one inverter, with MiniLM's own vocabulary, and what that vocabulary does to each.

    python recipes/languages.py facts --parallel parallel.jsonl --out facts.json [--encoder ENCODER ...]
    python recipes/languages.py prepare en.*.txt.xz de.txt.xz ... --out DATA [--cap 120000]
    python recipes/languages.py train --data DATA --parallel parallel.jsonl --out RUN --minutes 8
        [--encoder ENCODER] [--set field=value ...]
    python recipes/languages.py table RUN... --out ten.json

A language is the part of a file's name before the first dot; `prepare` takes at most `--cap` passages of
each and mixes them by a fixed seed. The parallel file has one JSON object a line: {"en": "...", "zh": ...}.
`train` may be called again and again, as that of recipes/encoders.py, and measures when it is complete.
ENCODER is a name or a folder, all-MiniLM-L6-v2 by default; one of its vocabulary, so that the same passages
serve. Static vectors are those of recipes/static.sh; LSA must have seen the languages to know their tokens:
`recipes/encoders.py lsa --data DATA --out DIR`, with the DATA of ten languages. `table` joins the figures of
runs, in the order given. `facts` needs no model: unknown tokens, tokens a character, texts that survive the
vocabulary, and the F1 of answers that know nothing of a vector; of each ENCODER the cosine of such an answer,
and of the very tokens that are sought.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from encoders import MODES, data_for, join_runs, measure, read_fields, train_piece

from unembed.config import preset
from unembed.corpus import prepare
from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.metrics import token_f1
from unembed.scoring import refer
from unembed.sources import read_texts
from unembed.tokens import TextTokenizer
from unembed.vectors import similarity

ENCODER = "all-MiniLM-L6-v2"


def read_parallel(path: Path) -> dict[str, list[str]]:
    """Read the texts of each language."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {name: [row[name] for row in rows] for name in rows[0] if isinstance(rows[0][name], str)}


def strip_space(text: str) -> str:
    """Lower-case a text and drop white space, which WordPiece does not keep."""
    return "".join(unicodedata.normalize("NFC", text).lower().split())


def strip_marks(text: str) -> str:
    """Drop accents and other combining marks as well, which an uncased vocabulary drops."""
    plain = unicodedata.normalize("NFD", strip_space(text))
    return "".join(c for c in plain if unicodedata.category(c) != "Mn")


def unknown_id(tokenizer: TextTokenizer) -> int:
    """Find the id of what the vocabulary cannot spell."""
    model = json.loads(tokenizer.to_json())["model"]
    return int(model["vocab"][model["unk_token"]])


def usual_tokens(spans: list[np.ndarray]) -> list[int]:
    """The one list of tokens, as long as these texts are on average, that has most in common with them."""
    copies = Counter(
        (token, n) for span in spans for token, c in Counter(span.tolist()).items() for n in range(c)
    )
    length = round(float(np.mean([len(span) for span in spans])))
    return [token for (token, _), _ in copies.most_common(length)]


def chance(spans: list[np.ndarray]) -> dict[str, float]:
    """F1 of answers that know nothing of a vector: another text, and the usual tokens of the other half."""
    half = len(spans) // 2
    first, second = spans[:half], spans[half:]
    blind = [(usual_tokens(second), first), (usual_tokens(first), second)]
    return {
        "f1_of_another_text": float(
            np.mean([token_f1(a, b) for a, b in zip(spans, spans[-1:] + spans[:-1], strict=True)])
        ),
        "f1_of_usual_tokens": float(np.mean([token_f1(span, usual) for usual, own in blind for span in own])),
    }


def describe(tokenizer: TextTokenizer, texts: list[str], *, max_tokens: int) -> dict[str, float]:
    """What the vocabulary makes of texts: unknown tokens, length, and what can be read back."""
    spans = tokenizer.spans(texts)
    unknown = unknown_id(tokenizer)
    tokens, characters = sum(map(len, spans)), sum(map(len, texts))
    # As evaluation sees them: [UNK] reads as nothing.
    again = tokenizer.decode(spans)
    shares = {
        "unknown": sum(int((span == unknown).sum()) for span in spans) / tokens,
        "texts_with_unknown": float(np.mean([bool((span == unknown).any()) for span in spans])),
        "tokens_per_character": tokens / characters,
        "tokens_per_text": tokens / len(texts),
        "longer_than_model": float(np.mean([len(span) > max_tokens for span in spans])),
        "survive_but_case_and_space": float(
            np.mean([strip_space(a) == strip_space(b) for a, b in zip(texts, again, strict=True)])
        ),
        "survive_but_case_space_and_marks": float(
            np.mean([strip_marks(a) == strip_marks(b) for a, b in zip(texts, again, strict=True)])
        ),
        **chance([span[:max_tokens] for span in spans]),
    }
    return {"texts": len(texts), **{name: round(value, 4) for name, value in shares.items()}}


def cosine_range(encoder: Any, texts: list[str], *, max_tokens: int) -> dict[str, float]:
    """Cosines between which answers lie: of another text, and of the tokens sought, read as answers are.

    [UNK] reads as nothing, so where an encoder gives it a weight the right tokens do not reach 1.
    """
    own = refer(texts, tokenizer=encoder.tokenizer, encoder=encoder, max_tokens=max_tokens)
    answers = {"of_another_text": own.texts[-1:] + own.texts[:-1], "of_the_tokens_sought": own.texts}
    return {
        name: round(float(similarity(encoder, own.vectors, found).mean()), 4)
        for name, found in answers.items()
    }


def make_facts(args: argparse.Namespace) -> None:
    """Describe the vocabulary on every language and write it down."""
    encoder: Any = load_encoder(ENCODER, device="cpu")
    parallel = read_parallel(args.parallel)
    facts = {
        name: describe(encoder.tokenizer, texts, max_tokens=args.max_tokens)
        for name, texts in parallel.items()
    }
    found: dict[str, Any] = {"encoder": ENCODER, "languages": facts}
    if args.encoders:
        loaded = {Path(name).name: load_encoder(name, device="cpu") for name in args.encoders}
        found["cosines"] = {
            name: {
                language: cosine_range(each, texts, max_tokens=args.max_tokens)
                for language, texts in parallel.items()
            }
            for name, each in loaded.items()
        }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, row in facts.items():
        print(name, json.dumps(row))


def mix(files: dict[str, list[str]], *, cap: int, seed: int) -> Iterator[str]:
    """Yield at most `cap` passages of each language, at every moment about in proportion."""
    passages = {name: list(islice(read_texts(paths), cap)) for name, paths in sorted(files.items())}
    order = np.repeat(np.arange(len(passages)), [len(texts) for texts in passages.values()])
    np.random.default_rng(seed).shuffle(order)
    sources = [iter(texts) for texts in passages.values()]
    return chain.from_iterable((next(sources[i]),) for i in order)


def prepare_all(args: argparse.Namespace) -> None:
    """Tokenise passages of all languages into one folder."""
    files: dict[str, list[str]] = {}
    for path in sorted(args.files):
        files.setdefault(path.name.partition(".")[0], []).append(str(path))
    encoder = load_encoder(ENCODER, device="cpu")
    data = prepare(
        mix(files, cap=args.cap, seed=args.seed),
        encoder=encoder,
        out=args.out,
        kind="passages",
        shard_size=500_000,
        min_tokens=3,
        source_names=sorted(args.files),
    )
    print(json.dumps({"passages": data.count, "tokens": int(data.offsets[-1]), "languages": sorted(files)}))


def train_all(args: argparse.Namespace) -> None:
    """Train on all languages, or go on; measure each when it is trained."""
    figures_file = args.out / "figures.json"
    if figures_file.exists():
        return
    encoder: Any = load_encoder(args.encoder)
    config = preset(args.preset).override(minutes=args.minutes, **read_fields(args.fields))
    data = data_for(encoder, args.data, args.out / "data")
    with args.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = train_piece(config, data=data, out=args.out / "run", minutes=args.piece)
        line = {
            "steps": result.steps,
            "minutes": round(result.seconds / 60, 2),
            "encoder": Path(args.encoder).name,  # of a folder not the path, which says nothing elsewhere
        }
        if result.interrupted:
            print(json.dumps({**line, "finished": False}))
            return
        inverter = Inverter.from_pretrained(result.model)
        found = {"all": inverter}
        if args.beside:  # one that was trained on English alone, say
            found["beside"] = Inverter.from_pretrained(args.beside)
        parallel = {name: texts[: args.limit] for name, texts in read_parallel(args.parallel).items()}
        measured = {
            name: measure(
                each,
                parallel,
                modes=MODES if each is inverter else ("c8", "beam"),
                unknown=unknown_id(each.tokenizer),
            )
            for name, each in found.items()
        }
    languages = {
        language: {
            "vocabulary": describe(inverter.tokenizer, texts, max_tokens=inverter.max_tokens),
            **{name: figures[language] for name, figures in measured.items()},
        }
        for language, texts in parallel.items()
    }
    figures = {
        **line,
        "kind": getattr(encoder, "kind", "transformer"),
        "size": encoder.size,
        "facts": getattr(encoder, "facts", {}),
        "passages": result.steps * inverter.config.train.batch_size,
        "beside": args.beside,
        "fields": args.fields,
        "languages": languages,
    }
    draft = figures_file.with_suffix(".draft")
    draft.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, figures_file)
    print(json.dumps(figures))


def make_table(args: argparse.Namespace) -> None:
    """Gather the figures of runs into one file, and print F1 by encoder, strategy and language."""
    rows = join_runs(args.runs, args.out)
    names = list(rows[0]["languages"])
    print(f"| encoder | mode | {' | '.join(names)} | mean F1 | mean cosine |")
    print("|---" * (len(names) + 4) + "|")
    for row in rows:
        found = [row["languages"][name]["all"] for name in names]
        for mode in (m for m in MODES if m in found[0]):
            f1, cosine = ([each[mode][key] for each in found] for key in ("f1", "cosine"))
            cells = " | ".join(f"{value:.2f}" for value in f1)
            print(f"| {row['encoder']} | {mode} | {cells} | {np.mean(f1):.3f} | {np.mean(cosine):.3f} |")


def main() -> None:
    """Do one of the four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    facts = commands.add_parser("facts")
    facts.add_argument("--max-tokens", type=int, default=32)
    facts.add_argument("--encoder", nargs="*", default=[], dest="encoders", help="names or folders")
    facts.set_defaults(do=make_facts)
    data = commands.add_parser("prepare")
    data.add_argument("files", type=Path, nargs="+")
    data.add_argument("--cap", type=int, default=120_000, help="most passages of a language")
    data.add_argument("--seed", type=int, default=0)
    data.set_defaults(do=prepare_all)
    run = commands.add_parser("train")
    run.add_argument("--encoder", default=ENCODER, help="name or folder; of the vocabulary of the data")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--preset", default="small")
    run.add_argument("--minutes", type=float, default=8.0)
    run.add_argument("--piece", type=float, default=8.5)
    run.add_argument("--limit", type=int, default=300)
    run.add_argument("--beside", help="another model to measure on the same texts")
    run.add_argument("--set", nargs="*", default=[], dest="fields", metavar="FIELD=VALUE")
    run.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    run.set_defaults(do=train_all)
    table = commands.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.set_defaults(do=make_table)
    for command in (facts, run):
        command.add_argument("--parallel", type=Path, required=True)
    for command in (facts, data, run, table):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
