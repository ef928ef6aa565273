// MCP servers of the official SDKs for Node: node server.mjs json|stream RUNS SDK
//
// SDK is "1" (@modelcontextprotocol/sdk) or "2" (@modelcontextprotocol/server). It counts as server.py does.

import { appendFileSync, readFileSync } from 'node:fs'
import { createServer } from 'node:http'
import { createRequire } from 'node:module'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'

const [answers, runs, sdk] = process.argv.slice(2)
const { resolve } = createRequire(join(process.env.NODE_MODULES, 'x.js'))
const load = name => import(pathToFileURL(resolve(name)))
const { z } = await load('zod')
const { McpServer, createMcpHandler } = await load(sdk === '2' ? '@modelcontextprotocol/server' : '@modelcontextprotocol/sdk/server/mcp.js')
const fields = { amount: z.number(), seconds: z.number() }

function shop() {
  const server = new McpServer({ name: 'shop', version: '1' })
  server.registerTool('pay', { description: 'pays', inputSchema: sdk === '2' ? z.object(fields) : fields }, async ({ amount, seconds }) => {
    appendFileSync(runs, `${amount}\n`)
    const run = readFileSync(runs, 'utf8').split('\n').length - 1
    await sleep(seconds * 1000)
    if (amount < 0) throw Error('no such amount')
    return { content: [{ type: 'text', text: `run ${run} paid ${amount}` }] }
  })
  return server
}

async function handler() {
  if (sdk === '2') {
    const { toNodeHandler } = await load('@modelcontextprotocol/node')
    return toNodeHandler(createMcpHandler(shop, { responseMode: answers === 'json' ? 'json' : 'sse' }))
  }
  const { StreamableHTTPServerTransport } = await load('@modelcontextprotocol/sdk/server/streamableHttp.js')
  return async (request, response) => {
    const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined, enableJsonResponse: answers === 'json' })
    await shop().connect(transport)
    await transport.handleRequest(request, response)
  }
}

const server = createServer(await handler())
server.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${server.address().port}`))
