"""An app that FastAPI redirects between `/items` and `/items/`. Prints its port."""

import socket

import uvicorn
from fastapi import FastAPI

app = FastAPI()
runs = 0


@app.post("/items/")
async def create(item: dict):
    global runs
    runs += 1
    return {"run": runs, "item": item}


if __name__ == "__main__":
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])
