"""The application: paths, errors, and the files of the page."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from unembed import __version__
from unembed.encoders import Encoder
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.server.batching import BrokenError, BusyError
from unembed.server.guard import CLIENT_GONE, Guard
from unembed.server.messages import (
    LARGEST_SEED,
    DoneEvent,
    EncodeAnswer,
    EncodeRequest,
    ErrorAnswer,
    InvertAnswer,
    InvertRequest,
    LimitsInfo,
    ModelInfo,
    ModelsAnswer,
    Recovered,
    RoundEvent,
    StepEvent,
    StrategyInfo,
    StreamRequest,
)
from unembed.server.service import Limits, Quest, Service
from unembed.server.telemetry import Telemetry
from unembed.strategies import STRATEGIES

WEB = Path(__file__).parent.parent / "web"
T = TypeVar("T")
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "No token, or a wrong one"},
    413: {"model": ErrorAnswer, "description": "Body too large"},
    422: {"model": ErrorAnswer, "description": "Something in the body is wrong"},
    429: {"model": ErrorAnswer, "description": "The queue is full; see Retry-After"},
    504: {"model": ErrorAnswer, "description": "It took too long"},
}
NO_JSON = "the body is not a JSON object; send one, with Content-Type: application/json."
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events: step by step, round by round, then done or error.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def create_app(
    inverter: Inverter,
    *,
    encoder: Encoder | None = None,
    name: str = "model",
    limits: Limits | None = None,
    token: str | None = None,
) -> FastAPI:
    """Make the application around a model.

    Args:
        inverter: What turns vectors into text.
        encoder: What turns text into vectors; without one, only vectors can be sent.
        name: What to call the model.
        limits: How much may be asked for.
        token: What clients have to send as `Authorization: Bearer`; nothing if None.
    """
    limits, telemetry = limits or Limits(), Telemetry()
    service = Service(inverter, encoder, limits=limits, telemetry=telemetry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="unembed",
        version=__version__,
        summary="Turns text embeddings back into text.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own page loads scripts from elsewhere; /docs is ours
        redoc_url=None,
    )
    app.add_middleware(Guard, telemetry=telemetry, body_bytes=limits.body_bytes, token=token)
    _add_errors(app)
    _add_api(app, service, name=name)
    _add_health(app, service, telemetry=telemetry)
    app.mount("/", StaticFiles(directory=WEB, html=True), name="page")
    return app


def _add_api(app: FastAPI, service: Service, *, name: str) -> None:
    """Answer what programs ask, the page among them."""

    @app.post("/api/invert", responses=REFUSALS)
    async def invert(body: InvertRequest, request: Request) -> InvertAnswer:
        """Recover a text from each vector."""
        _check_count("vectors", len(body.vectors), service.limits.vectors)
        seed, options = _seed(body.seed), body.options().fit(service.inverter.config.model)
        found = await _unless_gone(request, service.invert(body.vectors, options, seed))
        inversions = [
            Recovered(
                text=each.step.text,
                ids=each.step.ids,
                pieces=each.step.pieces,
                confidences=each.step.confidences,
                likeness=each.step.likeness,
                forward_passes=each.forward_passes,
            )
            for each in found
        ]
        return InvertAnswer(inversions=inversions, strategy=options.strategy, seed=seed)

    @app.post("/api/stream", response_class=Response, responses=REFUSALS | STREAM)
    async def stream(body: StreamRequest) -> StreamingResponse:
        """Recover a text from one vector, with an event after each step."""
        seed = _seed(body.seed)
        events = _events(service, body, seed)
        await anext(events)  # takes the places, so that a refusal comes before the answer begins
        return StreamingResponse(
            events,
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},  # asks proxies not to gather the answer first
        )

    @app.post("/api/encode", responses=REFUSALS)
    async def encode(body: EncodeRequest, request: Request) -> EncodeAnswer:
        """Embed texts, cut to the model's length."""
        _check_count("texts", len(body.texts), service.limits.vectors)
        found = await _unless_gone(request, service.encode(body.texts))
        return EncodeAnswer.model_validate({"encodings": [dataclasses.asdict(each) for each in found]})

    @app.get("/api/models")
    async def models() -> ModelsAnswer:
        """Say which model this is, what it can do, and how much may be asked of it."""
        return ModelsAnswer(models=[_describe(service, name)])

    async def only_post() -> None:
        raise HTTPException(405, headers={"Allow": "POST"})

    # Else such a request would go to the files of the page, where there is nothing of the name.
    for path in ("/api/invert", "/api/stream", "/api/encode"):
        app.add_api_route(path, only_post, methods=["GET", "HEAD"], include_in_schema=False)


