"""What the server does with a batch: embed texts, decode vectors, compare the two.

Joins an inverter, an encoder and the lanes in front of them; must not know of HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unembed.decode import Draft, FittedOptions, decode
from unembed.encoders import Encoder
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.readable import read_step
from unembed.results import Round, Step
from unembed.server.batching import Event, Job, Lane, Payload, Queue
from unembed.server.telemetry import Telemetry


@dataclass(frozen=True)
class Limits:
    """How much one visitor, and all of them together, may ask for."""

    max_batch: int = 32  # rows in one forward pass
    queue: int = 256  # rows that may wait; beyond, 429
    vectors: int = 64  # in one request, and texts
    text_length: int = 2000  # characters
    rounds: int = 20  # of search
    body_bytes: int = 2_000_000
    seconds: float = 60.0  # for one request, waiting included
    searches: int = (
        16  # that may wait; a search takes rounds of many passes, so they have a queue of their own
    )
    search_seconds: float = 300.0


@dataclass(frozen=True)
class Encoding:
    """A text as the model sees it, and its vector."""

    text: str  # as cut to the model's length
    truncated: bool
    ids: list[int]
    pieces: list[str]
    vector: list[float]


@dataclass(frozen=True)
class Row:
    """A vector to decode."""

    e: Tensor  # (E,), checked
    options: FittedOptions
    seed: int
    number: int  # which of its request's vectors it is: the seed's draws go by it
    live: bool  # whether every step is wanted, or the last only


@dataclass(frozen=True)
class Quest:
    """A text to search for."""

    vector: Sequence[float]
    options: FittedOptions
    seed: int
    rounds: int
    candidates: int


@dataclass(frozen=True)
class Progress:
    """A row after a step."""

    step: Step
    forward_passes: int


class Service:
    """One inverter and its encoder, shared by everyone who asks."""

    def __init__(
        self, inverter: Inverter, encoder: Encoder | None, *, limits: Limits, telemetry: Telemetry
    ) -> None:
        """Set up the lanes.

        Args:
            inverter: What turns vectors into text.
            encoder: What turns text into vectors; without one, only vectors can be sent.
            limits: How much may be asked for.
            telemetry: Where it is counted.
        """
        if encoder is not None:
            inverter.check_encoder(encoder)
        self.inverter, self.limits = inverter, limits
        self.encoder = _OneAtATime(encoder) if encoder is not None else None
        queue = Queue(limits.max_batch, limits.queue, limits.seconds)
        self._decoding = Lane[Row, Progress]("decode", self._decode, queue=queue, telemetry=telemetry)
        self._encoding = Lane[str, np.ndarray]("encode", self._encode, queue=queue, telemetry=telemetry)
        alone = Queue(1, limits.searches, limits.search_seconds)
        self._searching = Lane[Quest, Round]("search", self._search, queue=alone, telemetry=telemetry)
        self._lanes: list[Lane] = [self._decoding, self._encoding, self._searching]

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes:
            lane.start()

    def stop(self) -> None:
        """End them."""
        for lane in self._lanes:
            lane.stop()

    @property
    def alive(self) -> bool:
        """Whether every thread does its work."""
        return all(lane.alive for lane in self._lanes)

    async def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Embed texts, cut to the model's length."""
        if self.encoder is None:
            raise UnembedError("this server has no encoder; send vectors instead of texts.")
        for text in texts:
            if not text.strip():
                raise UnembedError("a text is blank; leave it out.")
            if len(text) > self.limits.text_length:
                raise UnembedError(
                    f"a text has {len(text)} characters; expected {self.limits.text_length} at most."
                )
        tokenizer = self.inverter.tokenizer
        cut = tokenizer.encode(texts, max_tokens=self.inverter.max_tokens)
        rows = [ids[:length] for ids, length in zip(cut.ids, cut.lengths, strict=True)]
        with self._encoding.places(cut.texts) as jobs:
            vectors = [await last(job) for job in jobs]
        return [
            Encoding(text, bool(long), ids.tolist(), tokenizer.pieces(ids), vector.tolist())
            for text, long, ids, vector in zip(cut.texts, cut.truncated, rows, vectors, strict=True)
        ]

    async def invert(
        self, vectors: Sequence[Sequence[float]], options: FittedOptions, seed: int
    ) -> list[Progress]:
        """Recover a text from each vector."""
        rows = self._rows(vectors, options, seed, live=False)
        with self._decoding.places(rows, key=options) as jobs:
            return [await last(job) for job in jobs]

    @contextmanager
    def stream(
        self, vector: Sequence[float], options: FittedOptions, seed: int
    ) -> Iterator[Job[Row, Progress]]:
        """Decode one vector while the block lasts; the job tells of each step."""
        rows = self._rows([vector], options, seed, live=True)
        with self._decoding.places(rows, key=options) as (job,):
            yield job

    @contextmanager
    def search(self, quest: Quest) -> Iterator[Job[Quest, Round]]:
        """Search for one text while the block lasts; the job tells of each round."""
        if self.encoder is None:
            raise UnembedError("this server has no encoder to search with; leave rounds out.")
        if quest.rounds > self.limits.rounds:
            raise UnembedError(f"rounds must be {self.limits.rounds} at most, not {quest.rounds}.")
        with self._searching.places([quest]) as (job,):
            yield job

    async def cosine(self, vector: Sequence[float], text: str) -> float | None:
        """How close the encoder finds a recovered text to its vector; 0 for a blank text."""
        if self.encoder is None:
            return None
        if not text.strip():
            return 0.0
        with self._encoding.places([text], bounded=False) as (job,):
            again = await last(job)
        known = np.asarray(vector)
        norms = float(np.linalg.norm(again) * np.linalg.norm(known))
        return float(again @ known) / max(norms, 1e-12)

    def _rows(
        self, vectors: Sequence[Sequence[float]], options: FittedOptions, seed: int, *, live: bool
    ) -> list[Row]:
        """Check vectors."""
        e = self.inverter.check_vectors(vectors)
        return [Row(vector, options, seed, number, live) for number, vector in enumerate(e)]

    def _encode(self, texts: list[str]) -> Iterator[list[np.ndarray]]:
        """Embed a batch."""
        assert self.encoder is not None
        yield list(self.encoder.encode(texts, batch_size=len(texts)))

    def _decode(self, rows: list[Row]) -> Iterator[list[Progress | None]]:
        """Decode a batch of rows that share their options, step by step."""
        inverter, options = self.inverter, rows[0].options
        # Each row brings its own draws, so its text does not depend on who shares the batch.
        uniforms = torch.cat(
            [options.draw(r.number, r.number + 1, config=inverter.config.model, seed=r.seed) for r in rows]
        ).to(inverter.device)
        e = torch.stack([row.e for row in rows])
        drafts = decode(
            inverter.ready, e, options=options, diffusion=inverter.config.diffusion, uniforms=uniforms
        )
        for index in range(1, options.steps + 1):
            draft = next(drafts)
            wanted = [row.live or index == options.steps for row in rows]
            yield [
                self._progress(draft, i, index, options.steps) if want else None
                for i, want in enumerate(wanted)
            ]

    def _search(self, quests: list[Quest]) -> Iterator[list[Round]]:
        """Search for one text."""
        (quest,) = quests
        for found in self.inverter.search(
            quest.vector,
            encoder=self.encoder,
            rounds=quest.rounds,
            candidates=quest.candidates,
            seed=quest.seed,
            **asdict(quest.options),
        ):
            yield [found]

    def _progress(self, draft: Draft, row: int, index: int, steps: int) -> Progress:
        """Make a row of a draft readable."""
        inverter, alone = self.inverter, draft.take(slice(row, row + 1))
        step = read_step(
            alone, index=index, total=steps, tokenizer=inverter.tokenizer, config=inverter.config.model
        )
        return Progress(step, int(draft.passes[row]))


class _OneAtATime:
    """An encoder that several threads may call: tokenizers of other libraries do not bear that."""

    def __init__(self, encoder: Encoder) -> None:
        """Wrap an encoder."""
        self._encoder, self._lock = encoder, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """What the encoder has; its two ways to embed take turns."""
        value = getattr(self._encoder, name)
        return self._in_turn(value) if name in ("encode", "encode_ids") else value

    def _in_turn(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*args: Any, **options: Any) -> Any:
            with self._lock:
                return call(*args, **options)

        return wait_and_call


async def last(job: Job[Payload, Event]) -> Event:
    """Wait for a job's last event."""
    found: list[Event] = [event async for event in job]
    return found[-1]
