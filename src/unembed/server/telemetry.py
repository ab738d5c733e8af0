"""What is counted, and how Prometheus reads it. Knows numbers and labels, never texts."""

from __future__ import annotations

import bisect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start from nothing."""
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, label: str) -> Iterator[str]:
        """Write the cumulative buckets, the sum and the count."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum:.6f}"
        yield f"{name}_count{{{label}}} {total}"


class Telemetry:
    """The server's figures; worker threads and the event loop both write here."""

    def __init__(self) -> None:
        """Start from nothing."""
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self._rows: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(ROWS))
        self._in_flight = 0
        self._left: Counter[str] = Counter()
        self._waiting: dict[str, Callable[[], int]] = {}

    def watch(self, lane: str, waiting: Callable[[], int]) -> None:
        """Ask `waiting` for the length of a lane's queue whenever figures are wanted."""
        self._waiting[lane] = waiting

    def begin(self) -> None:
        """Count a request that came in."""
        with self._lock:
            self._in_flight += 1

    def end(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or given up."""
        with self._lock:
            self._in_flight -= 1
            self._requests[path, status] += 1
            self._seconds[path].add(seconds)

    def batch(self, lane: str, rows: int) -> None:
        """Count a batch that went through a model."""
        with self._lock:
            self._rows[lane].add(rows)

    def left(self, lane: str, rows: int) -> None:
        """Count rows whose client left before they were done."""
        with self._lock:
            self._left[lane] += rows

    def text(self) -> str:
        """All figures in Prometheus' text format."""
        with self._lock:
            return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("unembed_requests_total", "counter", "Requests answered, by path and status.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'unembed_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from _head("unembed_requests_in_flight", "gauge", "Requests being answered now.")
        yield f"unembed_requests_in_flight {self._in_flight}"
        yield from _head("unembed_queue_rows", "gauge", "Rows waiting for a batch.")
        for lane, waiting in self._waiting.items():
            yield f'unembed_queue_rows{{lane="{lane}"}} {waiting()}'
        yield from _head("unembed_left_rows_total", "counter", "Rows given up because their client left.")
        for lane in self._waiting:
            yield f'unembed_left_rows_total{{lane="{lane}"}} {self._left[lane]}'
        yield from _head("unembed_batch_rows", "histogram", "Rows that went through a model together.")
        for lane, rows in sorted(self._rows.items()):
            yield from rows.lines("unembed_batch_rows", f'lane="{lane}"')
        yield from _head("unembed_request_seconds", "histogram", "Seconds from request to end of answer.")
        for path, seconds in sorted(self._seconds.items()):
            yield from seconds.lines("unembed_request_seconds", f'path="{path}"')


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
