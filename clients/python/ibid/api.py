"""The exchange API: what an app asks ibid before a handler runs, and tells it afterwards."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import secrets
import socket
import threading
import time
from typing import Any, Callable, Generator, Mapping, NamedTuple, Optional

log = logging.getLogger("ibid")
Headers = list[tuple[str, str]]
_PAUSES = (0.0, 0.1, 0.3, 0.6, 1.0)


class IbidError(Exception):
    """ibid refused a job with this answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"ibid answered {answer.status}: {answer.body.decode(errors='replace')}")
        self.answer = answer


class NotStarted(Exception):
    """Raised by a handler that provably did nothing: the key is free again."""


class Answer(NamedTuple):
    """A response for the client."""

    status: int
    headers: Headers
    body: bytes


class Run(NamedTuple):
    """The handler runs now. Without `exchange`, nobody is told how it ends; `degraded`: nothing protects it."""

    exchange: str = ""
    headers: Headers = []
    deadline: float = 0.0
    degraded: bool = False


class Ibid:
    """Where ibid is, and how an app uses it.

    address: "unix:/run/ibid/api.sock", or "127.0.0.1:8082" with a token.
    unreachable: "closed" answers 503 if no connection can be made; "open" runs the handler unprotected.
    identify: returns headers such as {"X-User-Id": "u1"} for a request (ASGI scope, WSGI environ, or arguments of a
    job) that the app has authenticated itself. They replace what the client sent under these names.
    """

    def __init__(
        self,
        address: str,
        token: Optional[str] = None,
        unreachable: str = "closed",
        identify: Optional[Callable[[Any], Mapping[str, str]]] = None,
        methods: tuple[str, ...] = ("POST", "PUT", "PATCH", "DELETE"),
        timeout: float = 60.0,
    ) -> None:
        if unreachable not in ("closed", "open"):
            raise ValueError(f"unreachable: expected 'closed' or 'open', got {unreachable!r}")
        self.unreachable, self.identify, self.methods, self.timeout = unreachable, identify, methods, timeout
        self.path = address[5:] if address.startswith("unix:") else None
        self.host, _, port = ("localhost", "", "80") if self.path else address.rpartition(":")
        self.port, self.headers = int(port), {"content-type": "application/json"}
        if token:
            self.headers["authorization"] = f"Bearer {token}"
        self._local = threading.local()
        self._idle: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []

    def request(
        self, source: Any, method: str, target: str, headers: Headers, body: bytes, peer: Optional[str]
    ) -> dict[str, Any]:
        """Builds the message of a begin. Each has its own id."""
        named = dict(self.identify(source)) if self.identify else {}
        if named:
            replaced = {name.lower() for name in named} | {"x-forwarded-for"}
            headers = [pair for pair in headers if pair[0].lower() not in replaced] + list(named.items())
            headers += [("x-forwarded-for", peer)] if peer else []
            peer = "127.0.0.1"
        message = {"id": secrets.token_hex(16), "method": method, "target": target, "peer": peer}
        return {**message, "headers": headers, "body_base64": base64.b64encode(body).decode()}

    # What to do is the same for threads and asyncio. These yield seconds to sleep, or a path and a message to send;
    # they get back a status and a message, or an error.

    def _begin(self, message: Any) -> Generator[Any, Any, "Answer | Run"]:
        was_sent, detail = False, "ibid did not answer; nothing was run, so send the request again"
        for pause in _PAUSES:
            yield pause
            status, found = yield "/v1/exchanges", message
            if status == 0 and not was_sent:
                log.error("ibid cannot be reached: %s", found)
                return Run(degraded=True) if self.unreachable == "open" else _unavailable("ibid cannot be reached")
            was_sent = was_sent or status < 0
            if status == 201:
                deadline = time.monotonic() + found["deadline_ms"] / 1000
                return Run(found["exchange"], [tuple(pair) for pair in found["headers"]], deadline)
            if status in (200, 204):
                return _answer(found) if status == 200 else Run()
            if status > 0 and status != 503:
                log.error("ibid refused a call: %s", found)
                return _unavailable(found["detail"])._replace(status=413 if status == 413 else 503)
        return _unavailable(detail)

    def _end(self, run: Run, verb: str, message: Any, own: Answer) -> Generator[Any, Any, Answer]:
        pause = 0.0
        while True:
            status, found = yield f"/v1/exchanges/{run.exchange}/{verb}", message
            if status == 200:
                return _answer(found)
            if (status > 0 and status != 503) or time.monotonic() > run.deadline:
                log.error("the end of an exchange was not recorded: %s", found)
                return own._replace(headers=own.headers + [("idempotency-stored", "false")])
            pause = min(pause + 0.1, 1.0)
            yield pause

    def _ended(self, run: Run, own: Answer) -> Generator[Any, Any, Answer]:
        if run.degraded:
            return own._replace(headers=own.headers + [("idempotency-guarantee", "degraded")])
        body = base64.b64encode(own.body).decode()
        return (yield from self._end(run, "end", {"status": own.status, "headers": own.headers, "body_base64": body}, own))

    def _failed(self, run: Run, error: BaseException) -> Generator[Any, Any, Answer]:
        how = "not-started" if isinstance(error, NotStarted) else "unknown"
        return (yield from self._end(run, "failed", {"how": how}, _unavailable("the handler failed")))

    # For threads.

    def begin(self, message: dict[str, Any]) -> "Answer | Run":
        return self._drive(self._begin(message))

    def end(self, run: Run, own: Answer) -> Answer:
        return self._drive(self._ended(run, own))

    def failed(self, run: Run, error: BaseException) -> Any:
        return self._drive(self._failed(run, error)) if run.exchange else None

    def _drive(self, steps: Generator[Any, Any, Any]) -> Any:
        result = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                return stop.value
            result = time.sleep(step) if isinstance(step, float) else self._call(*step)

    def _call(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        connection = getattr(self._local, "connection", None) or _Connection(self)
        self._local.connection, is_reused = None, connection.sock is not None
        try:
            if not is_reused:
                connection.connect()
        except OSError as error:
            return 0, error
        was_sent = False
        try:
            connection.request("POST", path, json.dumps(message), self.headers)
            was_sent = True
            response = connection.getresponse()
            found = json.loads(response.read() or b"{}")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not is_reused:
                return -1, error
            # ibid may have closed an idle connection. Every call can be sent again.
            again = self._call(path, message)
            return (-1, error) if was_sent and again[0] == 0 else again
        self._local.connection = connection
        return response.status, found

    # For asyncio.

    async def begin_async(self, message: dict[str, Any]) -> "Answer | Run":
        return await self._drive_async(self._begin(message))

    async def end_async(self, run: Run, own: Answer) -> Answer:
        return await self._drive_async(self._ended(run, own))

    async def failed_async(self, run: Run, error: BaseException) -> Any:
        return await self._drive_async(self._failed(run, error)) if run.exchange else None

    async def _drive_async(self, steps: Generator[Any, Any, Any]) -> Any:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                return stop.value
            result = await (asyncio.sleep(step) if isinstance(step, float) else self._call_async(*step))

    async def _call_async(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        loop = asyncio.get_running_loop()
        self._idle = [idle for idle in self._idle if idle[0] is loop and not idle[1].at_eof()]
        is_reused = bool(self._idle)
        try:
            reader, writer = self._idle.pop()[1:] if is_reused else await self._connect_async()
        except OSError as error:
            return 0, error
        body = json.dumps(message).encode()
        head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self.headers.items()]
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            status, found = await asyncio.wait_for(_read(reader), self.timeout)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            writer.close()
            again = await self._call_async(path, message) if is_reused else (-1, error)
            return again if again[0] != 0 else (-1, error)
        except asyncio.CancelledError:
            writer.close()
            raise
        self._idle.append((loop, reader, writer))
        return status, found

    async def _connect_async(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.path:
            return await asyncio.open_unix_connection(self.path)
        return await asyncio.open_connection(self.host, self.port)


class _Connection(http.client.HTTPConnection):
    def __init__(self, ibid: Ibid) -> None:
        super().__init__(ibid.host, ibid.port, timeout=ibid.timeout)
        self.path = ibid.path

    def connect(self) -> None:
        if not self.path:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self.path)
        except OSError:
            self.close()
            raise


async def _read(reader: asyncio.StreamReader) -> tuple[int, Any]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
    return int(lines[0].split(" ")[1]), json.loads(await reader.readexactly(length) or b"{}")


def _answer(message: dict[str, Any]) -> Answer:
    found = message["answer"]
    return Answer(found["status"], [tuple(pair) for pair in found["headers"]], base64.b64decode(found["body_base64"]))


def _unavailable(detail: str) -> Answer:
    problem = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": detail}
    headers = [("content-type", "application/problem+json"), ("retry-after", "1")]
    return Answer(503, headers, json.dumps(problem).encode())
