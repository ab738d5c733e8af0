"""`serve`: the page, and the HTTP interface behind it."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
import webbrowser
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unembed.cli.options import Device, Model, encoder_of, open_inverter
from unembed.cli.terminal import FLAG, Json, say, write_json
from unembed.errors import UnembedError

if TYPE_CHECKING:
    import uvicorn

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="0 for any that is free.")] = 8000,
    model: Model = None,
    token: Annotated[
        str | None,
        Parameter(env_var="UNEMBED_TOKEN", show_env_var=True, help="Ask clients for this bearer token."),
    ] = None,
    max_batch: Annotated[int, Parameter(help="Vectors that go through the model together at most.")] = 32,
    queue: Annotated[int, Parameter(help="Vectors that may wait; beyond, clients are told to retry.")] = 256,
    open: Annotated[bool, FLAG, Parameter(help="Show the page in the browser.")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Serve the page."""
    import logging

    import uvicorn

    from unembed.inverter import DEFAULT_MODEL
    from unembed.server import Limits, create_app

    if max_batch < 1 or queue < 1:
        raise UnembedError("--max-batch and --queue must be at least 1.")
    if token is not None and not token.strip():
        raise UnembedError("the token is blank; leave it out, or give one.")
    listener = _listen(host, port)  # before the model is loaded: a taken port is known at once
    inverter = open_inverter(model, device=device)
    try:
        encoder = encoder_of(inverter, None, device=device, trust=False)
    except UnembedError as error:
        say(f"note: without an encoder the page takes vectors only ({str(error).rstrip('.')}).")
        encoder = None
    name = os.path.basename(model.rstrip("/")) if model else DEFAULT_MODEL
    app = create_app(
        inverter,
        encoder=encoder,
        name=name,
        limits=Limits(max_batch=max_batch, queue=queue),
        token=token,
    )
    # No access log: nothing is kept of who asked for what.
    logging.basicConfig(format="unembed: %(message)s", level=logging.WARNING)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            limit_concurrency=1024,
            timeout_graceful_shutdown=2,
        )
    )
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    if json:
        write_json({"url": address, "model": name})
        sys.stdout.flush()  # whoever reads it wants to know now, not when the server ends
    else:
        say(f"{address} (Ctrl-C stops it)")
    if host not in LOOPBACK and token is None:
        say("note: everyone who reaches this machine can use it; set --token to ask for one.")
    if open:
        threading.Thread(target=_show, args=(server, address), daemon=True).start()
    server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Take the port, or say why not and which of the two to change."""
    if not 0 <= port < 2**16:
        raise UnembedError(f"port must be between 0 and 65535, not {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter of a name that none can be
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        other = "--port" if taken else "--host"
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UnembedError(
            f"cannot listen on {host} port {port}: {reason}; choose another {other}."
        ) from error


def _show(server: uvicorn.Server, address: str) -> None:
    """Open the browser once the server answers."""
    while not server.started:
        time.sleep(0.05)
    webbrowser.open(address)
