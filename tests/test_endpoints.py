"""endpoints: batches in order, retries, keys and refusals, against a small server on this machine."""

from __future__ import annotations

import email.message
import email.utils
import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from unembed.encoders import load_encoder
from unembed.endpoints import Endpoint, pause_after
from unembed.errors import UnembedError

TEXTS = ["the quick brown fox", "hello world", "a", "In 1999, 27 ships sailed.", "what is this?", "dogs"]


class Server:
    """A small OpenAI-compatible server, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.script: list[tuple[int, dict[str, str], bytes]] = []  # answers before the honest ones
        self.key: str | None = None
        self.delay = 0.0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802
                length = int(self.headers["Content-Length"])
                status, headers, body = endpoint.answer(self.path, self.rfile.read(length), self.headers)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, path: str, body: bytes, headers: Any) -> tuple[int, dict[str, str], bytes]:
        assert path == "/v1/embeddings"
        self.times.append(time.monotonic())
        self.keys.append(headers.get("Authorization"))
        self.requests.append(json.loads(body))
        time.sleep(self.delay)
        if self.key and self.keys[-1] != f"Bearer {self.key}":
            return 401, {}, b'{"error": {"message": "bad key"}}'
        if self.script:
            return self.script.pop(0)
        data = [{"index": i, "embedding": embed(t)} for i, t in enumerate(self.requests[-1]["input"])]
        return 200, {}, json.dumps({"data": data[::-1]}).encode()  # the order is the index's business

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def embed(text: str) -> list[float]:
    """A vector that tells texts apart."""
    return [float(len(text)), float(ord(text[0])), 1.0]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Server()
    yield server
    server.close()


def test_endpoint_batches_in_order(endpoint: Server) -> None:
    encoder = load_encoder(f"{endpoint.url}/#tiny-model", dimensions=3)
    assert encoder.name == f"{endpoint.url}#tiny-model"
    vectors = encoder.encode(TEXTS, batch_size=4)
    np.testing.assert_array_equal(vectors, np.array([embed(text) for text in TEXTS], dtype=np.float32))
    assert [len(request["input"]) for request in endpoint.requests] == [4, 2]
    assert endpoint.requests[0]["model"] == "tiny-model" and endpoint.requests[0]["dimensions"] == 3
    assert endpoint.keys == [None, None]
    assert encoder.size == 3 and len(endpoint.requests) == 2
    assert encoder.encode([]).shape == (0, 3)


def test_endpoint_is_asked_again(endpoint: Server) -> None:
    endpoint.script = [(429, {"Retry-After": "0.3"}, b"{}"), (500, {}, b"oops")]
    encoder = load_encoder(f"{endpoint.url}#m", backoff=0.01)
    assert encoder.size == 3
    assert len(endpoint.requests) == 3
    assert endpoint.times[1] - endpoint.times[0] >= 0.3 > endpoint.times[2] - endpoint.times[1]


def test_endpoint_gives_up(endpoint: Server) -> None:
    endpoint.script = [(503, {}, b"")] * 3
    encoder = load_encoder(f"{endpoint.url}#m", backoff=0.01, attempts=2)
    with pytest.raises(UnembedError, match="no answer in 2 attempts.*503"):
        encoder.encode(["a"])
    endpoint.script, endpoint.delay = [], 0.5
    encoder = load_encoder(f"{endpoint.url}#m", backoff=0.01, attempts=2, timeout=0.1)
    with pytest.raises(UnembedError, match="no answer in 2 attempts.*timed out"):
        encoder.encode(["a"])
    with pytest.raises(UnembedError, match="no answer in 1 attempts"):
        load_encoder("http://127.0.0.1:1/v1#m", attempts=1).encode(["a"])


def test_endpoint_keys(endpoint: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.key = "sesame"
    with pytest.raises(UnembedError, match="asks for a key .*OPENAI_API_KEY"):
        load_encoder(f"{endpoint.url}#m").encode(["a"])
    with pytest.raises(UnembedError, match="refused the key"):
        load_encoder(f"{endpoint.url}#m", api_key="mellon").encode(["a"])
    assert len(endpoint.requests) == 2
    assert load_encoder(f"{endpoint.url}#m", api_key="sesame").size == 3
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert load_encoder(f"{endpoint.url}#m").size == 3
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UnembedError, match="needs a key"):
        load_encoder("https://api.example.com/v1#m")


@pytest.mark.parametrize(
    "body",
    [
        b"<html>welcome</html>",
        b'{"data": []}',
        b'{"data": 5}',
        b"[]",
        b'{"data": [{"index": 0}]}',
        b'{"data": [{"index": 1, "embedding": [1, 2]}]}',
        b'{"data": [{"index": 0, "embedding": [1, 2]}, {"index": 1, "embedding": [1, 2]}]}',
        b'{"data": [{"index": 0, "embedding": "AACAPw=="}]}',
        b'{"data": [{"index": 0, "embedding": [1, null]}]}',
        b'{"data": [{"index": 0, "embedding": []}]}',
        b"\xff\xfe",
    ],
)
def test_endpoint_that_answers_something_else(endpoint: Server, body: bytes) -> None:
    endpoint.script = [(200, {}, body)]
    with pytest.raises(UnembedError, match="something else than"):
        load_encoder(f"{endpoint.url}#m").encode(["a"])
    assert len(endpoint.requests) == 1


def test_endpoint_that_refuses(endpoint: Server) -> None:
    endpoint.script = [(404, {}, b'{"error": "no such model"}')]
    with pytest.raises(UnembedError, match="HTTP 404.*no such model"):
        load_encoder(f"{endpoint.url}#m").encode(["a"])
    endpoint.script = [(302, {"Location": "http://127.0.0.1:1/"}, b"")]
    with pytest.raises(UnembedError, match="HTTP 302"):
        load_encoder(f"{endpoint.url}#m", api_key="secret").encode(["a"])
    with pytest.raises(UnembedError, match="names no model; write"):
        load_encoder(endpoint.url)
    with pytest.raises(UnembedError, match="attempts must be"):
        Endpoint(f"{endpoint.url}#m", attempts=0)


def test_endpoint_that_changes_its_mind(endpoint: Server) -> None:
    encoder = load_encoder(f"{endpoint.url}#m")
    assert encoder.size == 3
    endpoint.script = [(200, {}, b'{"data": [{"index": 0, "embedding": [1, 2]}]}')]
    with pytest.raises(UnembedError, match="size 2, not 3"):
        encoder.encode(["a"])


def test_retry_after_is_honoured() -> None:
    def after(value: str) -> float:
        headers = email.message.Message()
        headers["Retry-After"] = value
        return pause_after(urllib.error.HTTPError("http://x", 429, "busy", headers, None), default=7.0)

    assert after("2") == 2.0
    assert after("soon") == 7.0
    assert after("-3") == 0.0
    assert after("1e9") == 300.0
    assert 15 < after(email.utils.formatdate(time.time() + 20, usegmt=True)) <= 20
    assert pause_after(ConnectionError(), default=7.0) == 7.0
