"""Every piece of Python in the README and the docs runs, on a small model of random weights."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from recovering import FakeEncoder, make_tokenizer

from unembed.backbone import build
from unembed.classical import save_table
from unembed.config import Config
from unembed.inverter import DEFAULT_MODEL, Inverter
from unembed.surrogate import DistilledEncoder, Surrogate

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


@pytest.fixture
def inverter() -> Inverter:
    """As the bundled one is: it reads left to right, guesses vectors, and has both kinds of encoder."""
    tokenizer = make_tokenizer()
    config = Config().override(
        encoder="fake", layers=1, hidden=16, heads=2, ffn=32, max_tokens=32, vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id,
        embedding_size=FakeEncoder.size, adaln_rank=0, causal=True, embeds=True,
        embed_share=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Inverter(build(config.model), config=config, tokenizer=tokenizer, device="cpu")
    made._encoder = FakeEncoder()
    made.distilled(
        DistilledEncoder(Surrogate(config.model), config=config, tokenizer=tokenizer, device="cpu")
    )
    return made


@pytest.mark.parametrize("page", [page for page, examples in PAGES.items() if examples])
def test_examples_run(page: str, inverter: Inverter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str = DEFAULT_MODEL) -> Inverter:
        assert name == DEFAULT_MODEL
        return inverter

    monkeypatch.setattr(Inverter, "from_pretrained", load)
    monkeypatch.chdir(tmp_path)
    # What the pages take for granted.
    Path("heldout.jsonl").write_text('{"text": "the cat sat on the mat"}\n', encoding="utf-8")
    Path("runs/encoders").mkdir(parents=True)
    table = np.ones((inverter.tokenizer.size, 4))
    save_table("runs/encoders/static", table, tokenizer=inverter.tokenizer, kind="static", facts={})
    vectors = FakeEncoder().encode(["the old dog ran", "a red bird"])
    names = {"vectors": vectors, "vector": vectors[0]}
    for example in PAGES[page]:  # what comes later on a page may use what came before
        exec(compile(example, page, "exec"), names)
