// The rules one by one, against a server that answers by script and records when it was asked.

import assert from 'node:assert/strict'
import { test } from 'node:test'

import { IdempotencyError, forget, idempotentFetch, memory } from '../ibid.js'
import { storage, until, upstream } from './kit.mjs'

const PAY = { method: 'POST', body: 'amount=1' }
const problem = (name, status, headers) => ({
  status,
  headers: { 'content-type': 'application/problem+json', ...headers },
  body: JSON.stringify({ type: `/.well-known/idempotency#${name}`, title: 't', status, detail: `it is ${name}` }),
})

const ends = call => call.then(answer => ({ answer }), error => ({ error }))
/** The times between the requests, as the server saw them. */
const gaps = ({ log }) => log.slice(1).map((it, at) => it.at - log[at].at)
/** Never early, and not so late that another schedule would explain it. */
const follow = (app, waits) => {
  const seen = gaps(app)
  assert.equal(seen.length, waits.length)
  waits.forEach((wait, at) => assert.ok(seen[at] >= wait && seen[at] < wait * 1.25 + 4000, `${seen} for ${waits}`))
}

for (const [schedule, waits] of [['exponential', [100, 200, 400, 800]], ['linear', [1000, 2000]], [[30, 60], [30, 60]]]) {
  test(`a storm of 409 follows the schedule ${schedule}`, { concurrency: true }, async t => {
    const app = await upstream(t, () => problem('in-progress', 409, { 'retry-after': '30' }))
    const { error } = await ends(idempotentFetch(app.url, PAY, { schedule }))
    assert.deepEqual([error.reason, error.attempts], ['in-progress', waits.length + 1])
    assert.equal(app.keys().size, 1)
    follow(app, waits)
  })
}

test('a bare 409 is in progress too, unless the server says that it is the app\'s own', async t => {
  const app = await upstream(t, (_, n) => ({ status: n < 3 ? 409 : 201 }))
  const { answer } = await ends(idempotentFetch(app.url, PAY, { schedule: [5, 5] }))
  assert.deepEqual([answer.status, answer.idempotency.attempts], [201, 3])
  const own = await upstream(t, () => ({ status: 409, headers: { 'idempotency-stored': 'false' } }))
  const { answer: conflict } = await ends(idempotentFetch(own.url, PAY, { schedule: [5, 5] }))
  assert.deepEqual([conflict.status, conflict.idempotency.attempts], [409, 1])
})

test('Retry-After is honoured, as seconds and as a date', async t => {
  const date = 'Sun, 06 Nov 1994 08:49:37 GMT'
  const answers = [
    { status: 429, headers: { 'retry-after': '1' } },
    { status: 503, headers: { date, 'retry-after': 'Sun, 06 Nov 1994 08:49:38 GMT' } },
    problem('overloaded', 503, { 'retry-after': '1' }),
    { status: 201 },
  ]
  const app = await upstream(t, (_, n) => answers[n - 1])
  const { answer } = await ends(idempotentFetch(app.url, PAY, { schedule: [5, 5, 5] }))
  assert.deepEqual([answer.status, answer.idempotency.attempts], [201, 4])
  follow(app, [1000, 1000, 1000])
})

test('a Retry-After beyond the limit stops, and says so', async t => {
  const app = await upstream(t, () => ({ status: 503, headers: { 'retry-after': '3600' } }))
  const { error } = await ends(idempotentFetch(app.url, PAY))
  assert.deepEqual([error.reason, error.attempts, app.log.length], ['retry-after', 1, 1])
})

test('no other 4xx is retried, and 5xx only if asked for', async t => {
  for (const status of [400, 401, 403, 404, 408, 422, 425, 500, 502]) {
    const app = await upstream(t, () => ({ status }))
    const { answer } = await ends(idempotentFetch(app.url, PAY, { schedule: [5, 5], retry5xx: status < 500 }))
    assert.deepEqual([answer.status, app.log.length], [status, 1])
  }
  const app = await upstream(t, () => ({ status: 500 }))
  const { error } = await ends(idempotentFetch(app.url, PAY, { schedule: [5, 5], retry5xx: true }))
  assert.deepEqual([error.reason, error.attempts, error.last.status], ['server-error', 3, 500])
})

