// The client's half of idempotency: one key per operation, the same on every retry, after every reload and in every tab.
// The key is stored before anything is sent. After success it stays for as long as the server remembers it, so that running the
// operation again gets the same answer; after a final "no" (4xx) it is removed.

const SCHEDULES = { exponential: [100, 200, 400, 800], linear: [1000, 2000], once: [] }

const WHY = {
  'outcome-unknown': 'nobody knows whether it happened; look it up, do not take a fresh key',
  'key-reused': 'the key was used for a different request',
  refused: 'the server refuses the request as it is',
  'in-progress': 'the first request with this key is still running; send it again later',
  unavailable: 'the server cannot take it at the moment; send it again later',
  'server-error': 'the server failed each time',
  network: 'no whole answer arrived, but it may have happened; send it again with the same key',
  'retry-after': 'the server asks to wait longer than maxRetryAfter',
  deadline: 'no time is left for another attempt',
  'key-too-old': 'it was begun longer ago than the server remembers keys; look up whether it happened',
  storage: 'the key cannot be stored, so nothing was sent',
}

/** Why there is no answer. */
export class IdempotencyError extends Error {
  constructor(reason, { attempts, key, last, problem }) {
    const said = problem ? `: ${problem.detail ?? problem.title}` : ` (${last?.status ?? last})`
    super(`stopped after ${attempts} attempts: ${WHY[reason]}${last ? said : ''}`)
    Object.assign(this, { name: 'IdempotencyError', reason, attempts, key, last, problem })
  }
}

/** fetch(), with a key, again until there is an answer or a reason to stop. */
export async function idempotentFetch(url, init = {}, options = {}) {
  const { operation, key: given = uuid, header = 'Idempotency-Key', schedule = 'exponential', retry5xx } = options
  const { attemptTimeout = 9e4, deadline = Infinity, maxRetryAfter = 6e4, lifetime = 864e5, jitter = 0.25 } = options
  const waits = SCHEDULES[schedule] ?? schedule
  const { body, signal } = init
  if (!Array.isArray(waits)) throw TypeError(`no schedule is named ${schedule}`)
  if (url instanceof Request || body?.getReader || body?.[Symbol.asyncIterator]) {
    throw TypeError('a stream or a Request can be sent only once: pass a URL and bytes, text or form data')
  }
  const until = Date.now() + deadline
  const headers = new Headers(init.headers)
  const state = { attempts: 0 }
  const stop = (reason, more) => new IdempotencyError(reason, Object.assign(state, more))
  let end = () => {}
  let fresh
  const own = headers.has(header) ? unquoted(headers.get(header)) : typeof given === 'string' ? given : undefined
  state.key = own ?? (await given())
  headers.set(header, quoted(state.key))
  // What cannot be sent at all is told at once, not tried five times.
  new Request(url, { ...init, headers })
  // A key of the caller's own is the same each time, and needs no storage.
  if (operation !== undefined && own === undefined) {
    try {
      const [storage, name] = place(operation, options)
      const kept = await keep(storage, name, state.key)
      fresh = kept.fresh
      state.key = kept.key
      headers.set(header, quoted(kept.key))
      // An answer is not withheld because the storage fails.
      end = until => finish(storage, name, kept.key, until).catch(() => {})
      // One that has ended is answered from the server's memory.
      if (kept.until === undefined && Date.now() - kept.since > lifetime) throw stop('key-too-old')
    } catch (last) {
      throw last instanceof IdempotencyError ? last : stop('storage', { last })
    }
  }

  for (;;) {
    signal?.throwIfAborted()
    state.attempts++
    let verdict
    try {
      const limit = Math.min(attemptTimeout, until - Date.now())
      const { response, text } = await once(url, { ...init, headers }, limit)
      const { key, attempts } = state
      verdict = { ...judge(response, text, retry5xx), last: response }
      if (!verdict.reason) {
        if (verdict.settled) await end(/^4/.test(response.status) ? 0 : Date.now() + lifetime)
        const { replayed, degraded } = verdict
        return Object.assign(response, { idempotency: { key, attempts, replayed, degraded } })
      }
    } catch (last) {
      if (signal?.aborted) throw signal.reason
      verdict = { reason: 'network', after: 0, last }
    }
    const { reason, after, last, problem } = verdict
    const wait = waits[state.attempts - 1]
    if (after === undefined || wait === undefined) {
      // Nothing has run under such a key, and nothing will.
      if (fresh && state.attempts < 2 && problem?.type.endsWith('#key-invalid')) await end(0)
      throw stop(reason, { last, problem })
    }
    // Never earlier than asked for (a timer may be 1 ms fast); a little later, so that a crowd does not come back in step.
    const pause = Math.max(wait, after) * (1 + Math.random() * jitter) + 1
    if (after > maxRetryAfter) throw stop('retry-after', { last, problem })
    if (Date.now() + pause >= until) throw stop('deadline', { last, problem })
    await sleep(pause, signal)
  }
}

