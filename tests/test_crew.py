"""The crew of threads: works side by side end as one after the other, and none goes on if one fails."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_inverter import E, T, small_inverter

from unembed import beam, crew
from unembed.crew import ROWS, crew_size, finish, share
from unembed.inverter import Inverter


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counting(last: int) -> Iterator[int]:
    yield from range(last + 1)


Seen = list[tuple[str, int]]  # threads, and how many of torch's they have


def meeting(count: int, seen: Seen) -> list[Iterator[int]]:
    """Works that end only if there are so many workers, each at one of them."""
    everyone = threading.Barrier(count, timeout=60)

    def work(number: int) -> Iterator[int]:
        for _ in range(3):
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            everyone.wait()
            yield number

    return [work(i) for i in range(count)]


# Sharing


@given(count=st.integers(1, 300), each=st.integers(1, 200), workers=st.integers(1, 80))
def test_texts_are_shared_evenly_and_within_the_room(count: int, each: int, workers: int) -> None:
    parts = share(count, each=each, workers=workers)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
    assert len(parts) == count or len(parts) % workers == 0  # in the last round no one is idle
    assert max(sizes) * each * workers <= max(ROWS, each * workers)  # one text, if there is room for no more


def test_nothing_is_shared_as_nothing() -> None:
    assert share(0, each=4, workers=2) == [slice(0, 0)]


# Working


def test_the_last_steps_come_in_order() -> None:
    assert finish([counting(i % 7) for i in range(20)]) == [i % 7 for i in range(20)]
    seen: Seen = []
    assert finish(meeting(2, seen)) == [0, 1]
    names = {name for name, _ in seen}
    assert len(names) == 2 and threading.current_thread().name not in names
    assert {threads for _, threads in seen} == {1}


def test_a_single_work_stays_here() -> None:
    seen: Seen = []
    assert finish(meeting(1, seen)) == [0] and finish([]) == []
    assert set(seen) == {(threading.current_thread().name, 2)}


def test_torch_keeps_its_threads_everywhere_else() -> None:
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        seen: Seen = []
        finish(meeting(threads, seen))
        assert len({name for name, _ in seen}) == threads
        assert {count for _, count in seen} == {1}
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == threads


def test_the_crew_is_made_once() -> None:
    finish([counting(1), counting(1)])
    threads = threading.active_count()
    for _ in range(5):
        finish([counting(1), counting(1)])
    assert threading.active_count() == threads


def test_many_threads_of_torch_are_shared_among_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "MOST_WORKERS", 2)
    torch.set_num_threads(5)
    assert crew_size() == 2
    seen: Seen = []
    finish(meeting(2, seen))
    assert len({name for name, _ in seen}) == 2 and {threads for _, threads in seen} == {2}


# Stopping


def test_what_goes_wrong_is_raised_as_it_is_and_the_others_stop() -> None:
    error = ValueError("wrong")
    taken: list[int] = []

    def failing() -> Iterator[int]:
        yield 0
        time.sleep(0.05)
        raise error

    def long() -> Iterator[int]:
        for i in range(10_000):
            taken.append(i)
            time.sleep(0.005)
            yield i

    with pytest.raises(ValueError, match="wrong") as raised:
        finish([long(), failing(), counting(5), long()])
    assert raised.value is error
    count = len(taken)
    assert 0 < count < 1000
    time.sleep(0.05)
    assert len(taken) == count  # when it is raised, no one works any more
    assert finish([counting(3), counting(4)]) == [3, 4]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="of systems with signals to threads")
def test_an_interrupt_stops_the_workers() -> None:
    taken: list[int] = []

    def interrupting() -> Iterator[int]:
        for i in range(10_000):
            taken.append(i)
            if i == 5:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.005)
            yield i

    # A shell that starts a job in the background has it ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            finish([interrupting(), interrupting()])
    finally:
        signal.signal(signal.SIGINT, before)
    count = len(taken)
    time.sleep(0.05)
    assert len(taken) == count < 1000


LEAVING = """
import threading, time, torch
torch.set_num_threads(2)
from unembed.crew import finish

def endless():
    while True:
        time.sleep(0.01)
        yield 0

threading.Thread(target=finish, args=([endless() for _ in range(5)],), daemon=True).start()
time.sleep(0.5)
print("leaving")
"""
# A thread of the user's that Python waits for, and one last call when it has.
STAYING = """
import atexit, threading, time, torch
torch.set_num_threads(2)
from unembed.crew import finish

def work():
    for i in range(5):
        time.sleep(0.1)
        yield i

def often():
    threading.main_thread().join()
    for _ in range(3):
        print(finish([work() for _ in range(3)]))

atexit.register(lambda: print(finish([work(), work()])))
threading.Thread(target=often).start()
print(finish([work(), work()]))
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    return done.stdout


def test_a_process_ends_though_its_workers_are_at_work() -> None:
    assert run(LEAVING) == "leaving\n"


