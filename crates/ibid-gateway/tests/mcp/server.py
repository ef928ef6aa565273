"""An MCP server of the official SDK, with tools that count.

    server.py json|stream RUNS

It appends a line to the file RUNS for every run of a tool that counts, and to RUNS.lists for every page of the list of tools
that the gateway reads, and prints its address once it listens. The tool "runs" and the resource runs://count return the
number of lines in RUNS. While the file RUNS.refuse exists, it lists nothing to the gateway.
"""

import asyncio
import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ListToolsResult, ToolAnnotations

answers, runs = sys.argv[1:]


class Shop(MCPServer):
    """Lists one tool on each page."""

    async def _handle_list_tools(self, ctx, params):
        tools, at = await self.list_tools(), int((params and params.cursor) or 0)
        if ctx.request_id == "ibid-tools":
            if os.path.exists(runs + ".refuse"):
                raise RuntimeError("it lists nothing")
            with open(runs + ".lists", "a") as file:
                file.write(f"{at}\n")
        next_page = str(at + 1) if at + 1 < len(tools) else None
        return ListToolsResult(tools=tools[at : at + 1], next_cursor=next_page)


server = Shop("shop")


def run_count() -> int:
    with open(runs, "a+") as file:
        file.seek(0)
        return len(file.readlines())


def count(line) -> int:
    with open(runs, "a") as file:
        file.write(f"{line}\n")
    return run_count()


@server.tool(name="runs", structured_output=False, annotations=ToolAnnotations(read_only_hint=True))
def runs_tool() -> str:
    return str(run_count())


@server.resource("runs://count")
def runs_resource() -> str:
    return str(run_count())


@server.tool()
async def pay(amount: int, seconds: float, ctx: Context) -> str:
    number = count(amount)
    await ctx.report_progress(1, 2)
    await asyncio.sleep(seconds)
    if amount < 0:
        raise ValueError("no such amount")
    return f"run {number} paid {amount}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def reset(amount: int, seconds: float) -> str:
    return f"run {count(amount)} reset {amount}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look(amount: int, seconds: float) -> str:
    return f"run {count(amount)} saw {amount}"


listener = socket.create_server(("127.0.0.1", 0))
print("http://%s:%d" % listener.getsockname(), flush=True)
app = server.streamable_http_app(json_response=answers == "json")
config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
