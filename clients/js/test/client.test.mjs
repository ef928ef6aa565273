// idempotentFetch against the real gateway.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtemp, readdir, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

import { IdempotencyError, forget, idempotentFetch, memory, uuid } from '../ibid.js'
import { fileStorage } from '../file.js'
import { cutter, gate, gateway, storage, upstream, until } from './kit.mjs'

const PAY = { method: 'POST', body: '{"amount":1}', headers: { 'content-type': 'application/json' } }

const stopped = async call => {
  const error = await call.then(
    answer => assert.fail(`answered ${answer.status}`),
    error => error,
  )
  assert.ok(error instanceof IdempotencyError, `${error.stack}`)
  return error
}

test('a first answer, then its replay, each told from the other', async t => {
  const app = await upstream(t)
  const { url } = await gateway(t, app)
  const [first, again] = [await idempotentFetch(`${url}/pay`, PAY, { key: 'k-1' }), await idempotentFetch(`${url}/pay`, PAY, { key: 'k-1' })]
  assert.deepEqual(first.idempotency, { key: 'k-1', attempts: 1, replayed: false, degraded: false })
  assert.deepEqual(again.idempotency, { key: 'k-1', attempts: 1, replayed: true, degraded: false })
  assert.deepEqual([first.status, await first.json()], [201, { run: 1 }])
  assert.deepEqual([again.status, await again.json()], [201, { run: 1 }])
  assert.equal(app.log.length, 1)
})

test('every preset tells its replays', async t => {
  const app = await upstream(t, () => ({ body: '{"success":true}' }))
  const { url } = await gateway(
    t,
    app,
    '[[route]]\nmatch = "POST /a"\npreset = "appsportal"\n[[route]]\nmatch = "POST /m"\npreset = "membership"\n' +
      '[[route]]\nmatch = "POST /s"\npreset = "stripe"\n',
  )
  const presets = [
    ['/a', 'X-Idempotency-Key', { 'x-tenant-id': 't1' }],
    ['/m', 'Idempotency-Key', { 'x-user-id': 'u1' }],
    ['/s', 'Idempotency-Key', { authorization: 'Bearer b' }],
  ]
  for (const [path, header, headers] of presets) {
    const key = uuid()
    const send = () => idempotentFetch(url + path, { ...PAY, headers: { ...PAY.headers, ...headers } }, { header, key })
    assert.equal((await send()).idempotency.replayed, false, path)
    assert.equal((await send()).idempotency.replayed, true, path)
  }
  assert.equal(app.log.length, 3)
})

test('the network cut in mid-request: the same key again, one effect', async t => {
  const app = await upstream(t)
  const { port } = await gateway(t, app)
  const link = await cutter(t, port)
  link.breaks = 2
  const kept = storage()
  const answer = await idempotentFetch(`${link.url}/pay`, PAY, { operation: 'order-17', storage: kept })
  assert.deepEqual([answer.status, await answer.json()], [201, { run: 1 }])
  assert.equal(answer.idempotency.attempts, 3)
  assert.equal(answer.idempotency.replayed, true)
  assert.equal(app.log.length, 1)
  assert.equal(kept.pending(), 0)
})

