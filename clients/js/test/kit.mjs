// Real servers for the tests: an upstream that counts, the gateway as a process, a TCP proxy that cuts.

import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import http from 'node:http'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { createInterface } from 'node:readline'

const BIN = process.env.IBID_BIN ?? resolve(import.meta.dirname, '../../../target/debug/ibid')

const listen = async server => {
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return server.address().port
}

/** A server that logs each request (`log`) and answers as `reply(request, n)` says: { status, headers, body, until, cut }. */
export async function upstream(t, reply = () => ({})) {
  const log = []
  const server = http.createServer(async (request, response) => {
    const at = performance.now()
    let body = ''
    for await (const part of request) body += part
    const key = request.headers['idempotency-key'] ?? request.headers['x-idempotency-key']
    log.push({ at, method: request.method, path: request.url, key, headers: request.headers, body })
    const { status = 201, headers = {}, body: says = JSON.stringify({ run: log.length }), until, cut } = reply(request, log.length)
    await until
    if (cut === 'before') return request.socket.resetAndDestroy()
    response.writeHead(status, { 'content-type': 'application/json', ...headers })
    if (cut !== 'within') return response.end(says)
    response.write(says.slice(0, 3))
    setTimeout(() => request.socket.resetAndDestroy(), 20)
  })
  const port = await listen(server)
  t.after(() => (server.closeAllConnections(), server.close()))
  return { log, url: `http://127.0.0.1:${port}`, keys: () => new Set(log.map(it => it.key)) }
}

/** The gateway in front of it, killed at the test's end. */
export async function gateway(t, behind, config = '') {
  if (!existsSync(BIN)) throw Error(`${BIN} is missing: cargo build -p ibid-gateway, or set IBID_BIN`)
  const folder = await mkdtemp(join(tmpdir(), 'ibid-js-'))
  await writeFile(join(folder, 'ibid.toml'), `admin.listen = "off"\n${config}`)
  const args = ['serve', '--config', 'ibid.toml', '--listen', '127.0.0.1:0', '--upstream', behind.url, '--store', 'memory:']
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('IBID_')))
  const child = spawn(BIN, args, { cwd: folder, env, stdio: ['ignore', 'pipe', 'pipe'] })
  const said = []
  t.after(async () => {
    child.kill('SIGKILL')
    await rm(folder, { recursive: true, force: true })
  })
  const lines = stream => createInterface({ input: stream })
  lines(child.stderr).on('line', line => said.push(line))
  const url = await new Promise((found, fail) => {
    lines(child.stdout).on('line', line => {
      said.push(line)
      const [, address] = /listening on (http:\/\/\S+)/.exec(line) ?? []
      if (address) found(address)
    })
    child.on('exit', code => fail(Error(`the gateway ended (${code}):\n${said.join('\n')}`)))
  })
  return { url, port: new URL(url).port }
}

/** A TCP proxy. `breaks` answers are cut: the request arrives, and a reset comes in the answer's place. */
export async function cutter(t, port) {
  const state = { breaks: 0 }
  const sockets = new Set()
  const server = net.createServer(client => {
    const far = net.connect(port, '127.0.0.1')
    for (const socket of [client, far]) {
      sockets.add(socket)
      socket.on('error', () => {})
      socket.on('close', () => (client.destroy(), far.destroy()))
    }
    client.on('data', data => far.write(data))
    far.on('data', data => {
      if (state.breaks > 0) {
        state.breaks--
        client.resetAndDestroy()
      } else client.write(data)
    })
  })
  state.url = `http://127.0.0.1:${await listen(server)}`
  t.after(() => (server.close(), sockets.forEach(socket => socket.destroy())))
  return state
}

/** A storage as localStorage is one, for looking into. */
export function storage() {
  const entries = new Map()
  return {
    entries,
    getItem: name => entries.get(name) ?? null,
    setItem: (name, value) => void entries.set(name, value),
    removeItem: name => void entries.delete(name),
    /** How many operations have not ended. */
    pending: () => [...entries.values()].filter(it => !('until' in JSON.parse(it))).length,
  }
}

/** A promise, and what resolves it. */
export function gate() {
  let open
  const promise = new Promise(done => (open = done))
  return { promise, open }
}

/** Waits until it is so, at most ten seconds. */
export async function until(what, condition) {
  for (const end = Date.now() + 10e3; !condition(); await new Promise(done => setTimeout(done, 5))) {
    if (Date.now() > end) throw Error(`waited ten seconds until ${what}`)
  }
}
