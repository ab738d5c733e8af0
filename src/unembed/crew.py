"""A crew of threads that finishes several pieces of work side by side, on a CPU.

Decoding is hundreds of small operations a step. Shared among a CPU's cores one by one, each is over before it
was worth the sharing; texts that do not depend on each other are shared better whole. Knows threads and what
torch makes of them; it must not know what the work is.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cache, partial
from queue import SimpleQueue
from typing import TypeVar

import torch

# A worker holds what it works on: more of them would hold too much, and take several of torch's threads each.
MOST_WORKERS = 16
# Rows that all of them together decode at once: what these keep of what they have read is 0.7 GB. Twice as
# many are 3 % faster.
ROWS = 512

Step = TypeVar("Step")

_making = threading.Lock()
_leaving = threading.Event()  # set when the process ends


def crew_size() -> int:
    """How many workers there are for this thread's work: as many as torch would use threads for it."""
    return min(MOST_WORKERS, torch.get_num_threads())


def share(count: int, *, each: int, workers: int) -> list[slice]:
    """Part `count` texts of so many rows each evenly among workers, in more rounds where room is scarce.

    >>> share(5, each=1, workers=2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    most = max(1, ROWS // workers // each)
    rounds = -(-count // (most * workers))
    parts = max(1, min(count, rounds * workers))
    ends = [-(-count * i // parts) for i in range(parts + 1)]
    return [slice(*ends[i : i + 2]) for i in range(parts)]


def finish(works: Sequence[Iterator[Step]]) -> list[Step]:
    """Take each work's steps to the end, several works at a time, and return the last step of each, in order.

    A single one stays in this thread. If one fails, or this thread is interrupted, the others stop after the
    step they are at.
    """
    if len(works) < 2 or _leaving.is_set():
        return [last_step(work) for work in works]
    with _making:
        crew = _crew(crew_size(), torch.get_num_threads(), os.getpid())
    stop = threading.Event()
    tasks = [crew.submit(partial(last_step, work, stop)) for work in works]
    try:
        done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what went wrong there
        return [task.result() for task in tasks]
    finally:
        stop.set()
        wait([task for task in tasks if not task.cancel()])


def last_step(work: Iterator[Step], stop: threading.Event | None = None) -> Step:
    """Return the last step, unless it is to stop before."""
    for step in work:
        last = step
        if stop is not None and (stop.is_set() or _leaving.is_set()):
            raise SystemExit  # of this work: no one waits for it, or only a thread that ends with the process
    return last


class Crew:
    """Threads that take tasks as they come, torch's own threads shared among them.

    A pool of the standard library would refuse tasks of other threads once the main one has ended.
    """

    def __init__(self, workers: int, threads: int) -> None:
        """Start the workers, with so many of torch's threads for all of them."""
        self._tasks = SimpleQueue[Callable[[], None] | None]()
        ready = threading.Barrier(workers + 1)
        each = max(1, threads // workers)
        self._workers = [
            threading.Thread(target=self._serve, args=(ready, each), name=f"unembed-crew-{i}", daemon=True)
            for i in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        ready.wait()
        torch.set_num_threads(threads)  # what a worker has set is also what new threads begin with
        atexit.register(self._leave)

    def submit(self, work: Callable[[], Step]) -> Future[Step]:
        """Have the next worker that is free do it."""
        found = Future[Step]()

        def task() -> None:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(work())
                except BaseException as error:  # whatever it is, it is for who has asked
                    found.set_exception(error)

        self._tasks.put(task)
        return found

    def _serve(self, ready: threading.Barrier, threads: int) -> None:
        """Do one task after the other."""
        torch.get_num_threads()  # torch sets a thread's number up at first use, and would undo an earlier one
        torch.set_num_threads(threads)
        ready.wait()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and what was found, which would else be kept until the next one

    def _leave(self) -> None:
        """Wait until the workers are between two steps: the interpreter would end them within one."""
        _leaving.set()
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.join()


@cache
def _crew(workers: int, threads: int, process: int) -> Crew:
    """Return the crew for so many of torch's threads; a process that was forked needs one of its own."""
    return Crew(workers, threads)
