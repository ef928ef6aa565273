"""An MCP client of the official SDK, with the gateway as its server.

    client.py http://HOST:PORT/mcp MODE AGENT

Each line of stdin is {"tool", "key", "amount", "seconds", "times"}: so many calls at the same moment, over one connection. Each
line of stdout is what came of them.
"""

import asyncio
import json
import sys

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

url, mode, agent = sys.argv[1:]


async def call(client, asked):
    arguments = {"amount": asked["amount"], "seconds": asked.get("seconds", 0)}
    try:
        result = await client.call_tool(asked.get("tool", "pay"), arguments, meta={"idempotency-key": asked["key"]})
        return {"text": result.content[0].text, "failed": bool(result.is_error)}
    except MCPError as error:
        return {"code": error.error.code, "type": (error.error.data or {}).get("type")}


async def calls(asked):
    headers = {"Authorization": f"Bearer {agent}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
            return await asyncio.gather(*[call(client, asked) for _ in range(asked.get("times", 1))])


def answers(asked):
    try:
        return asyncio.run(calls(asked))
    except BaseExceptionGroup:
        return [{"lost": True}]


for line in sys.stdin:
    print(json.dumps(answers(json.loads(line))), flush=True)