/** One attempt: the answer, and its whole text unless that streams or is large. */
async function once(url, init, limit) {
  const { signal } = init
  const cut = new AbortController()
  const relay = () => cut.abort(signal.reason)
  signal?.addEventListener('abort', relay)
  const timer = setTimeout(() => cut.abort(Error(`no whole answer within ${limit} ms`)), Math.min(limit, 2 ** 31 - 1))
  let passed
  try {
    const response = await fetch(url, { ...init, signal: cut.signal })
    const { headers } = response
    passed = /event-stream/.test(headers.get('content-type')) || headers.get('content-length') > 1 << 20
    return { response, text: passed ? '' : await response.clone().text() }
  } finally {
    clearTimeout(timer)
    if (!passed) signal?.removeEventListener('abort', relay)
  }
}

/** What an answer means. With a `reason` it is none; with `after`, in ms, there may be another attempt. */
function judge({ status, headers }, text, retry5xx) {
  const media = headers.get('content-type')
  let problem
  try {
    problem = /json/.test(media) && JSON.parse(text)
  } catch {}
  const refusal = headers.has('Stripe-Should-Retry') && fromStripe(problem?.error ?? {}, status)
  problem = refusal || problem
  const name = (refusal || /problem\+json/.test(media)) && /\/\.well-known\/idempotency#(.+)/.exec(problem?.type)?.[1]
  const asked = retryAfter(headers)
  if (name) {
    if (name === 'in-progress') return { reason: name, after: 0, problem }
    if (name.startsWith('upstream-')) return { reason: 'unavailable', after: 0, problem }
    if (/^(store|overloaded|quota)/.test(name)) return { reason: 'unavailable', after: asked, problem }
    return { reason: /^(outcome-unknown|key-reused)$/.test(name) ? name : 'refused', problem }
  }
  const says = name => headers.get(name) === 'true'
  const replayed =
    ['Idempotent-Replayed', 'X-Idempotency-Replay', 'X-Idempotency-Cached'].some(says) || problem?.metadata?.cached === true
  if (!replayed) {
    if (status === 409 && !headers.has('Idempotency-Stored')) return { reason: 'in-progress', after: 0 }
    if (status === 429 || status === 503) return { reason: 'unavailable', after: asked }
    if (status > 499 && retry5xx) return { reason: 'server-error', after: 0 }
  }
  // After these an earlier attempt may still have had its effect: the key stays.
  const settled = replayed || !(status > 499 || [401, 403, 408, 409, 425].includes(status))
  return { settled, replayed, degraded: headers.get('Idempotency-Guarantee') === 'degraded' }
}

const STRIPE = /^(outcome_unknown|overloaded|request_ambiguous|(key|scope|identity|body|store|upstream)_\w+)$/
/** A refusal in the shape of Stripe's errors, as a problem. The app's own errors are none. */
function fromStripe({ type, code, message }, status) {
  const name = { idempotency_error: 'key-reused' }[type] ?? { idempotency_key_in_use: 'in-progress' }[code] ?? STRIPE.exec(code)?.[0]
  if (name) return { type: `/.well-known/idempotency#${name.replaceAll('_', '-')}`, title: name, status, detail: message }
}

/** In ms. A date is compared with the server's own clock, where that is told. */
function retryAfter(headers) {
  const value = headers.get('Retry-After')
  if (/^\d+$/.test(value)) return value * 1000
  return Math.max(0, Date.parse(value) - (Date.parse(headers.get('Date')) || Date.now())) || 0
}

const locks = () => globalThis.navigator?.locks

/** One tab at a time, where the browser can. */
const alone = async (name, work) => locks()?.request(name, work) ?? work()

const read = async (storage, name) => JSON.parse((await storage.getItem(name)) ?? null)

const place = (operation, { storage = globalThis.localStorage ?? memory } = {}) => [storage, `ibid:${operation}`]

