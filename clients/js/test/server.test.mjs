// What the scenarios of the server's half do not show.

import assert from 'node:assert/strict'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'

import { Ibid, NotStarted, cleanupOldIdempotencyKeys, extractIdempotencyKey, generateIdempotencyKey, isValidIdempotencyKey, outboundKey, withIdempotency } from '../server.js'
import { gateway, upstream } from './kit.mjs'

async function startIbid(t) {
  const folder = await mkdtemp(join(tmpdir(), 'ibid-js-api-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  const address = `unix:${join(folder, 'api.sock')}`
  await gateway(t, await upstream(t), `[api]\nlisten = "${address}"\n`)
  return address
}

function counted() {
  let runs = 0
  return async request => Response.json({ run: ++runs, user: request.headers.get('authorization') }, { status: 201 })
}

const pay = (key, headers = {}) =>
  new Request('http://shop.example.com/pay?a=1', { method: 'POST', body: '{"amount":1}', headers: { 'content-type': 'application/json', 'idempotency-key': key, ...headers } })

test('the keys of outbound calls are those of every SDK', async () => {
  const rows = JSON.parse(await readFile(new URL('../../outbound_keys.json', import.meta.url), 'utf8'))
  for (const { operation, name, key } of rows) assert.equal(outboundKey(operation, name), key)
})

test('identify names the caller, and the client cannot', async t => {
  const users = ['u1', 'u2', 'u1']
  const post = withIdempotency(counted(), { address: await startIbid(t), identify: () => ({ Authorization: `Bearer ${users.shift()}` }) })
  const runs = []
  for (let at = 0; at < 3; at++) runs.push((await (await post(pay('k-1', { authorization: 'Bearer forged' }))).json()).run)
  assert.deepEqual(runs, [1, 2, 1])
})

test('a handler that did not start can run again, and one that failed cannot', async t => {
  const ibid = new Ibid({ address: await startIbid(t) })
  const fails = error => withIdempotency(async () => { throw error }, ibid)
  await assert.rejects(fails(new NotStarted())(pay('k-1')), NotStarted)
  assert.equal((await withIdempotency(counted(), ibid)(pay('k-1'))).status, 201)
  await assert.rejects(fails(Error('oops'))(pay('k-2')), /oops/)
  const refused = await withIdempotency(counted(), ibid)(pay('k-2'))
  assert.match(await refused.text(), /#outcome-unknown/)
})

test('without ibid, closed refuses and open runs degraded', async () => {
  const address = 'unix:/nowhere/api.sock'
  const closed = await withIdempotency(counted(), { address })(pay('k-1'))
  assert.deepEqual([closed.status, closed.headers.get('retry-after')], [503, '1'])
  const open = await withIdempotency(counted(), { address, unreachable: 'open' })(pay('k-1'))
  assert.deepEqual([open.status, open.headers.get('idempotency-guarantee'), (await open.json()).run], [201, 'degraded', 1])
  assert.throws(() => new Ibid({ address, unreachable: 'maybe' }), TypeError)
  assert.throws(() => new Ibid({ address: '' }), TypeError)
})

test('keys are made, found and checked', async () => {
  for (const key of ['550e8400-e29b-41d4-a716-446655440000', 'user_123_application_2024', generateIdempotencyKey()]) assert.ok(isValidIdempotencyKey(key), key)
  for (const key of ['short', '', null, 'a key with spaces in it', 'x'.repeat(256)]) assert.ok(!isValidIdempotencyKey(key), String(key))
  assert.equal(extractIdempotencyKey(new Headers({ 'Idempotency-Key': '"k-1"' })), 'k-1')
  assert.equal(extractIdempotencyKey({ 'idempotency-key': ' k-1 ' }), 'k-1')
  assert.equal(extractIdempotencyKey({}), null)
  assert.equal(await cleanupOldIdempotencyKeys(), 0)
})