test('every refusal is retried or not, as its name says', async t => {
  const refusals = {
    'in-progress': 'in-progress',
    'store-unavailable': 'unavailable',
    overloaded: 'unavailable',
    'quota-exceeded': 'unavailable',
    'upstream-unreachable': 'unavailable',
    'upstream-lost': 'unavailable',
    'upstream-timeout': 'unavailable',
    'key-missing': 'refused',
    'key-invalid': 'refused',
    'scope-missing': 'refused',
    'request-ambiguous': 'refused',
    'identity-invalid': 'refused',
    'scope-refused': 'refused',
    'body-too-large': 'refused',
    'key-reused': 'key-reused',
    'method-unknown': 'refused',
    'outcome-unknown': 'outcome-unknown',
    'of-tomorrow': 'refused',
  }
  for (const [name, reason] of Object.entries(refusals)) {
    const app = await upstream(t, () => problem(name, 418))
    const { error } = await ends(idempotentFetch(app.url, PAY, { schedule: [5], retry5xx: true }))
    const retried = ['in-progress', 'unavailable'].includes(reason)
    assert.deepEqual([error.reason, error.attempts], [reason, retried ? 2 : 1], name)
    assert.match(error.message, new RegExp(`it is ${name}`))
  }
})

test('a refusal in the shape of Stripe is one too, and an error of the app is an answer', async t => {
  const stripe = (status, error, retry = false) => ({ status, headers: { 'stripe-should-retry': `${retry}` }, body: JSON.stringify({ error }) })
  const refusals = [
    [stripe(400, { type: 'idempotency_error', message: 'm' }), 'key-reused', 1],
    [stripe(409, { type: 'api_error', code: 'outcome_unknown', message: 'm' }), 'outcome-unknown', 1],
    [stripe(409, { type: 'invalid_request_error', code: 'idempotency_key_in_use', message: 'm' }, true), 'in-progress', 2],
    [stripe(400, { type: 'invalid_request_error', code: 'scope_missing', message: 'm' }), 'refused', 1],
    [stripe(502, { type: 'api_error', code: 'upstream_lost', message: 'm' }, true), 'unavailable', 2],
    [stripe(503, { type: 'api_error', code: 'overloaded', message: 'm' }, true), 'unavailable', 2],
  ]
  for (const [answer, reason, attempts] of refusals) {
    const app = await upstream(t, () => answer)
    const kept = storage()
    const { error } = await ends(idempotentFetch(app.url, PAY, { schedule: [5], operation: 'o', storage: kept }))
    assert.deepEqual([error.reason, error.attempts, kept.pending(), error.problem.detail], [reason, attempts, 1, 'm'])
  }
  const app = await upstream(t, () => stripe(402, { type: 'card_error', code: 'card_declined', message: 'm' }))
  assert.equal((await idempotentFetch(app.url, PAY)).status, 402)
})

test('a replay is told by any of its signs, and is final', async t => {
  const signs = [
    { headers: { 'idempotent-replayed': 'true' } },
    { headers: { 'x-idempotency-replay': 'true' } },
    { headers: { 'x-idempotency-cached': 'true' } },
    { body: '{"success":true,"metadata":{"cached":true}}' },
  ]
  for (const sign of signs) {
    const app = await upstream(t, () => ({ status: 503, ...sign }))
    const kept = storage()
    const { answer } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: kept }))
    assert.deepEqual([answer.idempotency.replayed, app.log.length, kept.pending()], [true, 1, 0])
  }
  const first = await upstream(t, () => ({ headers: { 'x-idempotency-cached': 'false' }, body: '{"metadata":{"cached":false}}' }))
  assert.equal((await idempotentFetch(first.url, PAY)).idempotency.replayed, false)
})