test('an operation that is run twice to success pays once, also in another process', async t => {
  const app = await upstream(t)
  const { url } = await gateway(t, app)
  const folder = await mkdtemp(join(tmpdir(), 'ibid-js-keys-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  let runs = 0
  for (const storage of [memory, fileStorage(folder)]) {
    const pay = body => idempotentFetch(`${url}/${runs}`, { ...PAY, body }, { operation: 'order-17', storage })
    await forget('order-17', { storage })
    const [first, again] = [await pay(PAY.body), await pay(PAY.body)]
    assert.deepEqual([first.idempotency.replayed, again.idempotency.replayed], [false, true])
    assert.equal(again.idempotency.key, first.idempotency.key)
    assert.equal(await again.text(), await first.text())
    assert.equal(app.log.length, ++runs)
    // Another request under this name is a mistake, and is not sent with a key of its own.
    assert.equal((await stopped(pay('{"amount":2}'))).reason, 'key-reused')
    // Unless the name is freed.
    await forget('order-17', { storage })
    assert.equal((await pay('{"amount":2}')).idempotency.replayed, false)
    assert.equal(app.log.length, ++runs)
  }
  const pay = spawn(process.execPath, [join(import.meta.dirname, 'pay.mjs'), `${url}/2`, folder, 'order-18'])
  await once(pay, 'close')
  const answer = await idempotentFetch(`${url}/2`, { method: 'POST', body: '{"amount":1}' }, { operation: 'order-18', storage: fileStorage(folder) })
  assert.deepEqual([answer.status, answer.idempotency.replayed, app.log.length], [201, true, runs + 1])
})

test('while the first runs, others are told so and get its answer', async t => {
  const held = gate()
  const app = await upstream(t, () => ({ until: held.promise }))
  const { url } = await gateway(t, app)
  const first = idempotentFetch(`${url}/pay`, PAY, { key: 'k-1' })
  await until('it runs', () => app.log.length === 1)
  const second = idempotentFetch(`${url}/pay`, PAY, { key: 'k-1' })
  const late = await stopped(idempotentFetch(`${url}/pay`, PAY, { key: 'k-1', schedule: [10, 10] }))
  assert.deepEqual([late.reason, late.attempts, late.problem.status], ['in-progress', 3, 409])
  held.open()
  assert.deepEqual(await (await first).json(), await (await second).json())
  assert.ok((await second).idempotency.replayed)
  assert.equal(app.log.length, 1)
})

test('an unknown outcome is never retried, and its key stays', async t => {
  const app = await upstream(t, () => ({ cut: 'before' }))
  const { url } = await gateway(t, app)
  const kept = storage()
  const options = { operation: 'order-17', storage: kept, schedule: [5, 5, 5, 5] }
  const error = await stopped(idempotentFetch(`${url}/pay`, PAY, options))
  // The first attempt was told that the answer was lost; the second, that nobody knows. There is no third.
  assert.deepEqual([error.reason, error.attempts, error.last.status], ['outcome-unknown', 2, 409])
  assert.match(error.message, /stopped after 2 attempts: nobody knows whether it happened; look it up/)
  assert.equal(app.log.length, 1)
  const again = await stopped(idempotentFetch(`${url}/pay`, PAY, options))
  assert.deepEqual([again.reason, again.attempts, again.key], ['outcome-unknown', 1, error.key])
  assert.equal(app.log.length, 1)
})

test('a final 4xx is an answer, not retried, and ends the operation', async t => {
  const app = await upstream(t, () => ({ status: 404 }))
  const { url } = await gateway(t, app)
  const kept = storage()
  const answer = await idempotentFetch(`${url}/pay`, PAY, { operation: 'order-17', storage: kept })
  assert.deepEqual([answer.status, answer.idempotency.attempts], [404, 1])
  assert.deepEqual([app.log.length, kept.entries.size], [1, 0])
})

test('after a 401 the key stays: an earlier attempt may have had its effect', async t => {
  const app = await upstream(t, () => ({ status: 401 }))
  const { url } = await gateway(t, app)
  const kept = storage()
  const answer = await idempotentFetch(`${url}/pay`, PAY, { operation: 'order-17', storage: kept })
  assert.deepEqual([answer.status, app.log.length, kept.entries.size], [401, 1, 1])
})

test('a key of another request stops, and is kept', async t => {
  const app = await upstream(t)
  const { url } = await gateway(t, app)
  await idempotentFetch(`${url}/pay`, PAY, { key: 'k-1' })
  const kept = storage()
  const options = { operation: 'order-17', key: () => 'k-1', storage: kept }
  const error = await stopped(idempotentFetch(`${url}/pay`, { ...PAY, body: '{}' }, options))
  assert.deepEqual([error.reason, error.attempts, kept.entries.size], ['key-reused', 1, 1])
})

test('a key in the wrong form is not kept, or the operation would never get through', async t => {
  const app = await upstream(t)
  const { url } = await gateway(t, app, '[policy]\nkey.format = "uuid4"\n')
  const kept = storage()
  const options = { operation: 'order-17', storage: kept }
  const error = await stopped(idempotentFetch(`${url}/pay`, PAY, { ...options, key: () => 'mine' }))
  assert.deepEqual([error.reason, error.attempts, kept.entries.size], ['refused', 1, 0])
  assert.match(error.message, /version 4/)
  assert.equal((await idempotentFetch(`${url}/pay`, PAY, options)).status, 201)
})

test('a killed process goes on with the same key: one effect', async t => {
  const held = gate()
  const app = await upstream(t, () => ({ until: held.promise }))
  const { url } = await gateway(t, app)
  const folder = await mkdtemp(join(tmpdir(), 'ibid-js-keys-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  const pay = () => spawn(process.execPath, [join(import.meta.dirname, 'pay.mjs'), `${url}/pay`, folder, 'order-17'])
  const killed = pay()
  await until('it is sent', () => app.log.length === 1)
  killed.kill('SIGKILL')
  assert.equal((await once(killed, 'exit'))[1], 'SIGKILL')
  assert.equal((await readdir(folder)).length, 1)
  held.open()
  const next = pay()
  let said = ''
  next.stdout.on('data', data => (said += data))
  next.stderr.on('data', data => (said += data))
  assert.deepEqual(await once(next, 'close'), [0, null], said)
  const answer = JSON.parse(said)
  assert.deepEqual([answer.status, answer.body, answer.key], [201, { run: 1 }, app.log[0].key])
  assert.equal(app.log.length, 1)
  // The key stays, for as long as the server remembers it.
  assert.equal((await readdir(folder)).length, 1)
})

test('an abort ends it at once; the key stays and the next call goes on', async t => {
  const held = gate()
  const app = await upstream(t, () => ({ until: held.promise }))
  const { url } = await gateway(t, app)
  const options = { operation: 'order-17', storage: storage() }
  for (const delay of [0, 100]) {
    // Once while it is sent, once while it waits for the next attempt.
    const leave = new AbortController()
    const call = idempotentFetch(`${url}/pay`, { ...PAY, signal: leave.signal }, { ...options, schedule: [60e3] })
    await until('it runs', () => app.log.length === 1)
    await sleep(delay)
    leave.abort(Error('the user left'))
    await assert.rejects(call, /the user left/)
  }
  await assert.rejects(idempotentFetch(`${url}/pay`, { ...PAY, signal: AbortSignal.abort() }, options), { name: 'AbortError' })
  held.open()
  const answer = await idempotentFetch(`${url}/pay`, PAY, options)
  assert.deepEqual([answer.status, answer.idempotency.replayed, app.log.length], [201, true, 1])
})

test('two that begin at once agree on one key', async t => {
  const app = await upstream(t)
  const { url } = await gateway(t, app)
  const sync = storage()
  const slow = Object.fromEntries(
    ['getItem', 'setItem', 'removeItem'].map(name => [name, async (...args) => (await sleep(5), sync[name](...args))]),
  )
  for (const [at, shared] of [storage(), slow, memory].entries()) {
    const begin = () => idempotentFetch(`${url}/${at}`, PAY, { operation: 'order-17', storage: shared })
    const answers = await Promise.all(Array.from({ length: 8 }, begin))
    assert.equal(new Set(answers.map(it => it.idempotency.key)).size, 1, `storage ${at}`)
    assert.equal(app.log.length, at + 1)
  }
})
