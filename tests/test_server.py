"""The server: every path, batches, limits, who may enter, and what is never said."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import numpy as np
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from serving import SIZE, Served, WordEncoder, serving, tiny_inverter

from unembed.cli import COMMANDS, main
from unembed.server import Limits
from unembed.server.app import NO_JSON, WEB
from unembed.server.telemetry import Histogram
from unembed.strategies import STRATEGIES
from unembed.vectors import similarity

TEXT = "A small boat crossed the lake."
VECTOR = np.random.default_rng(0).standard_normal(SIZE).tolist()
POST = ("/api/invert", "/api/stream", "/api/encode")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as client:
        yield client


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    """Take the events out of a stream that has ended."""
    assert answer.status_code == 200, answer.text
    blocks = answer.text.strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def figure(client: httpx.Client, line: str) -> float:
    """Read one figure of /metrics."""
    found = re.search(rf"^{re.escape(line)} (\S+)$", client.get("/metrics").text, flags=re.MULTILINE)
    assert found, line
    return float(found[1])


# --- every path -----------------------------------------------------------------------------------


def test_models_and_health(client: httpx.Client) -> None:
    (model,) = client.get("/api/models").json()["models"]
    assert (model["name"], model["embedding_size"], model["max_tokens"]) == ("tiny", SIZE, 12)
    assert [s["name"] for s in model["strategies"]] == list(STRATEGIES)
    assert model["can_encode"]
    assert model["limits"]["steps"] == 12
    assert client.get("/healthz").json() == {"status": "ok"}


def test_encode(client: httpx.Client, served: Served) -> None:
    long = "word " * 40
    one, two = client.post("/api/encode", json={"texts": [TEXT, long]}).json()["encodings"]
    assert (one["text"], one["truncated"]) == (TEXT, False)
    assert "".join(one["pieces"]) == TEXT.lower()
    assert len(one["ids"]) == len(one["pieces"])
    np.testing.assert_allclose(one["vector"], served.encoder.encode([TEXT])[0], rtol=1e-6)
    assert two["truncated"]
    assert len(two["ids"]) == 12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_invert_is_what_the_library_gives(client: httpx.Client, served: Served, strategy: str) -> None:
    vectors = np.random.default_rng(1).standard_normal((5, SIZE)).astype(np.float32)
    body = {"vectors": vectors.tolist(), "strategy": strategy, "steps": 4, "seed": 7, "guidance": 1.5}
    answer = client.post("/api/invert", json=body).json()
    expected = served.inverter.invert(vectors, strategy=strategy, steps=4, seed=7, guidance=1.5)
    assert [i["text"] for i in answer["inversions"]] == [i.text for i in expected]
    assert [i["ids"] for i in answer["inversions"]] == [i.ids for i in expected]
    assert [i["forward_passes"] for i in answer["inversions"]] == [i.forward_passes for i in expected]
    assert [i["likeness"] for i in answer["inversions"]] == [i.likeness for i in expected]
    assert (answer["strategy"], answer["seed"]) == (strategy, 7)


def test_several_drafts_are_what_the_library_gives(client: httpx.Client, served: Served) -> None:
    vectors = np.random.default_rng(1).standard_normal((3, SIZE)).astype(np.float32)
    options: dict[str, Any] = {"steps": 4, "drafts": 6, "seed": 7}
    expected = served.inverter.invert(vectors, **options)
    answer = client.post("/api/invert", json={"vectors": vectors.tolist()} | options).json()
    assert [i["ids"] for i in answer["inversions"]] == [i.ids for i in expected]
    assert [i["forward_passes"] for i in answer["inversions"]] == [i.forward_passes for i in expected]
    body = {"vector": vectors[0].tolist(), "rounds": 1, "candidates": 2} | options
    found = events(client.post("/api/stream", json=body))
    assert [name for name, _ in found] == ["step"] * 4 + ["round"] * 2 + ["done"]
    assert found[3][1]["ids"] == expected[0].ids
    assert found[-1][1]["likeness"] is None  # of what a search has found the cosine is known


@pytest.mark.parametrize(
    ("options", "guesses"), [({}, True), ({"steps": 4, "drafts": 3, "seed": 1}, True), ({"steps": 4}, False)]
)
def test_answers_say_what_the_model_guesses_of_them(
    client: httpx.Client, served: Served, options: dict[str, Any], guesses: bool
) -> None:
    (expected,) = served.inverter.invert([VECTOR], **options)
    assert (expected.likeness is not None) is guesses
    answer = client.post("/api/invert", json={"vectors": [VECTOR]} | options).json()
    assert answer["inversions"][0]["likeness"] == expected.likeness
    *_, (_, done) = events(client.post("/api/stream", json={"vector": VECTOR} | options))
    assert done["likeness"] == expected.likeness


@pytest.mark.parametrize(
    ("options", "strategy"), [({}, "beam"), ({"steps": 3}, "confidence"), ({"temperature": 0.5}, "causal")]
)
def test_answers_say_what_auto_was(
    client: httpx.Client, served: Served, options: dict[str, Any], strategy: str
) -> None:
    (expected,) = served.inverter.invert([VECTOR], seed=3, **(options | {"strategy": strategy}))
    for more in ({}, {"strategy": "auto", "steps": options.get("steps")}):
        body = options | more | {"seed": 3}
        answer = client.post("/api/invert", json=body | {"vectors": [VECTOR]}).json()
        assert (answer["strategy"], answer["inversions"][0]["ids"]) == (strategy, expected.ids)
        *steps, (_, done) = events(client.post("/api/stream", json=body | {"vector": VECTOR}))
        assert (done["strategy"], done["ids"]) == (strategy, expected.ids)
        assert len(steps) == steps[-1][1]["total"] == (3 if strategy == "confidence" else 12)
    described = client.get("/openapi.json").json()["components"]["schemas"]["InvertRequest"]["properties"]
    assert described["strategy"]["enum"] == ["auto", *STRATEGIES]
    assert described["strategy"]["default"] == "auto"


def test_a_reported_seed_gives_the_text_again(client: httpx.Client) -> None:
    body = {"vectors": [VECTOR], "strategy": "euler", "steps": 3}
    first = client.post("/api/invert", json=body).json()
    again = client.post("/api/invert", json=body | {"seed": first["seed"]}).json()
    assert again == first


def test_stream(client: httpx.Client, served: Served) -> None:
    answer = client.post("/api/stream", json={"vector": VECTOR, "steps": 5, "seed": 3})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *steps, (name, done) = events(answer)
    assert name == "done"
    expected = list(served.inverter.stream(VECTOR, steps=5, seed=3))
    assert [data["index"] for _, data in steps] == [1, 2, 3, 4, 5]
    for (name, data), step in zip(steps, expected, strict=True):
        assert name == "step"
        assert data["ids"] == step.ids
        assert ["_" if piece is None else piece for piece in data["pieces"]] == step.pieces
        assert data["confidences"] == pytest.approx(step.confidences, abs=1e-4)
        assert [piece is None for piece in data["pieces"]] == [
            token == served.inverter.tokenizer.mask_id for token in step.ids
        ]
    assert (done["text"], done["ids"], done["forward_passes"]) == (expected[-1].text, expected[-1].ids, 5)
    cosine = similarity(served.encoder, np.asarray([VECTOR]), [done["text"]])[0]
    assert done["cosine"] == pytest.approx(float(cosine), abs=1e-5)


def test_stream_with_search(client: httpx.Client, served: Served) -> None:
    body = {"vector": VECTOR, "steps": 3, "seed": 3, "rounds": 2, "candidates": 4}
    found = events(client.post("/api/stream", json=body))
    assert [name for name, _ in found] == ["step"] * 3 + ["round"] * 3 + ["done"]
    expected = list(
        served.inverter.search(VECTOR, encoder=served.encoder, steps=3, seed=3, rounds=2, candidates=4)
    )
    rounds = [data for name, data in found if name == "round"]
    assert [r["text"] for r in rounds] == [r.text for r in expected]
    assert [r["cosine"] for r in rounds] == [r.cosine for r in expected]
    assert rounds[0]["cosine"] <= rounds[-1]["cosine"]
    done = found[-1][1]
    assert (done["text"], done["encoder_calls"]) == (expected[-1].text, expected[-1].encoder_calls)


def test_without_an_encoder() -> None:
    with serving(encoder=None) as served, httpx.Client(base_url=served.url) as client:
        assert not client.get("/api/models").json()["models"][0]["can_encode"]
        assert events(client.post("/api/stream", json={"vector": VECTOR}))[-1][1]["cosine"] is None
        for path, body in (
            ("/api/encode", {"texts": [TEXT]}),
            ("/api/stream", {"vector": VECTOR, "rounds": 1}),
        ):
            answer = client.post(path, json=body)
            assert (answer.status_code, "no encoder" in answer.json()["error"]) == (422, True)


def test_an_encoder_of_another_size_is_refused() -> None:
    class Wide(WordEncoder):
        size = SIZE + 1

    with pytest.raises(ValueError, match="choose the model trained for your encoder"):
        Served(encoder=Wide())


def test_metrics(client: httpx.Client) -> None:
    client.post("/api/invert", json={"vectors": [VECTOR] * 3})
    client.get("/nowhere")
    text = client.get("/metrics").text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? \d+(\.\d+)?', line), line
    assert figure(client, 'unembed_requests_total{path="/api/invert",status="200"}') >= 1
    assert figure(client, "unembed_requests_in_flight") == 1  # the one that asks
    assert figure(client, 'unembed_queue_rows{lane="decode"}') == 0
    assert figure(client, 'unembed_batch_rows_sum{lane="decode"}') >= 3
    assert "/nowhere" not in text


def test_histogram() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{a="b",le="1.0"} 2',
        'h_bucket{a="b",le="2.0"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 12.000000',
        'h_count{a="b"} 4',
    ]


def test_pages(client: httpx.Client) -> None:
    assert "An embedding is not a secret" in client.get("/").text
    assert "openapi.json" in client.get("/docs").text
    assert set(POST) < set(client.get("/openapi.json").json()["paths"])
    for file in WEB.iterdir():
        answer = client.get(f"/{file.name}")
        assert answer.status_code == 200
        # Names of XML namespaces look like addresses, but nothing is fetched from them.
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn", answer.text), file.name


def test_the_page_writes_text_as_text() -> None:
    for file in WEB.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()
        )


# --- batches --------------------------------------------------------------------------------------


def test_concurrent_requests_share_passes() -> None:
    count, steps = 12, 4
    vectors = np.random.default_rng(2).standard_normal((count, SIZE)).tolist()
    bodies = [
        {"vector": vector, "steps": steps, "strategy": "euler", "seed": seed}
        for seed, vector in enumerate(vectors)
    ]
    with serving() as served, httpx.Client(base_url=served.url, timeout=30) as client:

        def ask(body: dict[str, Any]) -> list[tuple[str, Any]]:
            found = events(client.post("/api/stream", json=body))
            found[-1][1].pop("seconds")
            return found

        alone = [ask(body) for body in bodies]
        work = len(served.gate.passes)
        assert work > 3 * count  # some texts are finished a step early
        served.gate.passes.clear()
        served.gate.open.clear()
        with ThreadPoolExecutor(count + 2) as pool:
            first = pool.submit(ask, bodies[0])  # keeps the thread busy while the others gather
            wait_until(lambda: len(served.gate.passes) == 1)
            together = [pool.submit(ask, body) for body in bodies]
            other = pool.submit(ask, bodies[0] | {"steps": 2})  # other options, so another batch
            wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == count + 1)
            served.gate.open.set()
            assert [each.result() for each in together] == alone
            assert first.result() == alone[0]
            assert len(other.result()) == 3
        passes = served.gate.passes
        assert len(passes) <= steps + steps + 2 < work
        assert max(passes) == count


def test_max_batch() -> None:
    with serving(limits=Limits(max_batch=4)) as served, httpx.Client(base_url=served.url) as client:
        client.post("/api/invert", json={"vectors": [VECTOR] * 10, "steps": 1})
        assert served.gate.passes == [4, 4, 2]


@contextlib.contextmanager
def held_up(limits: Limits) -> Iterator[tuple[Served, httpx.Client, ThreadPoolExecutor]]:
    """A server whose model is busy with a request that does not end before the gate is opened."""
    with (
        serving(limits=limits) as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        served.gate.open.clear()
        first = pool.submit(client.post, "/api/invert", json={"vectors": [VECTOR], "steps": 2})
        wait_until(lambda: len(served.gate.passes) == 1)
        try:
            yield served, client, pool
        finally:
            served.gate.open.set()
        assert first.result().status_code == 200


def test_a_full_queue_says_when_to_come_back() -> None:
    with held_up(Limits(queue=3)) as (served, client, pool):
        waiting = pool.submit(client.post, "/api/invert", json={"vectors": [VECTOR] * 2})
        wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == 2)
        for path, body in (
            ("/api/invert", {"vectors": [VECTOR] * 2}),  # one would fit, two do not: all or none
            ("/api/invert", {"vectors": [VECTOR] * 4}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert "queue is full" in answer.json()["error"]
        one = pool.submit(client.post, "/api/stream", json={"vector": VECTOR})
        wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == 3)
        assert client.post("/api/stream", json={"vector": VECTOR}).status_code == 429
        assert client.get("/healthz").status_code == 200  # the event loop is free all the while
        served.gate.open.set()
        assert [waiting.result().status_code, one.result().status_code] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body"), [("/api/stream", {"vector": VECTOR}), ("/api/invert", {"vectors": [VECTOR]})]
)
def test_a_client_that_leaves_frees_its_place(path: str, body: dict[str, Any]) -> None:
    with held_up(Limits(queue=1)) as (served, client, pool):
        raw = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as leaving:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            leaving.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == 1)
            assert client.post("/api/stream", json={"vector": VECTOR}).status_code == 429
        wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == 0)
        assert figure(client, 'unembed_left_rows_total{lane="decode"}') == 1
        stays = pool.submit(client.post, "/api/stream", json={"vector": VECTOR})
        wait_until(lambda: figure(client, 'unembed_queue_rows{lane="decode"}') == 1)
        served.gate.open.set()
        assert events(stays.result())[-1][0] == "done"


def test_a_batch_that_nobody_waits_for_ends_early() -> None:
    with serving() as served, httpx.Client(base_url=served.url) as client:
        served.gate.open.clear()
        raw = json.dumps({"vector": VECTOR, "steps": 12}).encode()
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as leaving:
            head = b"POST /api/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            leaving.sendall(head + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            wait_until(lambda: len(served.gate.passes) == 1)
        wait_until(lambda: figure(client, "unembed_requests_in_flight") == 1)
        served.gate.open.set()
        assert events(client.post("/api/stream", json={"vector": VECTOR, "steps": 1}))[-1][0] == "done"
        assert served.gate.passes == [1, 1]


def test_time_outs() -> None:
    with serving(limits=Limits(seconds=0.2)) as served, httpx.Client(base_url=served.url) as client:
        served.gate.open.clear()
        answer = client.post("/api/invert", json={"vectors": [VECTOR]})
        assert (answer.status_code, "too long" in answer.json()["error"]) == (504, True)
        ((name, data),) = events(client.post("/api/stream", json={"vector": VECTOR}))
        assert (name, "too long" in data["error"]) == ("error", True)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        ([0.5] * (SIZE + 1), f"expected (N, {SIZE})"),
        ([0.0] * SIZE, "all zeros"),
        ([float("nan")] + [0.5] * (SIZE - 1), "finite number"),
        ([float("inf")] + [0.5] * (SIZE - 1), "finite number"),
        ([1e300] * SIZE, "less than or equal to 1000000"),
        (["a"] * SIZE, "valid number"),
        ([], "at least 1"),
        ("text", "list"),
        (None, "list"),
    ],
)
def test_wrong_vectors(client: httpx.Client, vector: object, expected: str) -> None:
    for path, body in (("/api/stream", {"vector": vector}), ("/api/invert", {"vectors": [vector]})):
        answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text
        assert expected in answer.json()["error"]
        assert set(answer.json()) == {"error"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 13}, "between 1 and 12"),
        ({"steps": 10**9}, "steps"),
        ({"strategy": "oiler"}, "did you mean 'euler'"),
        ({"temperature": -1}, "temperature"),
        ({"guidance": 1e9}, "guidance"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"remask": 2}, "remask"),
        ({"reveal": "x"}, "reveal"),
        ({"drafts": 65}, "drafts"),
        ({"drafts": 2, "steps": 1}, "at least 2"),
        ({"drafts": 2, "strategy": "beam"}, "leave drafts out"),
        ({"rounds": 21}, "rounds must be 20 at most"),
        ({"candidates": 1000}, "candidates"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_wrong_options(client: httpx.Client, options: dict[str, Any], expected: str) -> None:
    answer = client.post("/api/stream", json={"vector": VECTOR} | options)
    assert answer.status_code == 422
    assert expected in answer.json()["error"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([" "], "blank"),
        (["x" * 2001], "2000 at most"),
        (["a"] * 65, "64 at most"),
        ([], "texts"),
        ([3], "texts"),
    ],
)
def test_wrong_texts(client: httpx.Client, texts: list[Any], expected: str) -> None:
    answer = client.post("/api/encode", json={"texts": texts})
    assert answer.status_code == 422
    assert expected in answer.json()["error"]


def test_too_many_vectors(client: httpx.Client) -> None:
    answer = client.post("/api/invert", json={"vectors": [VECTOR] * 65})
    assert (answer.status_code, "64 at most" in answer.json()["error"]) == (422, True)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"null", b'{"texts": ["\\ud800"]}'])
def test_bodies_that_are_none(client: httpx.Client, body: bytes) -> None:
    for path in POST:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500
        assert set(answer.json()) == {"error"}
        assert "texts" in body.decode("latin-1") or NO_JSON == answer.json()["error"]


def test_a_body_that_is_not_called_json(client: httpx.Client) -> None:
    body = json.dumps({"vectors": [VECTOR]})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):  # the former is what curl -d sends
        answer = client.post("/api/invert", content=body, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()) == (422, {"error": NO_JSON})


def test_large_bodies(client: httpx.Client) -> None:
    large = b" " * 2_000_001

    def in_pieces() -> Iterator[bytes]:
        yield large[:1_000_000]
        yield large[1_000_000:]

    for content in (large, in_pieces()):
        answer = client.post("/api/encode", content=content)
        assert (answer.status_code, "larger than" in answer.json()["error"]) == (413, True)


def test_other_paths_and_methods(client: httpx.Client) -> None:
    for answer, status in (
        (client.get("/nowhere"), 404),
        (client.get("/../pyproject.toml"), 404),
        (client.get("/%2e%2e/server/app.py"), 404),
        (client.get("/api/nowhere"), 404),
        (client.post("/healthz"), 405),
        (client.post("/api/models"), 405),
    ):
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", ["/api/invert", "/api/stream", "/api/encode"])
def test_paths_that_take_a_body_say_so(client: httpx.Client, path: str) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        answer = client.request(method, path)
        assert answer.status_code == 405
        assert method == "HEAD" or answer.json() == {"error": "this path takes another method."}
    assert client.get(path).headers["allow"] == "POST"


@given(
    vector=st.lists(st.floats(-1e6, 1e6, width=64), min_size=SIZE, max_size=SIZE),
    strategy=st.sampled_from(["auto", *STRATEGIES]),
    steps=st.none() | st.integers(1, 12),
    temperature=st.none() | st.floats(0, 10),
    guidance=st.floats(0, 20),
    seed=st.integers(0, 2**53 - 1),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_vector_of_the_right_size_is_answered(client: httpx.Client, **body: Any) -> None:
    answer = client.post("/api/stream", json=body)
    heated = body["strategy"] == "beam" and body["temperature"]  # beams draw nothing
    if not heated and any(np.float32(x) for x in body["vector"]):
        assert events(answer)[-1][0] == "done"
    else:
        assert answer.status_code == 422


@pytest.mark.parametrize("mode", GenerationMode)
def test_fuzzed_bodies_break_nothing(served: Served, mode: GenerationMode) -> None:
    """Bodies that fit the description, and bodies that just do not."""
    tried: Counter[str] = Counter()
    for operation in schemathesis.openapi.from_url(f"{served.url}/openapi.json").get_all_operations():
        assert isinstance(operation, Ok)
        strategy = operation.ok().as_strategy(generation_mode=mode)

        @given(case=strategy)
        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def try_it(case: schemathesis.Case) -> None:
            answer = case.call()
            tried[case.path] += 1
            assert answer.status_code < 500
            assert "Traceback" not in answer.text

        # What takes no input cannot be asked wrongly.
        with contextlib.suppress(SkipTest, Unsatisfiable):
            try_it()
    assert set(POST) <= set(tried)


# --- who may enter, and what is never said --------------------------------------------------------


def test_token() -> None:
    with serving(token="open sesame") as served, httpx.Client(base_url=served.url) as client:
        for path in ("/", "/app.js", "/healthz", "/docs"):
            assert client.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "open sesame"}):
            for answer in (
                client.get("/api/models", headers=headers),
                client.get("/metrics", headers=headers),
                client.post("/api/stream", json={"vector": VECTOR}, headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "token" in answer.json()["error"]
        headers = {"Authorization": "Bearer open sesame"}
        assert client.get("/api/models", headers=headers).status_code == 200
        assert client.post("/api/stream", json={"vector": VECTOR}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/app.js", "/docs", "/api/models", "/healthz", "/metrics", "/nowhere"])
def test_headers(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


def test_a_bug_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served, httpx.Client(base_url=served.url) as client:
        served.gate.error = RuntimeError("the text was: a secret sentence")
        answer = client.post("/api/invert", json={"vectors": [VECTOR]})
        assert answer.status_code == 500
        ((name, data),) = events(client.post("/api/stream", json={"vector": VECTOR}))
        assert name == "error"
        for said in (answer.text, data["error"], caplog.text):
            assert "secret" not in said
            assert "Traceback" not in said
        assert "went wrong inside" in data["error"]
        assert re.search(r"decode failed: RuntimeError at .*serving\.py:\d+", caplog.text)
        served.gate.error = None
        assert client.post("/api/invert", json={"vectors": [VECTOR]}).status_code == 200


def test_a_bug_on_the_way_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, client: httpx.Client
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("a secret sentence")

    monkeypatch.setattr("unembed.server.app._describe", fail)
    answer = client.get("/api/models")
    assert (answer.status_code, "went wrong inside" in answer.json()["error"]) == (500, True)
    assert "a request failed: ZeroDivisionError at" in caplog.text
    assert "secret" not in answer.text + caplog.text


def test_nothing_is_logged(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secret, number = "Zanzibar quetzal", 0.123456789
    client.post("/api/encode", json={"texts": [secret]})
    client.post("/api/stream", json={"vector": [number] * SIZE})
    client.post("/api/stream", json={"vector": [number] * (SIZE + 1)})
    client.post("/api/encode", json={"texts": [secret, " "]})
    client.post("/api/encode", json={"texts": secret})
    out, err = capfd.readouterr()
    # httpx logs its own side of the talk; the server's side is what counts here.
    said = out + err + "".join(r.getMessage() for r in caplog.records if not r.name.startswith("http"))
    assert "Zanzibar" not in said
    assert str(number) not in said


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[uvicorn.Server]:
    """Collect servers instead of running them, around a tiny model."""
    found: list[uvicorn.Server] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        found.append(server)
        for each in sockets:
            each.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr("unembed.cli.serve.open_inverter", lambda *args, **options: tiny_inverter())
    monkeypatch.setattr("unembed.cli.serve.encoder_of", lambda *args, **options: WordEncoder())
    monkeypatch.delenv("UNEMBED_TOKEN", raising=False)
    return found


def test_serve(started: list[uvicorn.Server], capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--port", "0"])
    assert re.search(r"http://127\.0\.0\.1:\d+ \(Ctrl-C stops it\)", capsys.readouterr().err)
    assert not started[0].config.access_log
    main(["serve", "--port", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["url"].startswith("http://127.0.0.1:")
    main(["serve", "--host", "0.0.0.0", "--port", "0"])
    assert "--token" in capsys.readouterr().err
    main(["serve", "--host", "0.0.0.0", "--port", "0", "--token", "x"])
    assert "--token" not in capsys.readouterr().err
    assert "serve" in COMMANDS["Recover text"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port", "70000"], "port must be between"),
        (["--queue", "0"], "--queue must be at least 1"),
        (["--token", " "], "token is blank"),
        (["--host", "192.0.2.1"], "choose another --host"),
        (["--host", "a..b"], "choose another --host"),
    ],
)
def test_wrong_ways_to_serve(
    started: list[uvicorn.Server], capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *argv])
    assert expected in capsys.readouterr().err
    assert not started


def test_a_taken_port(started: list[uvicorn.Server], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["serve", "--port", str(taken.getsockname()[1])])
    assert "choose another --port" in capsys.readouterr().err


def test_the_page_is_in_the_package() -> None:
    import tomllib

    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "unembed.server" in settings["packages"]
    assert "web/**/*" in settings["package-data"]["unembed"]
