"""One small app, as ASGI (Hypercorn, uvicorn) and as WSGI (gunicorn). It counts its POSTs, and says which cookies and
forwarding headers it got."""

import json

posts = 0


def answer(method, headers):
    global posts
    posts += method == "POST"
    told = {name: value for name, value in headers if name.startswith("x-forwarded-") or name == "cookie"}
    return json.dumps({"posts": posts, **told}).encode()


async def asgi(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": event["text"]})
        return
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body = answer(scope["method"], [(name.decode(), value.decode()) for name, value in scope["headers"]])
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


def wsgi(environ, start_response):
    environ["wsgi.input"].read()
    headers = [(name[5:].lower().replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_")]
    body = answer(environ["REQUEST_METHOD"], headers)
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
