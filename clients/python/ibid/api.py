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
from typing import Any, Callable, Coroutine, Mapping, NamedTuple, Optional

log = logging.getLogger("ibid")
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
        self.address, self.unreachable, self.identify = address, unreachable, identify
        self.methods, self.timeout = methods, timeout
        self._head = "host: localhost\r\ncontent-type: application/json\r\n"
        self._head += f"authorization: Bearer {token}\r\n" if token else ""
        self._idle: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._lock = threading.Lock()
        self._background: tuple[int, Any] = (0, None)

    async def begin(
        self, source: Any, method: str, target: str, headers: Headers, body: bytes, peer: Optional[str]
    ) -> "Answer | Run":
        """Decides about a request."""
        named = dict(self.identify(source)) if self.identify else {}
        if named:
            replaced = {name.lower() for name in named} | {"x-forwarded-for"}
            headers = [pair for pair in headers if pair[0].lower() not in replaced] + list(named.items())
            headers += [("x-forwarded-for", peer)] if peer else []
            peer = "127.0.0.1"
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
            return own._replace(headers=own.headers + [("idempotency-guarantee", "degraded")])
        body = base64.b64encode(own.body).decode()
        return await self._finish(run, "end", {"status": own.status, "headers": own.headers, "body_base64": body}, own)

    async def failed(self, run: Run, error: BaseException) -> None:
        """The handler failed. A `NotStarted` frees the key; otherwise the outcome is unknown."""
        if run.exchange:
            how = "not-started" if isinstance(error, NotStarted) else "unknown"
            await self._finish(run, "failed", {"how": how}, _unavailable("the handler failed"))

    async def _finish(self, run: Run, verb: str, message: dict[str, Any], own: Answer) -> Answer:
        pause = 0.0
        while True:
            status, found = await self._call(f"/v1/exchanges/{run.exchange}/{verb}", message)
            if status == 200:
                return _answer(found)
            if (status > 0 and status != 503) or time.monotonic() > run.deadline:
                log.error("the end of an exchange was not recorded: %s", found)
                return own._replace(headers=own.headers + [("idempotency-stored", "false")])
            pause = min(pause + 0.1, 1.0)
            await asyncio.sleep(pause)

    async def _call(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        loop = asyncio.get_running_loop()
        self._idle = [idle for idle in self._idle if idle[0] is loop and not idle[1].at_eof()]
        is_reused = bool(self._idle)
        try:
            reader, writer = self._idle.pop()[1:] if is_reused else await self._connect()
        except OSError as error:
            return _UNSENT, error
        body = json.dumps(message).encode()
        try:
            writer.write(f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status, found = await asyncio.wait_for(_read(reader), self.timeout)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            writer.close()
            # ibid may have closed an idle connection. Every call can be sent again.
            again = await self._call(path, message) if is_reused else (_UNANSWERED, error)
            return again if again[0] != _UNSENT else (_UNANSWERED, error)
        except asyncio.CancelledError:
            writer.close()
            raise
        self._idle.append((loop, reader, writer))
        return status, found

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.address.startswith("unix:"):
            return await asyncio.open_unix_connection(self.address[5:])
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs one of the methods above for a thread without an event loop, in a thread of this process."""
        with self._lock:
            if self._background[0] != os.getpid():  # A fork has no threads.
                self._background, self._idle = (os.getpid(), asyncio.new_event_loop()), []
                threading.Thread(target=self._background[1].run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._background[1]).result()


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