/** Whether the operation has ended, and the server does not remember its key any more. JSON writes Infinity as null. */
const over = entry => entry?.until !== null && entry?.until < Date.now()

/** The key under this name; this one is stored if there is none. */
const keep = (storage, name, key) =>
  alone(name, async () => {
    const found = await read(storage, name)
    if (found && !over(found)) return found
    const mine = JSON.stringify({ key, since: Date.now() })
    if (storage.addItem && !found) await storage.addItem(name, mine)
    else {
      await storage.setItem(name, mine)
      // Until the other tabs see it, and without locks until they have written theirs. Whoever was last is right, then.
      await sleep(locks() ? 50 : 200)
    }
    const kept = await read(storage, name)
    return { ...kept, fresh: kept.key === key }
  })

/** The operation has ended: its key stays until then, if it still is this one. With 0 it is removed. */
async function finish(storage, name, key, until) {
  await alone(name, async () => {
    const found = await read(storage, name)
    if (found?.key !== key) return
    if (until) await storage.setItem(name, JSON.stringify({ until, ...found }))
    else await storage.removeItem(name)
  })
  sweep(storage).catch(() => {})
}

const swept = new WeakMap()
/** Removes what is over, at most once an hour. */
async function sweep(storage) {
  if (Date.now() - swept.get(storage) < 36e5) return
  swept.set(storage, Date.now())
  for (const name of (await storage.names?.()) ?? Object.keys(storage)) {
    if (storage.names || name.startsWith('ibid:')) {
      await alone(name, async () => over(await read(storage, name)) && storage.removeItem(name)).catch(() => {})
    }
  }
}

/** Frees the name: the next call with it is a new operation, with a new key. */
export async function forget(operation, options) {
  const [storage, name] = place(operation, options)
  await alone(name, () => storage.removeItem(name))
}

const entries = new Map()
const MOST = 1e4
/** A storage that lasts as long as the page or the process. */
export const memory = {
  getItem: name => entries.get(name) ?? null,
  addItem: (name, value) => entries.has(name) || entries.set(name, value),
  // Moved to the end: the first that has ended is the one that ended first.
  setItem(name, value) {
    entries.delete(name)
    entries.set(name, value)
    if (entries.size > MOST) for (const [name, value] of entries) if (/"until"/.test(value)) return entries.delete(name)
  },
  removeItem: name => entries.delete(name),
  names: () => [...entries.keys()],
}

/** Bare where that can be read in one way only. */
function quoted(key) {
  if (!/^[!-~]{1,255}$/.test(key)) throw TypeError('a key is 1 to 255 characters of visible ASCII')
  return /[,;"]/.test(key) ? `"${key.replace(/["\\]/g, '\\$&')}"` : key
}

const unquoted = key => (key[0] === '"' ? key.slice(1, -1).replace(/\\(.)/g, '$1') : key)

const sleep = (ms, signal) =>
  new Promise((done, fail) => {
    const abort = () => fail(signal.reason, clearTimeout(timer))
    const timer = setTimeout(() => done(signal?.removeEventListener('abort', abort)), ms)
    signal?.addEventListener('abort', abort)
  })

/** Bytes as a UUID of that version. */
export const uuidOf = (bytes, version) =>
  [...bytes.slice(0, 16)]
    .map((byte, at) => (at === 6 ? (byte & 15) | (version << 4) : at === 8 ? (byte & 63) | 128 : byte) + 256)
    .map((byte, at) => ([4, 6, 8, 10].includes(at) ? '-' : '') + byte.toString(16).slice(1))
    .join('')

/** A random UUID, also on plain http, where crypto.randomUUID is missing. */
export const uuid = () => uuidOf(crypto.getRandomValues(new Uint8Array(16)), 4)

/** Runs `fn` on each submit of a form, or click of a button, but not while it still runs. Returns how to end that. */
export function guard(target, fn) {
  const form = target.tagName === 'FORM'
  const kind = form ? 'submit' : 'click'
  let running
  const listener = async event => {
    event.preventDefault()
    if (running) return
    running = true
    let off = []
    try {
      // First, because a disabled button is no part of the form's data.
      const work = fn(event)
      off = (form ? [...target.elements].filter(it => it.type === 'submit') : [target]).filter(it => !it.disabled)
      off.map(it => (it.disabled = true))
      await work
    } finally {
      running = false
      off.map(it => (it.disabled = false))
    }
  }
  target.addEventListener(kind, listener)
  return () => target.removeEventListener(kind, listener)
}
