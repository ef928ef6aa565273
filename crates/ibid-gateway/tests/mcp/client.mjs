// MCP clients of the official SDKs for Node, with the gateway as their server: node client.mjs http://HOST:PORT/mcp SDK AGENT
//
// SDK is "1" (@modelcontextprotocol/sdk) or "2" (@modelcontextprotocol/client). Each line of stdin is {"key", "amount",
// "seconds", "times"}, and each line of stdout is what came of it, as client.py has it.

import { createRequire } from 'node:module'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { pathToFileURL } from 'node:url'

const [url, sdk, agent] = process.argv.slice(2)
const { resolve } = createRequire(join(process.env.NODE_MODULES, 'x.js'))
const load = name => import(pathToFileURL(resolve(name)))
const { Client, StreamableHTTPClientTransport } =
  sdk === '2'
    ? await load('@modelcontextprotocol/client')
    : { ...(await load('@modelcontextprotocol/sdk/client/index.js')), ...(await load('@modelcontextprotocol/sdk/client/streamableHttp.js')) }

// Without it, a call whose server is gone waits for a minute.
const options = { timeout: 20_000 }

const call = (client, { key, amount, seconds = 0 }) =>
  client.callTool({ name: 'pay', arguments: { amount, seconds }, _meta: { 'idempotency-key': key } }, ...(sdk === '2' ? [options] : [undefined, options])).then(
    ({ content: [{ text }], isError: failed = false }) => ({ text, failed }),
    ({ code, data }) => ({ code, type: data?.type ?? null }),
  )

const calls = async asked => {
  const client = new Client({ name: 'agent', version: '1' })
  const requestInit = { headers: { Authorization: `Bearer ${agent}` } }
  await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit }))
  const told = await Promise.all(Array.from({ length: asked.times ?? 1 }, () => call(client, asked)))
  await client.close()
  return told
}

const answers = asked => calls(asked).catch(() => [{ lost: true }])

for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(await answers(JSON.parse(line))))
