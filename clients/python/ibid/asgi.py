"""ASGI middleware."""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable, Iterable

from .api import Answer, Headers, Ibid

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
        body = await _read_body(receive)
        if body is None:
            return
        task = asyncio.ensure_future(self._run(scope, body, receive, send))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        peer = (scope.get("client") or [None])[0]
        begun = await self.ibid.begin(scope, scope["method"], _target(scope), _text(scope["headers"]), body, peer)
        if isinstance(begun, Answer):
            return await _send(send, begun)
        own = {name.encode() for name, _ in begun.headers}
        kept = [pair for pair in scope["headers"] if pair[0] not in own and not pair[0].startswith(b"ibid-")]
        scope = {**scope, "headers": kept + _bytes(begun.headers)}
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            if unread:
                return unread.pop()
            if not begun.is_covered:
                return await receive()
            return await asyncio.get_running_loop().create_future()  # A disconnect must not stop the handler.

        if not begun.is_covered:
            return await self.app(scope, receive_again, send)
        response: Message = {"headers": []}
        parts: list[bytes] = []

        async def capture(message: Message) -> None:
            response.update(message)
            parts.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                response["is_complete"] = True
                own = Answer(response["status"], _text(response["headers"]), b"".join(parts))
                await _send(send, await self.ibid.end(begun, own))

        try:
            await self.app({**scope, "extensions": {}}, receive_again, capture)
            if "is_complete" not in response:
                raise RuntimeError("the handler ended without a complete response")
        except BaseException as error:
            if "is_complete" not in response:
                await self.ibid.failed(begun, error)
            raise


async def _read_body(receive: Receive) -> bytes | None:
    """Returns None if the client has left."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _target(scope: Message) -> str:
    path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
    return (path + b"?" + query if query else path).decode("latin-1")


def _text(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in headers]


def _bytes(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


async def _send(send: Send, answer: Answer) -> None:
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": _bytes(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})
    except OSError:  # The client has left.
        pass
