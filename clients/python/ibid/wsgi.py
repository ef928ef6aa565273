"""WSGI middleware."""

from __future__ import annotations

import io
from http.client import responses
from typing import Any, Callable, Iterable
from urllib.parse import quote

from .api import Answer, Ibid

Environ = dict[str, Any]


class IdempotentWSGI:
    """Wraps a WSGI app."""

    def __init__(self, app: Callable[..., Iterable[bytes]], ibid: Ibid) -> None:
        self.app, self.ibid = app, ibid

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        if method not in self.ibid.methods:
            return self.app(environ, start_response)
        is_chunked = environ.get("wsgi.input_terminated") and not environ.get("CONTENT_LENGTH")
        body = environ["wsgi.input"].read(*([] if is_chunked else [int(environ.get("CONTENT_LENGTH") or 0)]))
        environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        target, peer = _target(environ), environ.get("REMOTE_ADDR")
        begun = self.ibid.wait(self.ibid.begin(environ, method, target, _headers(environ), body, peer or None))
        if isinstance(begun, Answer):
            return _respond(start_response, begun)
        for name in [name for name in environ if name.startswith("HTTP_IBID_")]:
            del environ[name]
        environ.update({"HTTP_" + name.upper().replace("-", "_"): value for name, value in begun.headers})
        if not begun.is_covered:
            return self.app(environ, start_response)
        return _respond(start_response, self.ibid.run(begun, lambda: self._call(environ)))

    def _call(self, environ: Environ) -> Answer:
        started: list[Any] = []
        written = io.BytesIO()

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], int]:
            started[:] = [int(status.split(" ", 1)[0]), list(headers)]
            return written.write

        parts = self.app(environ, start)
        try:
            for part in parts:
                written.write(part)
        finally:
            getattr(parts, "close", lambda: None)()
        return Answer(started[0], started[1], written.getvalue())


def _headers(environ: Environ) -> list[tuple[str, str]]:
    names = {name: name[5:] for name in environ if name.startswith("HTTP_")}
    names.update({name: name for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)})
    return [(name.replace("_", "-").lower(), environ[key]) for key, name in names.items()]


def _target(environ: Environ) -> str:
    sent = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    if sent and sent.startswith("/"):
        return sent
    path = quote((environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1"))
    query = environ.get("QUERY_STRING")
    return f"{path or '/'}?{query}" if query else path or "/"


def _respond(start_response: Callable[..., Any], answer: Answer) -> Iterable[bytes]:
    has_length = any(name.lower() == "content-length" for name, _ in answer.headers)
    length = [] if has_length or answer.status in (204, 304) else [("content-length", str(len(answer.body)))]
    start_response(f"{answer.status} {responses.get(answer.status, 'Unknown')}", answer.headers + length)
    return [answer.body]