def test_who_outlives_the_main_thread_still_has_a_crew() -> None:
    assert run(STAYING) == "[4, 4]\n" + "[4, 4, 4]\n" * 3 + "[4, 4]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="of systems that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_a_crew_of_its_own() -> None:
    finish([counting(1), counting(1)])
    child = os.fork()
    if not child:
        os._exit(0 if finish([counting(3), counting(4)]) == [3, 4] else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and os.waitstatus_to_exitcode(status) == 0


# Decoding


@torch.inference_mode()
def modes(rows: int) -> Iterator[tuple[bool, torch.Tensor]]:
    for _ in range(3):
        yield torch.is_inference_mode_enabled(), torch.ones(rows)


def test_workers_do_not_record_gradients() -> None:
    for mode, made in finish([modes(1), modes(2)]):
        assert mode and made.is_inference()


@pytest.fixture(scope="module")
def inverter() -> Inverter:
    return small_inverter(embeds=True, embed_share=0.1, bag_weight=0.2)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((23, E)).astype(np.float32)


def in_whole_numbers(inverter: Inverter) -> Inverter:
    return Inverter(
        inverter.model, config=inverter.config, tokenizer=inverter.tokenizer, device="cpu", precision="int8"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "beam", "beams": 5},
        {"strategy": "beam", "beams": 5, "looks": 0},
        {"strategy": "beam", "beams": 3, "guidance": 1.5},
        {"strategy": "confidence", "steps": 4, "temperature": 0.8},
        {"strategy": "euler-remask", "steps": 5},
        {"strategy": "causal", "temperature": 1.0},
        {"strategy": "confidence", "steps": 4, "drafts": 3},
    ],
)
def test_a_crew_answers_as_one_thread_does(
    inverter: Inverter, vectors: np.ndarray, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[int] = []

    def noting(some: Sequence[Iterator[Any]]) -> list[Any]:
        works.append(len(some))
        return finish(some)

    monkeypatch.setattr("unembed.inverter.finish", noting)
    whole = in_whole_numbers(inverter)
    torch.set_num_threads(1)
    one = whole.invert(vectors, seed=7, first=3, **options)
    assert works == [1]
    torch.set_num_threads(3)
    assert whole.invert(vectors, seed=7, first=3, **options) == one  # ids, confidences, passes, likeness
    assert works == [1, 3]
    parts = whole.invert(vectors[:8], seed=7, first=3, **options)
    parts += whole.invert(vectors[8:], seed=7, first=11, batch_size=4, **options)
    assert parts == one
    monkeypatch.setattr(crew, "ROWS", 20)  # in more rounds, where there is less room
    assert whole.invert(vectors, seed=7, first=3, **options) == one
    if options["strategy"] != "beam":
        assert whole.invert(vectors, seed=7, first=4, **options) != one  # draws go by a text's number
    if options["strategy"] == "beam" or "drafts" in options:
        assert all(found.likeness is not None for found in one)


def test_in_floats_too(inverter: Inverter, vectors: np.ndarray) -> None:
    torch.set_num_threads(1)
    one = inverter.invert(vectors, beams=4)
    torch.set_num_threads(2)
    for found, wanted in zip(inverter.invert(vectors, beams=4), one, strict=True):
        assert (found.ids, found.forward_passes) == (wanted.ids, wanted.forward_passes)
        np.testing.assert_allclose(found.confidences, wanted.confidences, atol=1e-5)
        assert found.likeness == pytest.approx(wanted.likeness, abs=1e-5)


def test_all_workers_together_stay_within_the_room(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    search = beam._search

    def noting(model: Any, e: torch.Tensor, **options: Any) -> Any:
        sizes.append(len(e))
        return search(model, e, **options)

    monkeypatch.setattr(beam, "_search", noting)
    monkeypatch.setattr(crew, "ROWS", 64)
    for looks, each in ((0, 4), (2, 2)):  # 8 beams of 4 texts for each of two workers, or twice as many rows
        inverter.invert(vectors, strategy="beam", beams=8, looks=looks)
        assert sum(sizes) == len(vectors) and max(sizes) == each
        sizes.clear()


def test_one_text_has_all_of_torchs_threads(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    ready: Any = inverter.ready
    gist = ready.gist

    def noting(e: torch.Tensor) -> torch.Tensor:
        asked.append((threading.current_thread().name, torch.get_num_threads()))
        return gist(e)

    monkeypatch.setattr(ready, "gist", noting)
    inverter.invert(vectors[0], strategy="beam", beams=4)
    assert asked == [(threading.current_thread().name, 2)]
    inverter.invert(vectors, strategy="beam", beams=4)
    assert len(asked) == 3 and {threads for _, threads in asked[1:]} == {1}


def test_what_goes_wrong_in_a_worker_reaches_the_user(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, ready, calls = RuntimeError("no more memory"), inverter.ready, itertools.count()
    head = ready.head

    def failing(h: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            raise error
        return head(h)

    monkeypatch.setattr(ready, "head", failing)
    with pytest.raises(RuntimeError) as raised:
        inverter.invert(np.concatenate([vectors] * 4), strategy="beam", beams=4)
    assert raised.value is error
    monkeypatch.undo()
    assert len(inverter.invert(vectors, steps=2)) == len(vectors)


def test_several_threads_may_invert_at_once(inverter: Inverter, vectors: np.ndarray) -> None:
    whole = in_whole_numbers(inverter)
    each: list[dict[str, Any]] = [
        {"strategy": "beam", "beams": 4},
        {"steps": 4, "temperature": 1.0, "seed": 1},
        {"steps": 4, "drafts": 3, "seed": 2},
        {"steps": T, "seed": 3},
    ]
    wanted = [whole.invert(vectors, **options) for options in each]
    with ThreadPoolExecutor(4) as callers:
        tasks = [callers.submit(whole.invert, vectors, **options) for options in each * 3]
        assert [task.result() for task in tasks] == wanted * 3
