"""The caller's half: sends one operation until it has a final answer, with one key, and keeps the key until then."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sqlite3
import time
import uuid
from typing import Any, Callable, Mapping

from .api import METHODS

KEY_HEADER = "Idempotency-Key"
OPERATION_HEADER = "X-Ibid-Operation"
_MAX_ATTEMPTS = 5


class KeptKeys:
    """Keys by the name of their operation, in an SQLite file: a restarted program continues with the same key."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._change("CREATE TABLE IF NOT EXISTS keys (operation TEXT PRIMARY KEY, key TEXT NOT NULL)")

    def key(self, operation: str) -> str:
        """The key of an operation, which threads and processes share."""
        insert = "INSERT INTO keys VALUES (?, ?) ON CONFLICT DO UPDATE SET key = key RETURNING key"
        return self._change(insert, operation, str(uuid.uuid4()))[0][0]

    def forget(self, operation: str) -> None:
        self._change("DELETE FROM keys WHERE operation = ?", operation)

    def _change(self, statement: str, *values: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=10, isolation_level=None)) as file:
            return file.execute(statement, values).fetchall()


def retry_after(status: int, headers: Mapping[str, str], body: bytes) -> float | None:
    """The least seconds until the next attempt, or None if the answer is final."""
    try:
        name = str(json.loads(body)["type"]).rpartition("#")[2]
    except (ValueError, TypeError, KeyError):
        name = ""
    is_refusal = name in ("in-progress", "store-unavailable", "overloaded") or name.startswith("upstream-")
    if not is_refusal and status not in (429, 502, 503, 504):
        return None
    after = str(headers.get("retry-after") or "")
    return float(after) if after.isdigit() else 0.0


def send(method: str, headers: Any, keys: KeptKeys | None, once: Callable[[], Any], lost: Any) -> Any:
    """Sends with `once` until the answer is final. `lost` is what it raises if there is no complete answer."""
    if method.upper() not in METHODS:
        return once()
    operation = headers.pop(OPERATION_HEADER, None)
    if KEY_HEADER not in headers:
        headers[KEY_HEADER] = keys.key(operation) if keys and operation else str(uuid.uuid4())
    for attempt in range(_MAX_ATTEMPTS):
        is_last, after = attempt + 1 == _MAX_ATTEMPTS, 0.0
        try:
            response = once()
            found = retry_after(response.status_code, response.headers, response.content)
            if found is None or is_last:
                if keys and operation and response.status_code < 500 and response.status_code not in (409, 429):
                    keys.forget(operation)
                return response
            after = found
        except lost:
            if is_last:
                raise
        time.sleep(max(0.1 * 2**attempt * random.uniform(1, 1.25), after))
    raise AssertionError("the last attempt returns or raises")


def httpx_transport(wrapped: Any = None, keys: KeptKeys | None = None) -> Any:
    """A transport for `httpx.Client(transport=…)`."""
    import httpx

    class IdempotentTransport(httpx.BaseTransport):
        inner = wrapped or httpx.HTTPTransport()

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.read()

            def once() -> httpx.Response:
                response = self.inner.handle_request(request)
                response.read()
                return response

            return send(request.method, request.headers, keys, once, httpx.TransportError)

        def close(self) -> None:
            self.inner.close()

    return IdempotentTransport()


def requests_adapter(keys: KeptKeys | None = None) -> Any:
    """An adapter for `requests.Session().mount("https://", …)`."""
    import requests

    lost = (requests.exceptions.ConnectionError, requests.exceptions.Timeout)

    class IdempotentAdapter(requests.adapters.HTTPAdapter):
        def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            def once() -> Any:
                return super(IdempotentAdapter, self).send(request, *args, **kwargs)

            return send(request.method, request.headers, keys, once, lost)

    return IdempotentAdapter()


def outbound_key(operation: str, name: str) -> str:
    """The key of a call that a handler makes: equal in all attempts, another one for each name.

    `operation` is the header `Ibid-Operation` of the handler's request.
    """
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (operation.encode(), name.encode()))
    return str(uuid.UUID(bytes=hashlib.sha256(framed).digest()[:16], version=4))