test('an answer that only looks like a refusal is an answer', async t => {
  const app = await upstream(t, () => ({ status: 200, body: problem('outcome-unknown', 409).body }))
  const { answer } = await ends(idempotentFetch(app.url, PAY))
  assert.deepEqual([answer.status, answer.idempotency.attempts], [200, 1])
})

test('an answer that breaks off is asked for again', async t => {
  const app = await upstream(t, (_, n) => ({ cut: { 1: 'before', 2: 'within' }[n] }))
  const kept = storage()
  const { answer } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: kept, schedule: [5, 5] }))
  assert.deepEqual([await answer.json(), app.keys().size, kept.pending()], [{ run: 3 }, 1, 0])
})

test('what cannot be reached stops as network, with its key kept', async () => {
  const kept = storage()
  const { error } = await ends(idempotentFetch('http://127.0.0.1:1/', PAY, { operation: 'o', storage: kept, schedule: [5, 5] }))
  assert.deepEqual([error.reason, error.attempts, kept.entries.size], ['network', 3, 1])
  assert.ok(error instanceof IdempotencyError && error.last instanceof Error)
})

test('one attempt and all of them have their time', async t => {
  const app = await upstream(t, () => ({ until: new Promise(() => {}) }))
  const { error } = await ends(idempotentFetch(app.url, PAY, { attemptTimeout: 30, schedule: [5] }))
  assert.deepEqual([error.reason, error.attempts], ['network', 2])
  assert.match(error.message, /no whole answer within 30 ms/)
  const { error: late } = await ends(idempotentFetch(app.url, PAY, { attemptTimeout: 30, deadline: 9e3, schedule: [5, 60e3] }))
  assert.deepEqual([late.reason, late.attempts], ['deadline', 2])
})

test('an operation that was begun too long ago is not sent', async t => {
  const app = await upstream(t)
  const kept = storage()
  kept.setItem('ibid:o', JSON.stringify({ key: 'k-1', since: Date.now() - 864e5 - 1 }))
  const { error } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: kept }))
  assert.deepEqual([error.reason, error.attempts, error.key, app.log.length], ['key-too-old', 0, 'k-1', 0])
  const { answer } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: kept, lifetime: Infinity }))
  assert.equal(answer.idempotency.key, 'k-1')
})

test('a name is free again when its operation was refused, forgotten, or ended a lifetime ago', async t => {
  const app = await upstream(t, (_, n) => ({ status: n === 1 ? 402 : 201 }))
  const kept = storage()
  const pay = more => idempotentFetch(app.url, PAY, { operation: 'o', storage: kept, ...more })
  // The app said no: the next try is another operation.
  assert.deepEqual([(await pay()).status, kept.entries.size], [402, 0])
  const first = (await pay()).idempotency.key
  assert.equal((await pay()).idempotency.key, first)
  await forget('o', { storage: kept })
  const second = (await pay()).idempotency.key
  assert.notEqual(second, first)
  const entry = JSON.parse(kept.getItem('ibid:o'))
  assert.equal(entry.key, second)
  assert.ok(entry.until - Date.now() > 864e5 - 60e3 && entry.until - Date.now() <= 864e5)
  kept.setItem('ibid:o', JSON.stringify({ ...entry, until: Date.now() - 1 }))
  const third = (await pay({ lifetime: Infinity })).idempotency.key
  assert.notEqual(third, second)
  assert.equal((await pay()).idempotency.key, third)
  // A replay does not make it last longer.
  assert.equal(JSON.parse(kept.getItem('ibid:o')).until, null)
})

test('old entries are removed, and those that have not ended never', async t => {
  const app = await upstream(t)
  const entry = more => JSON.stringify({ key: 'k', since: 0, ...more })
  const past = entry({ until: Date.now() - 1 })
  const kept = {}
  // As localStorage has its entries: as properties of its own.
  Object.assign(kept, { 'ibid:old': past, 'ibid:pending': entry(), other: past })
  const get = name => kept[name] ?? null
  Object.assign(kept, { getItem: get, setItem: (name, value) => (kept[name] = value), removeItem: name => delete kept[name] })
  await idempotentFetch(app.url, PAY, { operation: 'o', storage: kept })
  await until('it is removed', () => !('ibid:old' in kept))
  assert.deepEqual(Object.keys(kept).filter(it => /:|other/.test(it)), ['ibid:pending', 'other', 'ibid:o'])
})

