"""Who and how much gets in, and what gets out when something breaks.

An ASGI layer around the whole application: the token, the size and pace of bodies, the headers of
every answer, the figures, and the last word on errors. Must not know what the paths do.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from unembed.server.batching import log, place_of
from unembed.server.telemetry import Telemetry

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# The page needs its own files and this server, and nothing else may be loaded, sent to or framed.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
PROTECTED = ("/api/", "/metrics")
BODY_SECONDS = 20.0  # for a body to arrive, and for a client to take a piece of an answer
CLIENT_GONE = 499  # nginx's number for an answer nobody waited for; only the figures see it


class RefusedError(Exception):
    """A request that gets no further than here."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        """Keep what is to be answered."""
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}


class Guard:
    """The layer itself."""

    def __init__(self, app: Application, *, telemetry: Telemetry, body_bytes: int, token: str | None) -> None:
        """Wrap an application.

        Args:
            app: What is guarded.
            telemetry: Where requests are counted.
            body_bytes: Largest body.
            token: What `Authorization: Bearer` has to carry, if anything.
        """
        self._app, self._telemetry = app, telemetry
        self._body_bytes, self._token = body_bytes, token

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message.get("headers", [])}
                extra = [header for header in HEADERS if header[0] not in given]
                message["headers"] = [*message.get("headers", []), *extra]
            async with asyncio.timeout(BODY_SECONDS):
                await send(message)

        begin = time.monotonic()
        self._telemetry.begin()
        try:
            self._check_token(scope)
            await self._app(scope, await self._with_body(scope, receive), send_on)
        except RefusedError as refused:
            await answer(send_on, refused.status, refused.sentence, refused.headers)
        except Exception as error:
            log.error("a request failed: %s", place_of(error))
            if status == CLIENT_GONE:  # nothing has been sent yet
                await answer(send_on, 500, "something went wrong inside; the server's log says where.")
        finally:
            # Only known paths become labels, lest a scanner fill the figures.
            path = getattr(scope.get("route"), "path", "other")
            self._telemetry.end(path, status, time.monotonic() - begin)

    def _check_token(self, scope: MutableMapping[str, Any]) -> None:
        """Refuse who does not know the token."""
        if self._token is None or not scope["path"].startswith(PROTECTED):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
            hint = {"www-authenticate": "Bearer"}
            raise RefusedError(401, "this server asks for a token: Authorization: Bearer ...", hint)

    async def _with_body(self, scope: MutableMapping[str, Any], receive: Receive) -> Receive:
        """Read the body, no more and no longer than allowed, and return a `receive` that has it."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        too_large = RefusedError(413, f"the body is larger than {self._body_bytes} bytes; send less at once.")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._body_bytes:
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._body_bytes:
                        raise too_large
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive in {BODY_SECONDS:.0f} s.") from None
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


async def answer(send: Send, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
    """Send an error as every error is sent: {"error": sentence}."""
    fields = {"content-type": "application/json"} | (headers or {})
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": json.dumps({"error": sentence}).encode()})
