/** Where the keys of named operations are kept. `localStorage` is one. */
export interface KeyStorage {
  getItem(name: string): string | null | Promise<string | null>
  setItem(name: string, value: string): unknown
  removeItem(name: string): unknown
  /** Stores the value unless there is one already, in one step. Two that begin at once then agree without waiting. */
  addItem?(name: string, value: string): unknown
  /** The names of all entries, so that old ones are removed. Without it the object's own properties are looked at, as `localStorage` has them. */
  names?(): string[] | Promise<string[]>
}

export interface Options {
  /**
   * The operation's name, such as `order-17`. Its key is kept in `storage`, after success for another `lifetime`: running it again gets the
   * same answer. A final 4xx, or `forget`, frees the name. Without a name the key lives as long as the call.
   */
  operation?: string | number
  /** A key from elsewhere, or how to make one. A random UUID by default. */
  key?: string | (() => string | Promise<string>)
  /** `localStorage` where there is one, else `memory`. */
  storage?: KeyStorage
  /** `Idempotency-Key` by default. */
  header?: string
  /** The waits between attempts in ms, or the name of a schedule: `exponential` is 100, 200, 400, 800; `linear` is 1000, 2000. */
  schedule?: 'exponential' | 'linear' | 'once' | number[]
  /** How much longer a wait may be, as a share of it. 0.25 by default. */
  jitter?: number
  /** Whether to retry 5xx that nothing else is known about. Off by default. */
  retry5xx?: boolean
  /** For one attempt, its whole answer included, in ms. 90,000 by default. */
  attemptTimeout?: number
  /** For everything together, in ms. None by default. */
  deadline?: number
  /** The longest Retry-After that is waited for, in ms. 60,000 by default. */
  maxRetryAfter?: number
  /** How long the server remembers a key (its `ttl`), in ms. 24 h by default. */
  lifetime?: number
}

/** What is known about an answer besides itself. */
export interface Idempotency {
  key: string
  attempts: number
  /** Whether the operation had been carried out before, and this is what was answered then. */
  replayed: boolean
  /** Whether the server said that it ran without protection. */
  degraded: boolean
}

export type IdempotentResponse = Response & { idempotency: Idempotency }

export type StopReason =
  | 'outcome-unknown'
  | 'key-reused'
  | 'refused'
  | 'in-progress'
  | 'unavailable'
  | 'server-error'
  | 'network'
  | 'retry-after'
  | 'deadline'
  | 'key-too-old'
  | 'storage'

/** A refusal in the form of RFC 9457. */
export interface Problem {
  type: string
  title: string
  status: number
  detail: string
  key?: string
}

/** Why there is no answer. The message is for people. */
export class IdempotencyError extends Error {
  readonly name: 'IdempotencyError'
  readonly reason: StopReason
  readonly attempts: number
  readonly key?: string
  /** What the last attempt brought: an answer, or what fetch threw. */
  readonly last?: Response | unknown
  readonly problem?: Problem
}

/**
 * `fetch`, with a key, again until there is an answer or a reason to stop.
 *
 * Resolves with the operation's own answer, whatever its status. Rejects with `IdempotencyError`, with the signal's reason if it is
 * aborted, or with a TypeError for what cannot be sent.
 */
export function idempotentFetch(url: string | URL, init?: RequestInit, options?: Options): Promise<IdempotentResponse>

/** Frees the name of an operation: the next call with it is a new operation, with a new key. Rejects if the storage fails. */
export function forget(operation: string | number, options?: { storage?: KeyStorage }): Promise<void>

/** Runs `fn` on each submit of a form, or click of a button, but not while it still runs. Returns how to end that. */
export function guard<T extends HTMLElement>(target: T, fn: (event: Event) => unknown): () => void

/** A storage that lasts as long as the page or the process. Of the operations that have ended it keeps the latest 10,000. */
export const memory: KeyStorage

/** A random UUID, also on plain http. */
export function uuid(): string

/** Bytes as a UUID of that version. */
export function uuidOf(bytes: Uint8Array, version: number): string
