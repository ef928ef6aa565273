// Compiled, never run: the types say what the code does.

import { type IdempotentResponse, type KeyStorage, IdempotencyError, forget, guard, idempotentFetch, memory, uuid, uuidOf } from '../ibid.js'
import { fileStorage } from '../file.js'
import { derivedKey, operationKey, uuid7 } from '../keys.js'

export async function uses(form: HTMLFormElement): Promise<void> {
  const stores: KeyStorage[] = [localStorage, sessionStorage, memory, fileStorage('/tmp/keys')]
  const answer: IdempotentResponse = await idempotentFetch(
    new URL('http://127.0.0.1/pay'),
    { method: 'POST', body: new FormData(form), signal: AbortSignal.timeout(1000) },
    { operation: 'order-17', key: uuid7, storage: stores[0], schedule: [1, 2], retry5xx: true },
  )
  const { key, attempts, replayed, degraded }: { key: string; attempts: number; replayed: boolean; degraded: boolean } =
    answer.idempotency
  await answer.json()
  await forget('order-17', { storage: stores[0] })
  const off: () => void = guard(form, async event => event.preventDefault())
  off()
  const keys: string[] = [key, uuid(), uuidOf(new Uint8Array(16), 4), operationKey('u', 'o', 'r'), await derivedKey('a', 'b')]
  const error: unknown = new Error(`${attempts} ${replayed} ${degraded} ${keys}`)
  if (error instanceof IdempotencyError && error.reason === 'outcome-unknown') console.error(error.problem?.detail)
  // @ts-expect-error: no schedule has this name
  await idempotentFetch('/pay', {}, { schedule: 'sometimes' })
  // @ts-expect-error: a Request can be sent only once
  await idempotentFetch(new Request('/pay'))
}

import { type IbidOptions, Ibid, NotStarted, express, expressErrors, extractIdempotencyKey, fastify, generateIdempotencyKey, isValidIdempotencyKey, withIdempotency } from '../server.js'

const settings: IbidOptions = { address: 'unix:/run/ibid/api.sock', unreachable: 'open', identify: request => ({ 'X-User-Id': request.user }) }
const server = new Ibid(settings)
const post: (request: Request, context: { params: string }) => Promise<Response> = withIdempotency(async (request, context: { params: string }) => new Response(context.params), server)
const middleware: Function[] = [express(server), expressErrors(), fastify]
const found: string | null = extractIdempotencyKey(new Headers())
if (isValidIdempotencyKey(found) && found === generateIdempotencyKey()) throw new NotStarted()
// @ts-expect-error: there is no third way
new Ibid({ unreachable: 'maybe' })
void [post, middleware]
