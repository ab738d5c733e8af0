"""The page and its HTTP interface: many visitors, one model.

`batching` joins requests into batches, `service` says what a batch does, `messages` what goes over
the wire, `guard` who and how much gets in, `telemetry` what is counted, `app` puts them together.
Texts and vectors live as long as their request, and are never logged.
"""

from __future__ import annotations

from unembed.server.app import create_app
from unembed.server.service import Limits

__all__ = ["Limits", "create_app"]