def _add_health(app: FastAPI, service: Service, *, telemetry: Telemetry) -> None:
    """Answer what those ask who look after the server."""

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Say whether the server can work."""
        ok = service.alive
        return JSONResponse({"status": "ok" if ok else "a worker has died"}, status_code=200 if ok else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Give figures in Prometheus' text format."""
        return PlainTextResponse(telemetry.text(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(WEB / "docs.html")


async def _events(service: Service, body: StreamRequest, seed: int) -> AsyncGenerator[str, None]:
    """Take the places (and yield nothing), then tell of each step, of each round, and how it ended."""
    begin, inverter = time.monotonic(), service.inverter
    options = body.options().fit(inverter.config.model)
    with ExitStack() as places:
        steps = places.enter_context(service.stream(body.vector, options, seed))
        rounds = None
        if body.rounds:
            quest = Quest(body.vector, options, seed, body.rounds, body.candidates)
            rounds = places.enter_context(service.search(quest))
        yield ""
        try:
            async for progress in steps:
                yield _event("step", StepEvent.of(progress.step, mask_id=inverter.config.model.mask_id))
            end: dict[str, Any] = {"text": progress.step.text, "ids": progress.step.ids, "encoder_calls": 0}
            if rounds is None:
                end["cosine"] = await service.cosine(body.vector, progress.step.text)
                end["likeness"] = progress.step.likeness
            else:
                async for found in rounds:
                    yield _event("round", RoundEvent.model_validate(found, from_attributes=True))
                ids = inverter.tokenizer.spans([found.text])[0].tolist()
                end = {"text": found.text, "ids": ids, "encoder_calls": found.encoder_calls}
                end |= {"cosine": found.cosine, "likeness": None}
            end |= {"forward_passes": progress.forward_passes, "strategy": options.strategy, "seed": seed}
            end["seconds"] = round(time.monotonic() - begin, 3)
            yield _event("done", DoneEvent.model_validate(end))
        except (UnembedError, BrokenError, TimeoutError) as error:
            yield _event("error", ErrorAnswer(error=_sentence(error)))


def _add_errors(app: FastAPI) -> None:
    """Answer every error with {"error": sentence}."""

    @app.exception_handler(UnembedError)
    async def mistake(_: Request, error: UnembedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # The first problem only, and not the value: a body of vectors would come back whole.
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        of_all = not where or first["type"] == "json_invalid"
        sentence = NO_JSON if of_all else f"{where[:100]}: {first['msg']}."
        return JSONResponse({"error": sentence}, status_code=422)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        sentence = {404: "there is nothing here.", 405: "this path takes another method.", 400: NO_JSON}
        text = sentence.get(error.status_code, str(error.detail))
        return JSONResponse({"error": text}, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after)}
        return JSONResponse({"error": str(error)}, status_code=429, headers=headers)

    @app.exception_handler(TimeoutError)
    async def late(_: Request, error: TimeoutError) -> JSONResponse:
        return JSONResponse({"error": _sentence(error)}, status_code=504)

    @app.exception_handler(BrokenError)
    async def broken(_: Request, error: BrokenError) -> JSONResponse:
        return JSONResponse({"error": _sentence(error)}, status_code=500)


def _sentence(error: Exception) -> str:
    """What a client is told."""
    if isinstance(error, UnembedError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "this took too long and was given up; ask for less, or later."
    return "something went wrong inside; the server's log says where."


def _event(name: str, body: BaseModel) -> str:
    """Write one server-sent event."""
    return f"event: {name}\ndata: {body.model_dump_json()}\n\n"


def _seed(given: int | None) -> int:
    """The seed that was asked for, or one to report."""
    return secrets.randbelow(LARGEST_SEED) if given is None else given


def _check_count(what: str, count: int, limit: int) -> None:
    """Refuse more in one request than it may hold."""
    if count > limit:
        raise UnembedError(f"{count} {what} in one request; send {limit} at most.")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, but give it up when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_GONE, "the client has left.")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


def _describe(service: Service, name: str) -> ModelInfo:
    """What the page has to know of the model."""
    inverter, limits = service.inverter, service.limits
    return ModelInfo(
        name=name,
        encoder=inverter.encoder_name,
        embedding_size=inverter.size,
        max_tokens=inverter.max_tokens,
        can_encode=service.encoder is not None,
        strategies=[
            StrategyInfo(name=s.name, summary=s.summary, temperature=s.temperature)
            for s in STRATEGIES.values()
            if inverter.config.model.causal or not s.causal
        ],
        limits=LimitsInfo(
            vectors=limits.vectors,
            text_length=limits.text_length,
            steps=inverter.max_tokens,
            rounds=limits.rounds,
            body_bytes=limits.body_bytes,
            seconds=limits.seconds,
        ),
    )
