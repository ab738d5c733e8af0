"""Requests in, batches out: a thread that owns a model, and a bounded queue in front of it.

Knows asyncio and threads; must not know what the work is. The event loop only ever puts jobs into
the queue and waits for what the thread tells them, so it never blocks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unembed.errors import UnembedError
from unembed.server.telemetry import Telemetry

Payload = TypeVar("Payload")
Event = TypeVar("Event")
# A batch of payloads in; for each step one event a payload out, None where there is nothing to tell.
Work = Callable[[list[Payload]], Iterator[Sequence[Event | None]]]

LINGER = 0.003  # seconds an idle thread waits for company: little beside a pass, and bursts go together
log = logging.getLogger("unembed.server")


class BusyError(Exception):
    """The queue is full."""

    def __init__(self, retry_after: int) -> None:
        """Say after how many seconds to come back."""
        super().__init__(f"the queue is full; try again in {retry_after} s.")
        self.retry_after = retry_after


class BrokenError(Exception):
    """The work failed for a reason that is not the client's; what it was is in the log."""


@dataclass(frozen=True)
class Queue:
    """How a lane fills and empties."""

    max_batch: int  # payloads taken together at most
    places: int  # payloads that may wait
    seconds: float  # how long a job may take, waiting included


class Job(Generic[Payload, Event]):
    """One payload on its way through a lane. Iterate over it to hear of its steps."""

    def __init__(self, key: Hashable, payload: Payload, *, seconds: float) -> None:
        """Belong to the running event loop."""
        self.key, self.payload = key, payload
        self.left = False  # its client has gone: nobody listens
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._told: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    def tell(self, event: Event | Exception | None) -> None:
        """Pass an event on from the thread: an exception ends the job badly, None well."""
        try:
            self._loop.call_soon_threadsafe(self._told.put_nowait, event)
        except RuntimeError:  # the loop is closed: the server is going down
            self.left = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events until the job is done; TimeoutError if that takes too long, waiting included."""
        while True:
            async with asyncio.timeout_at(self._deadline):
                event = await self._told.get()
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event


class Lane(Generic[Payload, Event]):
    """A bounded queue and the thread that works it off, batch by batch."""

    def __init__(self, name: str, work: Work[Payload, Event], *, queue: Queue, telemetry: Telemetry) -> None:
        """Prepare; `start` sets it going.

        Args:
            name: What the figures call it.
            work: What is done with a batch.
            queue: How many may wait, go together, and for how long.
            telemetry: Where batches are counted.
        """
        self.name, self._work, self._queue, self._telemetry = name, work, queue, telemetry
        self._waiting: deque[Job[Payload, Event]] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._pace = 1.0  # seconds a batch takes, a running mean
        self._thread = threading.Thread(target=self._run, name=f"unembed-{name}", daemon=True)
        telemetry.watch(name, lambda: len(self._waiting))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more batches; the one under way ends at its next step, as nobody listens any more."""
        with self._change:
            self._closed = True
            self._change.notify()

    @property
    def alive(self) -> bool:
        """Whether the thread does its work."""
        return self._thread.is_alive()

    @contextmanager
    def places(
        self, payloads: Sequence[Payload], *, key: Hashable = None, bounded: bool = True
    ) -> Iterator[list[Job[Payload, Event]]]:
        """Hold a place in the queue for each payload, all or none; leaving the block frees them.

        Args:
            payloads: What to work on.
            key: Only payloads of equal keys share a batch.
            bounded: False for work that follows from a request already let in.
        """
        jobs = [Job[Payload, Event](key, payload, seconds=self._queue.seconds) for payload in payloads]
        with self._change:
            if bounded and len(self._waiting) + len(jobs) > self._queue.places:
                raise BusyError(self._retry_after())
            self._waiting.extend(jobs)
            self._change.notify()
        try:
            yield jobs
        finally:
            self._leave(jobs)

    def _leave(self, jobs: list[Job[Payload, Event]]) -> None:
        """Take jobs that still wait out of the queue, and mark the rest as unheard."""
        with self._change:
            waiting = {id(job) for job in self._waiting}
            gone = [job for job in jobs if id(job) in waiting]
            for job in gone:
                self._waiting.remove(job)
            for job in jobs:
                job.left = True
        if gone:
            self._telemetry.left(self.name, len(gone))

    def _retry_after(self) -> int:
        """Seconds until the queue should have room for a batch."""
        return min(60, max(1, math.ceil(self._pace * len(self._waiting) / self._queue.max_batch)))

    def _take(self) -> list[Job[Payload, Event]]:
        """Wait for jobs and take the longest waiting, with those that may go with it; none when closed."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
        time.sleep(LINGER)
        with self._change:
            if self._closed or not self._waiting:
                return []
            key = self._waiting[0].key
            batch = [job for job in self._waiting if job.key == key][: self._queue.max_batch]
            chosen = {id(job) for job in batch}
            self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
        return batch

    def _run(self) -> None:
        """Work until closed."""
        while not self._closed:
            if batch := self._take():
                begin = time.monotonic()
                self._telemetry.batch(self.name, len(batch))
                self._work_off(batch)
                self._pace += 0.3 * (time.monotonic() - begin - self._pace)

    def _work_off(self, batch: list[Job[Payload, Event]]) -> None:
        """Do the work of a batch and tell each job of its part."""
        end: Exception | None = None
        try:
            for events in self._work([job.payload for job in batch]):
                for job, event in zip(batch, events, strict=True):
                    if event is not None and not job.left:
                        job.tell(event)
                if self._closed or all(job.left for job in batch):
                    return
        except UnembedError as error:
            end = error
        except Exception as error:
            log.error("%s failed: %s", self.name, place_of(error))
            end = BrokenError()
        for job in batch:
            job.tell(end)


def place_of(error: BaseException) -> str:
    """Name the kind of an error and where it was raised; its message may quote a text, so it is left out."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "unknown"
    return f"{type(error).__name__} at {where}"
