// Serves the route handlers without Next.js, which needs no build: node server.mjs
import http from 'node:http'

const routes = {}
for (const path of ['/api/membership/apply', '/api/coach/sessions', '/api/athlete/check-in', '/api/athlete/leave-request']) {
  routes[path] = await import(`./app${path}/route.js`)
}

async function handle(request, body) {
  const url = new URL(request.url, `http://${request.headers.host}`)
  const handler = routes[url.pathname]?.[request.method]
  if (!handler) return new Response('not found\n', { status: 404 })
  const headers = Object.entries(request.headers).flatMap(([name, value]) => [value].flat().map(one => [name, one]))
  return handler(new Request(url, { method: request.method, headers, body: body.length ? body : undefined }))
}

http.createServer(async (request, response) => {
  try {
    const answer = await handle(request, Buffer.concat(await request.toArray()))
    response.writeHead(answer.status, Object.fromEntries(answer.headers))
    response.end(Buffer.from(await answer.arrayBuffer()))
  } catch (error) {
    console.error(error)
    response.writeHead(500).end()
  }
}).listen(Number(process.env.PORT ?? 3000), '127.0.0.1')
