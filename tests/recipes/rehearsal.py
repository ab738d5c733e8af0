"""Recipes run at sizes for a rehearsal: on encoders that are at hand, in this process or by a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovering import FakeEncoder, make_tokenizer
from torch import Tensor

from unembed.config import Config
from unembed.inverter import Inverter
from unembed.model import Denoiser

RECIPES = Path(__file__).parent.parent.parent / "recipes"
TINY = "steps=2 validation=8 batch_size=16 warmup=1 layers=1 hidden=16 heads=2 ffn=16 adaln_rank=0".split()


# Leaves the figures of what it was asked to train, for which scripts wait.
FAKE = """#!/bin/sh
echo "$@" >> {folder}/asked
echo "{{}}"
for word in "$@"; do
  if [ "$2 $before" = "train --out" ]; then mkdir -p "$word" && echo "{{}}" > "$word/figures.json"; fi
  before=$word
done
[ "$2" != {fail} ]
"""


def open_inverter(*, causal: bool, embeds: bool = False) -> Inverter:
    """An inverter that has learnt nothing, for an encoder that is at hand."""
    tokenizer = make_tokenizer()
    config = Config().override(
        encoder="fake", layers=1, hidden=16, heads=2, ffn=16, adaln_rank=0, max_tokens=32, causal=causal,
        embeds=embeds, vocab_size=tokenizer.size, mask_id=tokenizer.mask_id, end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id, embedding_size=FakeEncoder.size,
    )  # fmt: skip
    torch.manual_seed(0)
    inverter = Inverter(Denoiser(config.model), config=config, tokenizer=tokenizer, device="cpu")
    inverter._encoder = FakeEncoder()
    return inverter


class SpanEncoder(FakeEncoder):
    """Embeds the spans of passages, too."""

    tokenizer = make_tokenizer()

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = zip(ids.tolist(), lengths.tolist(), strict=True)
        return torch.from_numpy(self.encode(self.tokenizer.decode([row[:n] for row, n in rows])))


class OtherEncoder(SpanEncoder):
    """Another encoder of the same vocabulary: it does not know one word, and has a size of its own."""

    name = "other"
    size = 12

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        known = [[text.strip() != "roof"] for text in texts]
        return super().encode(texts) * np.array(known, np.float32)


def with_texts(folder: Path, here: Path, *texts: str) -> None:
    """Put texts to measure on, and a folder's data to train on, where `run_recipe` looks for them."""
    (here / "texts").mkdir()
    (here / "texts" / "few.txt").write_text("".join(f"{text}\n" for text in texts))
    (here / "data").symlink_to(folder / "data")


def run_recipe(
    module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    """Run a recipe at sizes for a rehearsal; return the line that it prints."""
    where = ["--data", str(folder / "data"), "--texts", str(folder / "texts"), "--lock", str(folder / "lock")]
    given = ["steps=12", "validation=8", "warmup=2", "learning_rate=0.003", "--tiny"]
    monkeypatch.setattr(sys, "argv", [module.__name__, *more, *where, *given])
    module.main()
    line: dict[str, Any] = json.loads(capsys.readouterr().out)
    return line


def speak(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, script: str, *words: object, fields: Sequence[str] = ()
) -> None:
    """Call a recipe as from a command line."""
    more = ["--set", *fields, "compile=False"] if fields else []
    monkeypatch.setattr(sys, "argv", [script, *map(str, words), *more])
    recipe(script).main()


def asked_by(
    script: str, tmp_path: Path, *, fail: str = "none", where: Sequence[object] = ("data", "texts"),
    **environment: str,
) -> list[list[str]]:  # fmt: skip
    """Run a script with a python that does little but write down what it was asked for."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE.format(folder=tmp_path, fail=fail))
    fake.chmod(0o755)
    (tmp_path / "asked").write_text("")
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", RECIPES / script, *map(str, where), tmp_path / "out"],
        env={**os.environ, **environment, "PATH": path}, cwd=RECIPES.parent, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (fail == "none")
    return [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
