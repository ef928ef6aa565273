"""uvicorn with the app, on the port PORT or a free one."""

import os

import uvicorn

uvicorn.run("app:asgi", host="127.0.0.1", port=int(os.environ.get("PORT", "0")))
