"""A command line in this process, and files for it to work on; the encoder is loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.commands import SIZE, TEXTS, Result, Run
from unembed.backbone import build
from unembed.cli import main
from unembed.config import Config, ModelConfig
from unembed.encoders import Encoder, load_encoder
from unembed.inverter import Inverter


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def run(*argv: object) -> Result:
        code = 0
        capsys.readouterr()
        try:
            main([str(token) for token in argv])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    """MiniLM with its real weights, loaded once."""
    return load_encoder("all-MiniLM-L6-v2", device="cpu")


@pytest.fixture(autouse=True)
def load_once(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every command the encoder that is loaded already; other names go the usual way."""

    def load(name: Any, **options: Any) -> Encoder:
        return encoder if name == encoder.name else load_encoder(name, **options)

    monkeypatch.setattr("unembed.encoders.load_encoder", load)


@pytest.fixture(scope="session")
def model(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random inverter, saved."""
    tokenizer = encoder.tokenizer  # type: ignore[attr-defined]
    shape = ModelConfig(
        layers=1,
        hidden=32,
        heads=2,
        ffn=64,
        adaln_rank=0,
        vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id,
        end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id,
        embedding_size=SIZE,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "random"
    Inverter(build(shape), config=Config(model=shape), tokenizer=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three random vectors."""
    path = tmp_path_factory.mktemp("vectors") / "v.npy"
    np.save(path, np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32))
    return path


@pytest.fixture(scope="session")
def prepared(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared pairs of eight short texts."""
    from unembed.corpus import prepare

    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(TEXTS, encoder=encoder, out=folder, max_tokens=12)
    return folder
