"""A server to test against: a tiny random model, a fake encoder, a real port on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import uvicorn

from unembed.backbone import build
from unembed.checkpoint import bundled_models
from unembed.config import Config, ModelConfig
from unembed.inverter import Inverter
from unembed.server import create_app
from unembed.tokens import TextTokenizer

SIZE = 8


class WordEncoder:
    """Adds up a vector for each word: cheap, and different texts have different vectors."""

    name, size = "words", SIZE

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        rows = [sum(map(self._word, text.lower().split()), np.zeros(SIZE)) for text in texts]
        return np.asarray(rows, np.float32)

    def _word(self, word: str) -> np.ndarray:
        return np.random.default_rng(list(word.encode())).standard_normal(SIZE)


class Gate:
    """Stands before the model: counts passes, and holds them up while it is closed."""

    def __init__(self, inverter: Inverter) -> None:
        self.passes: list[int] = []  # rows of each pass
        self.open = threading.Event()
        self.open.set()
        self.close_after: int | None = None  # passes from now
        self.error: Exception | None = None
        for way in ("hidden", "read"):  # all places at once, or from left to right
            setattr(inverter.model, way, partial(self._pass, getattr(inverter.model, way)))

    def _pass(self, through: Any, xt: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        self.passes.append(len(xt))
        if self.close_after is not None:
            if self.close_after == 0:
                self.open.clear()
            self.close_after -= 1
        assert self.open.wait(timeout=20)
        if self.error is not None:
            raise self.error
        found: torch.Tensor = through(xt, *args, **options)
        return found


def tiny_inverter() -> Inverter:
    """One layer, random weights, MiniLM's vocabulary."""
    (folder,) = list(bundled_models().values())[:1]
    tokenizer = TextTokenizer.load(folder)
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
        max_tokens=12,
        causal=True,
        embeds=True,
    )
    config = Config(encoder="words", model=shape).override(embed_share=0.1)
    torch.manual_seed(0)
    return Inverter(build(shape), config=config, tokenizer=tokenizer, device="cpu")


class Served:
    """A server that runs in a thread of this process."""

    def __init__(self, **options: Any) -> None:
        """Take a free port; options go to `create_app`."""
        self.inverter = options.pop("inverter", None) or tiny_inverter()
        self.gate = Gate(self.inverter)
        self.encoder = options.pop("encoder", WordEncoder())
        app = create_app(self.inverter, encoder=self.encoder, name="tiny", **options)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        """End it; streams that are under way break off."""
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self.gate.open.set()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Served]:
    """Serve while the block lasts."""
    served = Served(**options)
    served.start()
    try:
        yield served
    finally:
        served.gate.open.set()
        served.stop()
