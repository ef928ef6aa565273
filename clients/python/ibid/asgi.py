"""ASGI middleware."""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable

from .api import Answer, Ibid, Run

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class IdempotentASGI:
    """Wraps an ASGI app. The handler runs to its end even if its client disconnects."""

    def __init__(self, app: Callable[..., Awaitable[None]], ibid: Ibid) -> None:
        self.app, self.ibid = app, ibid
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in self.ibid.methods:
            return await self.app(scope, receive, send)
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        peer = (scope.get("client") or [None])[0]
        begun = self.ibid.begin(scope, scope["method"], target, headers, body, peer)
        task = asyncio.ensure_future(self._run(begun, scope, body, receive, send))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _run(self, begin: Awaitable[Any], scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        begun = await begin
        if isinstance(begun, Answer):
            return await _send(send, begun)
        own = {name.encode() for name, _ in begun.headers}
        kept = [pair for pair in scope["headers"] if pair[0] not in own and not pair[0].startswith(b"ibid-")]
        headers = kept + [(name.encode(), value.encode("latin-1")) for name, value in begun.headers]
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        is_covered = bool(begun.exchange) or begun.degraded

        async def receive_again() -> Message:
            if unread:
                return unread.pop()
            if not is_covered:
                return await receive()
            return await asyncio.get_running_loop().create_future()  # A disconnect must not stop the handler.

        if not is_covered:
            return await self.app({**scope, "headers": headers}, receive_again, send)
        response = _CapturedResponse(self.ibid, begun, send)
        try:
            await self.app({**scope, "headers": headers, "extensions": {}}, receive_again, response.send)
            if not response.is_sent:
                raise RuntimeError("the handler ended without a complete response")
        except BaseException as error:
            if not response.is_sent:
                await self.ibid.failed(begun, error)
            raise


class _CapturedResponse:
    def __init__(self, ibid: Ibid, run: Run, send: Send) -> None:
        self.ibid, self.run, self.client = ibid, run, send
        self.start: Message = {}
        self.parts: list[bytes] = []
        self.is_sent = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_sent = True
                pairs = self.start.get("headers", [])
                headers = [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in pairs]
                own = Answer(self.start["status"], headers, b"".join(self.parts))
                await _send(self.client, await self.ibid.end(self.run, own))


async def _send(send: Send, answer: Answer) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
    except OSError:  # The client has left.
        pass
