"""What each term is worth by which one of a beam's texts is chosen: more and more of them, the same beams.

    python recipes/choice.py TEXTS.txt ... [--limit 150] --out benchmarks/results/choice-cpu.json

Figures are token F1 and exact match, with the paired difference to likelihood alone and its standard error;
and those of the best text among the beams, which no choice can pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unembed import Inverter, choice
from unembed.config import ModelConfig
from unembed.metrics import token_f1
from unembed.readable import content_lengths
from unembed.scoring import refer

TERMS = ("HEARING", "COVERAGE", "REPEATS", "AGREEMENT", "LIKENESS")


@dataclass(frozen=True)
class Kept:
    """What a beam hands over to be chosen from."""

    ids: Tensor  # (B, K, T), the likeliest first
    score: Tensor  # (B, K)
    heard: Tensor | None  # (B, V)
    likeness: Tensor | None  # (B, K)

    def rescored(self, config: ModelConfig) -> Tensor:
        """Score them by what counts now, (B, K)."""
        return choice.rescore(self.ids, self.score, heard=self.heard, likeness=self.likeness, config=config)


@contextmanager
def catching() -> Iterator[list[Kept]]:
    """Collect what beams hand over."""
    caught: list[Kept] = []

    def catch(
        ids: Tensor,
        score: Tensor,
        *,
        heard: Tensor | None,
        likeness: Tensor | None = None,
        config: ModelConfig,
    ) -> Tensor:
        told = (None if known is None else known.cpu() for known in (heard, likeness))
        caught.append(Kept(ids.cpu(), score.cpu(), *told))
        return score

    before, choice.rescore = choice.rescore, catch
    try:
        yield caught
    finally:
        choice.rescore = before


@contextmanager
def only(*terms: str) -> Iterator[None]:
    """Let these terms alone count."""
    before = {name: getattr(choice, name) for name in TERMS}
    try:
        for name in TERMS:
            setattr(choice, name, before[name] if name in terms else 0.0)
        yield
    finally:
        for name, value in before.items():
            setattr(choice, name, value)


def measure(inverter: Inverter, texts: list[str]) -> dict[str, dict[str, float]]:
    """Figures of texts by likelihood alone, and with one term after the other."""
    references = refer(
        texts, tokenizer=inverter.tokenizer, encoder=inverter.encoder(), max_tokens=inverter.max_tokens
    )
    with catching() as caught:
        # One after the other: threads that share texts would hand them over in any order. And without looks,
        # by which some texts have more to choose from than others.
        for vector in references.vectors:
            inverter.invert(vector, strategy="beam", looks=0)
    every = torch.cat([kept.ids for kept in caught]).numpy()
    lengths = content_lengths(every.reshape(-1, every.shape[2]), end_id=inverter.config.model.end_id)
    pairs = list(zip(references.ids, every, lengths.reshape(every.shape[:2]), strict=True))
    f1 = np.array([[token_f1(a, b[:n]) for b, n in zip(beams, ns, strict=True)] for a, beams, ns in pairs])
    exact = np.array(
        [[np.array_equal(a, b[:n]) for b, n in zip(beams, ns, strict=True)] for a, beams, ns in pairs]
    )
    figures: dict[str, dict[str, float]] = {}
    plain = f1[:, 0]
    for count in range(len(TERMS) + 1):
        with only(*TERMS[:count]):
            best = [kept.rescored(inverter.config.model).argmax(1) for kept in caught]
        chosen = np.arange(len(f1)), torch.cat(best).numpy()
        more = f1[chosen] - plain
        figures[TERMS[count - 1].lower() if count else "likelihood"] = {
            "f1": f1[chosen].mean(),
            "exact": exact[chosen].mean(),
            "more": more.mean(),
            "error": more.std() / len(more) ** 0.5,
        }
    figures["best"] = {"f1": f1.max(1).mean(), "exact": exact.max(1).mean()}
    return {name: {key: round(float(v), 4) for key, v in each.items()} for name, each in figures.items()}


def main() -> None:
    """Measure every file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    inverter = Inverter.from_pretrained(args.model)
    sets = {
        path.stem: measure(inverter, path.read_text(encoding="utf-8").splitlines()[: args.limit])
        for path in args.texts
    }
    weights = {name.lower(): getattr(choice, name) for name in (*TERMS, "UNIT")}
    found = {"weights": weights, "limit": args.limit, "sets": sets}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
