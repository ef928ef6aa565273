"""The exchange API: what an app asks ibid before a handler runs, and tells it afterwards."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Coroutine, Mapping, NamedTuple

log = logging.getLogger("ibid")
METHODS = ("POST", "PUT", "PATCH", "DELETE")
Headers = list[tuple[str, str]]
_PAUSES = (0.0, 0.1, 0.3, 0.6, 1.0)
_UNSENT, _UNANSWERED = 0, -1  # In place of a status.


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

    def adding(self, name: str, value: str) -> Answer:
        return self._replace(headers=self.headers + [(name, value)])


class Run(NamedTuple):
    """The handler runs now. Without `exchange`, nobody is told how it ends; `degraded`: nothing protects it."""

    exchange: str = ""
    headers: Headers = []
    deadline: float = 0.0
    degraded: bool = False

    @property
    def is_covered(self) -> bool:
        return bool(self.exchange) or self.degraded


@dataclass(eq=False)
class Ibid:
    """Where ibid is, and how an app uses it.

    address: "unix:/run/ibid/api.sock", or "127.0.0.1:8082" with a token.
    unreachable: "closed" answers 503 if no connection can be made; "open" runs the handler unprotected.
    identify: returns headers such as {"X-User-Id": "u1"} for a request (ASGI scope, WSGI environ, or arguments of a
    job) that the app has authenticated itself. They replace what the client sent under these names.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    unreachable: str = "closed"
    identify: Callable[[Any], Mapping[str, str]] | None = None
    methods: tuple[str, ...] = METHODS
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.unreachable not in ("closed", "open"):
            raise ValueError(f"unreachable: expected 'closed' or 'open', got {self.unreachable!r}")
        self._idle: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._lock = threading.Lock()
        self._background: tuple[int, Any] = (0, None)

    async def begin(
        self, source: Any, method: str, target: str, headers: Headers, body: bytes, peer: str | None
    ) -> Answer | Run:
        """Decides about a request."""
        headers, peer = self._identified(source, headers, peer)
        message = {"id": secrets.token_hex(16), "method": method, "target": target, "headers": headers, "peer": peer}
        message["body_base64"] = base64.b64encode(body).decode()
        was_sent = False
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            status, found = await self._call("/v1/exchanges", message)
            if status == _UNSENT and not was_sent:
                log.error("ibid cannot be reached: %s", found)
                return Run(degraded=True) if self.unreachable == "open" else _unavailable("ibid cannot be reached")
            was_sent = was_sent or status == _UNANSWERED
            if status == 201:
                deadline = time.monotonic() + found["deadline_ms"] / 1000
                return Run(found["exchange"], [tuple(pair) for pair in found["headers"]], deadline)
            if status in (200, 204):
                return _answer(found) if status == 200 else Run()
            if status > 0 and status != 503:
                log.error("ibid refused a call: %s", found)
                return _unavailable(found["detail"])._replace(status=413 if status == 413 else 503)
        return _unavailable("ibid did not answer; nothing was run, so send the request again")

    async def end(self, run: Run, own: Answer) -> Answer:
        """Records the handler's response. Returns what goes to the client."""
        if run.degraded:
            return own.adding("idempotency-guarantee", "degraded")
        body = base64.b64encode(own.body).decode()
        return await self._finish(run, "end", {"status": own.status, "headers": own.headers, "body_base64": body}, own)

    async def failed(self, run: Run, error: BaseException) -> None:
        """The handler failed. A `NotStarted` frees the key; otherwise the outcome is unknown."""
        if run.exchange:
            how = "not-started" if isinstance(error, NotStarted) else "unknown"
            await self._finish(run, "failed", {"how": how}, _unavailable("the handler failed"))

    def run(self, run: Run, handler: Callable[[], Answer]) -> Answer:
        """Runs a handler in a thread without an event loop, and records its response."""
        try:
            own = handler()
        except BaseException as error:
            self.wait(self.failed(run, error))
            raise
        return self.wait(self.end(run, own))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine of this class in a thread without an event loop."""
        with self._lock:
            if self._background[0] != os.getpid():  # A fork has no threads.
                self._background, self._idle = (os.getpid(), asyncio.new_event_loop()), []
                threading.Thread(target=self._background[1].run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._background[1]).result()

    def _identified(self, source: Any, headers: Headers, peer: str | None) -> tuple[Headers, str | None]:
        named = dict(self.identify(source)) if self.identify else {}
        if not named:
            return headers, peer
        replaced = {name.lower() for name in named} | {"x-forwarded-for"}
        kept = [pair for pair in headers if pair[0].lower() not in replaced]
        return kept + list(named.items()) + ([("x-forwarded-for", peer)] if peer else []), "127.0.0.1"

    async def _finish(self, run: Run, verb: str, message: dict[str, Any], own: Answer) -> Answer:
        pause = 0.0
        while True:
            status, found = await self._call(f"/v1/exchanges/{run.exchange}/{verb}", message)
            if status == 200:
                return _answer(found)
            if (status > 0 and status != 503) or time.monotonic() > run.deadline:
                log.error("the end of an exchange was not recorded: %s", found)
                return own.adding("idempotency-stored", "false")
            pause = min(pause + 0.1, 1.0)
            await asyncio.sleep(pause)

    async def _call(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        """Returns the status and the content, or `_UNSENT` or `_UNANSWERED` and the error."""
        loop = asyncio.get_running_loop()
        self._idle = [idle for idle in self._idle if idle[0] is loop and not idle[1].at_eof()]
        is_reused = bool(self._idle)
        try:
            reader, writer = self._idle.pop()[1:] if is_reused else await self._connect()
        except OSError as error:
            return _UNSENT, error
        body = json.dumps(message).encode()
        token = f"authorization: Bearer {self.token}\r\n" if self.token else ""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{token}"
        try:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status, found = await asyncio.wait_for(_read(reader), self.timeout)
        except BaseException as error:
            writer.close()
            if not isinstance(error, (OSError, EOFError, asyncio.TimeoutError)):
                raise
            # ibid may have closed an idle connection. Every call can be sent again.
            again = await self._call(path, message) if is_reused else (_UNSENT, None)
            return again if again[0] != _UNSENT else (_UNANSWERED, error)
        self._idle.append((loop, reader, writer))
        return status, found

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.address.startswith("unix:"):
            return await asyncio.open_unix_connection(self.address[5:])
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))


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
