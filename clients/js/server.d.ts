type IncomingMessage = any
type ServerResponse = any

/** Where ibid is, and how an app uses it. */
export interface IbidOptions<R = any> {
  /** `"unix:/run/ibid/api.sock"`, or `"127.0.0.1:8082"` with a token. The variable IBID_API by default. */
  address?: string
  token?: string
  /** If no connection can be made: 503 (`"closed"`, the default), or run the handler unprotected (`"open"`). */
  unreachable?: 'closed' | 'open'
  /** Headers such as `{"X-User-Id": "u1"}` for a request that the app has authenticated itself. */
  identify?: (request: R) => Record<string, string> | Promise<Record<string, string>>
  /** The methods that ibid is asked about. */
  methods?: string[]
  /** Milliseconds to wait for ibid; longer than the longest `wait_timeout`. */
  timeout?: number
}

export class Ibid {
  constructor(options: IbidOptions)
}

/** The key of a call that a handler makes, from its header `Ibid-Operation`: equal in all attempts, another one for each name. */
export function outboundKey(operation: string, name: string): string

/** Thrown by a handler that provably did nothing: the key is free again. */
export class NotStarted extends Error {}

type Next = (error?: unknown) => void

/** Middleware for Express, and for everything that uses such middleware. Put it before body parsers. */
export function express(options: Ibid | IbidOptions): (request: IncomingMessage, response: ServerResponse, next: Next) => Promise<void>

/** Express's error handler, to be put last: an exception leaves the outcome unknown. */
export function expressErrors(): (error: unknown, request: IncomingMessage, response: ServerResponse, next: Next) => Promise<void>

/** A Fastify plugin: `app.register(fastify, options)`. */
export function fastify(app: any, options: IbidOptions | { ibid: Ibid }): Promise<void>

type FetchHandler<C extends unknown[]> = (request: Request, ...context: C) => Response | Promise<Response>

/** Wraps a fetch-style handler: Next.js route handlers, Hono, Bun, Deno. */
export function withIdempotency<C extends unknown[]>(handler: FetchHandler<C>, options?: Ibid | (IbidOptions<Request> & { peer?: (request: Request) => string })): (request: Request, ...context: C) => Promise<Response>

/** A NestJS interceptor on Express, for handlers that return JSON or text. */
export function nestInterceptor(options: Ibid | IbidOptions, tools: { HttpException: any; from: any; lastValueFrom: any }): { intercept(context: any, next: any): Promise<any> }

/** A new key: a UUID. */
export function generateIdempotencyKey(): string

/** Whether a key is a UUID or 16 to 255 letters, digits, `_` and `-` (`key.format = "token"`). */
export function isValidIdempotencyKey(key: unknown): key is string

/** The key in the headers of a request, or null. */
export function extractIdempotencyKey(headers: Headers | Record<string, string | string[] | undefined>, name?: string): string | null

/** Returns 0: ibid removes expired keys by itself. */
export function cleanupOldIdempotencyKeys(): Promise<number>
