"""Vectors from an OpenAI-compatible address.

Knows HTTP: keys, retries, what a refusal means. Must not know where the texts come from, nor batches
and sizes, which are the business of the encoder that calls it.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from unembed.errors import UnembedError, first_line

BUSY = (408, 409, 425, 429)  # and all from 500 on: worth asking again


class Endpoint:
    """A function from texts to vectors behind `http(s)://host/v1#model`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        dimensions: int | None = None,
        timeout: float = 60.0,
        attempts: int = 6,
        backoff: float = 0.5,
    ) -> None:
        """Take the address apart; nothing is sent before the first text.

        Args:
            address: the part before /embeddings, then # and the model's name.
            api_key: sent as a bearer token; the variable OPENAI_API_KEY by default.
            dimensions: asked of the endpoint, for models that can shorten their vectors.
            timeout: seconds to wait for one answer.
            attempts: how often a batch is sent before giving up.
            backoff: seconds before the second attempt, doubled for each further one.
        """
        url, _, self._model = address.partition("#")
        self._url = url.rstrip("/")
        if not self._model:
            raise UnembedError(f"{address} names no model; write {self._url}#model-name.")
        if attempts < 1:
            raise UnembedError(f"attempts must be at least 1, not {attempts}.")
        self._key = api_key or os.environ.get("OPENAI_API_KEY", "")
        if not self._key and self._url.startswith("https://"):
            raise UnembedError(f"{self._url} needs a key; set OPENAI_API_KEY or pass api_key.")
        self.name = f"{self._url}#{self._model}"
        self._dimensions, self._timeout = dimensions, timeout
        self._attempts, self._backoff = attempts, backoff
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __call__(self, texts: list[str]) -> list[Any]:
        """Send one batch, again if the endpoint is busy or away."""
        body: dict[str, Any] = {"model": self._model, "input": texts, "encoding_format": "float"}
        if self._dimensions is not None:
            body["dimensions"] = self._dimensions
        headers = {"Content-Type": "application/json", "User-Agent": "unembed"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(f"{self._url}/embeddings", json.dumps(body).encode(), headers)
        trouble: Exception
        for attempt in range(self._attempts):
            try:
                with self._opener.open(request, timeout=self._timeout) as reply:
                    return self._vectors(reply.read(), count=len(texts))
            except urllib.error.HTTPError as error:
                with error:  # closes the connection
                    if error.code not in BUSY and error.code < 500:
                        raise self._refusal(error) from error
                trouble = error
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                trouble = error
            if attempt + 1 < self._attempts:
                time.sleep(pause_after(trouble, default=self._backoff * 2**attempt))
        raise UnembedError(
            f"{self.name} gave no answer in {self._attempts} attempts (last: {first_line(trouble)}); "
            "check the address and that the server is up."
        ) from trouble

    def _refusal(self, error: urllib.error.HTTPError) -> UnembedError:
        """Say what an answer that will not change for asking again means."""
        if error.code in (401, 403):
            state = "refused the key" if self._key else "asks for a key"
            return UnembedError(
                f"{self._url} {state} (HTTP {error.code}); set OPENAI_API_KEY or pass api_key."
            )
        try:
            detail = " ".join(error.read(300).decode(errors="replace").split())
        except (OSError, http.client.HTTPException):
            detail = ""
        return UnembedError(f"{self.name} answered HTTP {error.code} ({detail or error.reason}).")

    def _vectors(self, reply: bytes, *, count: int) -> list[Any]:
        """Take the vectors out of a reply, in the order of their index."""
        try:
            rows = {int(item["index"]): item["embedding"] for item in json.loads(reply)["data"]}
            return [rows[index] for index in range(max(count, len(rows)))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnembedError(
                f"{self.name} answered something else than a list of {count} embeddings; "
                "expected an OpenAI-compatible endpoint."
            ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing, so that the key goes to the address the user gave and no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Decline."""


def pause_after(trouble: Exception, *, default: float) -> float:
    """Seconds to wait after a failure: what Retry-After says (a number or a date), or the default."""
    said = (trouble.headers.get("Retry-After") if isinstance(trouble, urllib.error.HTTPError) else None) or ""
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
        except ValueError:
            seconds = default
    return min(max(seconds, 0.0), 300.0)
