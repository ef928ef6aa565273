"""The app of the scenarios, as ASGI and as WSGI. With IBID_API the SDK wraps it."""

import asyncio
import json
import os
import signal
import time

from ibid import Ibid, IdempotentASGI, IdempotentWSGI

LARGE = "x" * 300_000


def handle(path, headers):
    """Returns the body of the response, and how long the handler takes."""
    with open(os.environ["RUNS_FILE"], "a+") as runs:
        runs.write(path + "\n")
        runs.flush()
        runs.seek(0)
        run = len(runs.readlines())
    if path == "/exception":
        raise RuntimeError("the handler failed")
    if path == "/killed":
        os.kill(os.getpid(), signal.SIGKILL)
    told = {"run": run, "attempt": headers.get("ibid-attempt")}
    if path == "/presets/mcp":
        told = {"jsonrpc": "2.0", "id": 1, "result": told}
    told = json.dumps(told, separators=(",", ":"))
    return (LARGE if path == "/large" else told), (1.0 if path in ("/slow", "/waiting") else 0.0)


async def plain_asgi(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body, takes = handle(scope["path"], {name.decode(): value.decode() for name, value in scope["headers"]})
    await asyncio.sleep(takes)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body[:10].encode(), "more_body": True})
    await send({"type": "http.response.body", "body": body[10:].encode()})


def plain_wsgi(environ, start_response):
    environ["wsgi.input"].read()
    headers = {name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
    body, takes = handle(environ["PATH_INFO"], headers)
    time.sleep(takes)
    start_response("201 Created", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body[:10].encode(), body[10:].encode()]


asgi, wsgi = plain_asgi, plain_wsgi
if "IBID_API" in os.environ:
    ibid = Ibid(os.environ["IBID_API"], unreachable=os.environ.get("UNREACHABLE", "closed"))
    asgi, wsgi = IdempotentASGI(plain_asgi, ibid), IdempotentWSGI(plain_wsgi, ibid)
