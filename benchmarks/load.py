"""How the server bears many visitors: streams at once, with and without batching, in the same run.

    python benchmarks/load.py --out benchmarks/results/load-cpu.json

Starts `unembed serve` twice on free ports of this machine, once as it comes and once with batches of
one, and sends each the same streams by turns. Every stream's text is compared with what the same
vector and seed gave alone, so a stream that is lost or mixed up with another is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

TEXTS = [
    "Our flight was cancelled because of the snow.",
    "She bought a new bicycle for her birthday.",
    "John takes insulin twice a day for his diabetes.",
    "My password for the bank is sunflower.",
    "The museum is free on the first Sunday of the month.",
    "He forgot his umbrella on the bus again.",
    "We had soup and bread for dinner.",
    "The train to Paris leaves at nine.",
]
STEPS = 4
# Streams sent for each number that run at once; enough to fill it, and never long.
STREAMS = {1: 8, 8: 24, 32: 64, 128: 128}
DEADLINE = 120.0  # seconds a level may take


class Server:
    """`unembed serve` in a process of its own."""

    def __init__(self, *options: str) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "unembed", "serve", "--port", "0", "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = "".join(iter(self.process.stdout.readline, "}\n"))
        self.url = json.loads(said + "}")["url"]
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.2)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)

    def megabytes(self) -> float | None:
        """Memory the process holds, where the system tells."""
        status = Path(f"/proc/{self.process.pid}/status")
        found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
        return round(int(found[1]) / 1024, 1) if found else None

    def batches(self) -> tuple[float, float]:
        """Batches so far, and rows in them."""
        text = httpx.get(f"{self.url}/metrics").text
        count, rows = (
            re.search(rf'unembed_batch_rows_{what}{{lane="decode"}} (\S+)', text) for what in ("count", "sum")
        )
        return (float(count[1]), float(rows[1])) if count and rows else (0.0, 0.0)


async def one_stream(client: httpx.AsyncClient, vector: list[float], seed: int) -> dict[str, Any]:
    """Follow a stream to its end: its text, and when the first and the last event came."""
    body = {"vector": vector, "steps": STEPS, "strategy": "euler", "seed": seed}
    begin, first, name, text, steps = time.perf_counter(), None, "", None, 0
    async with client.stream("POST", "/api/stream", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                first = first or time.perf_counter() - begin
                name = line.removeprefix("event: ")
                steps += name == "step"
            elif name == "done" and line.startswith("data: "):
                text = json.loads(line.removeprefix("data: "))["text"]
    complete = text is not None and steps == STEPS
    return {"text": text if complete else None, "first": first, "last": time.perf_counter() - begin}


async def load(
    url: str, vectors: list[list[float]], *, at_once: int, streams: int
) -> tuple[list[dict[str, Any]], float]:
    """Send streams, so many at once; return how each went and the seconds they took together."""
    waiting = list(range(streams))
    results: list[dict[str, Any]] = [{} for _ in waiting]
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=limits) as client:

        async def visitor() -> None:
            while waiting:
                number = waiting.pop(0)
                results[number] = await one_stream(client, vectors[number % len(vectors)], number)

        begin = time.perf_counter()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*(visitor() for _ in range(at_once)))
    return results, time.perf_counter() - begin


def measure(
    server: Server, vectors: list[list[float]], expected: list[str], *, at_once: int
) -> dict[str, Any]:
    """Load a server, and say how it went."""
    streams, before = STREAMS[at_once], server.batches()
    results, seconds = asyncio.run(load(server.url, vectors, at_once=at_once, streams=streams))
    after, lasts = server.batches(), sorted(result["last"] for result in results)
    percentiles = statistics.quantiles(lasts, n=100, method="inclusive")
    return {
        "streams": streams,
        "texts_per_second": round(streams / seconds, 2),
        "seconds": {f"p{p}": round(percentiles[p - 1], 3) for p in (50, 95, 99)},
        "first_event_p50": round(statistics.median(result["first"] or seconds for result in results), 3),
        "mean_batch": round((after[1] - before[1]) / max(after[0] - before[0], 1), 2),
        "lost": sum(result["text"] is None for result in results),
        "mixed_up": sum(
            result["text"] not in (None, expected[number]) for number, result in enumerate(results)
        ),
        "megabytes_after": server.megabytes(),
    }


def main() -> None:
    """Load both servers at every level and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", type=int, nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "hardware": f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "steps": STEPS,
        "levels": {},
    }
    with ExitStack() as stack:
        ways = {
            "batched": stack.enter_context(Server()),
            "one_by_one": stack.enter_context(Server("--max-batch", "1")),
        }
        reply = httpx.post(f"{ways['batched'].url}/api/encode", json={"texts": TEXTS}, timeout=60)
        vectors = [each["vector"] for each in reply.json()["encodings"]]
        # What each number's stream says when it is alone.
        most = max(STREAMS[level] for level in args.levels)
        alone, _ = asyncio.run(load(ways["one_by_one"].url, vectors, at_once=1, streams=most))
        expected = [each["text"] for each in alone]
        asyncio.run(load(ways["batched"].url, vectors, at_once=8, streams=16))  # warm up
        result["megabytes_before"] = {name: server.megabytes() for name, server in ways.items()}
        for level in args.levels:
            row = {name: measure(s, vectors, expected, at_once=level) for name, s in ways.items()}
            row["ratio"] = round(
                row["batched"]["texts_per_second"] / row["one_by_one"]["texts_per_second"], 2
            )
            result["levels"][str(level)] = row
            print(level, json.dumps(row))
        # Larger batches hold more memory, once; the same load again must not.
        level = min(32, max(args.levels))
        again = [measure(ways["batched"], vectors, expected, at_once=level) for _ in range(3)]
        result["megabytes_again"] = [each["megabytes_after"] for each in again]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