test('in memory the latest 10,000 that have ended are kept', () => {
  const ended = JSON.stringify({ key: 'k', since: 0, until: null })
  memory.addItem('pending', JSON.stringify({ key: 'k', since: 0 }))
  for (let at = 0; at < 10_010; at++) memory.setItem(`ended-${at}`, ended)
  assert.equal(memory.names().length, 10_000)
  assert.deepEqual(['pending', 'ended-0', 'ended-10009'].map(name => memory.getItem(name) !== null), [true, false, true])
  memory.names().forEach(memory.removeItem)
})

test('a storage that fails stops before anything is sent; one that fails afterwards withholds no answer', async t => {
  const app = await upstream(t)
  const full = { ...storage(), setItem: () => { throw Error('quota') } }
  const damaged = { ...storage(), getItem: () => '{"key":' }
  for (const bad of [full, damaged]) {
    const { error } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: bad }))
    assert.deepEqual([error.reason, error.attempts, app.log.length], ['storage', 0, 0])
  }
  const inner = storage()
  const sticky = { ...inner, addItem: inner.setItem, setItem: () => { throw Error('read-only') } }
  const { answer } = await ends(idempotentFetch(app.url, PAY, { operation: 'o', storage: sticky }))
  assert.deepEqual([answer.status, inner.pending()], [201, 1])
})

test('what can be sent only once is refused before it is', async t => {
  const app = await upstream(t)
  const stream = new ReadableStream({ start: it => it.close() })
  await assert.rejects(idempotentFetch(app.url, { method: 'POST', body: stream, duplex: 'half' }), /only once/)
  await assert.rejects(idempotentFetch(new Request(app.url, PAY)), /only once/)
  const kept = storage()
  await assert.rejects(idempotentFetch(app.url, { ...PAY, method: 'CONNECT' }, { operation: 'o', storage: kept }), TypeError)
  await assert.rejects(idempotentFetch(app.url, { ...PAY, headers: { 'bad name': 'x' } }, { operation: 'o', storage: kept }), TypeError)
  assert.equal(kept.entries.size, 0)
  for (const key of ['no\nkey', () => 'no\nkey', '']) {
    await assert.rejects(idempotentFetch(app.url, PAY, { key, operation: 'o', storage: storage() }), /visible ASCII/)
  }
  await assert.rejects(idempotentFetch(app.url, PAY, { schedule: 'sometimes' }), /no schedule/)
  assert.equal(app.log.length, 0)
})

test('bodies that can be sent again are, whole', async t => {
  const form = new FormData()
  form.set('amount', '1')
  const bodies = ['amount=1', new TextEncoder().encode('amount=1'), new Blob(['amount=1']), new URLSearchParams('amount=1'), form]
  for (const body of bodies) {
    const app = await upstream(t, (_, n) => ({ status: n < 3 ? 409 : 201 }))
    await idempotentFetch(app.url, { method: 'POST', body }, { schedule: [5, 5] })
    assert.deepEqual(app.log.map(it => it.body.replaceAll(/-+formdata\S+/g, '')).filter(it => /amount/.test(it)).length, 3)
  }
})

test('a key in the headers is taken as it is, quoted or not', async t => {
  const app = await upstream(t)
  const send = (key, options) => idempotentFetch(app.url, { ...PAY, headers: { 'Idempotency-Key': key } }, options)
  assert.equal((await send('"a,b"')).idempotency.key, 'a,b')
  assert.equal((await send('k-1', { operation: 'o', storage: storage() })).idempotency.key, 'k-1')
  await idempotentFetch(app.url, PAY, { key: 'a"b\\,' })
  assert.deepEqual(app.log.map(it => it.key), ['"a,b"', 'k-1', '"a\\"b\\\\,"'])
})
