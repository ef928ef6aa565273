"""An MCP server of the official SDK, with a tool whose runs are counted.

    server.py json|stream RUNS

It appends a line to the file RUNS for every run of the tool, and prints its address once it listens. The tool "runs" and
the resource runs://count return the number of lines.
"""

import asyncio
import socket
import sys

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

answers, runs = sys.argv[1:]
server = MCPServer("shop")


def count() -> int:
    with open(runs, "a+") as file:
        file.seek(0)
        return len(file.readlines())


@server.tool(name="runs", structured_output=False)
def runs_tool() -> str:
    return str(count())


@server.resource("runs://count")
def runs_resource() -> str:
    return str(count())


@server.tool()
async def pay(amount: int, seconds: float, ctx: Context) -> str:
    with open(runs, "a") as file:
        file.write(f"{amount}\n")
    number = count()
    await ctx.report_progress(1, 2)
    await asyncio.sleep(seconds)
    if amount < 0:
        raise ValueError("no such amount")
    return f"run {number} paid {amount}"


listener = socket.create_server(("127.0.0.1", 0))
print("http://%s:%d" % listener.getsockname(), flush=True)
app = server.streamable_http_app(json_response=answers == "json")
config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
