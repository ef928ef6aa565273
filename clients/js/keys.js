// Keys that are more than a random UUID. Apart from the rest, because most do without.

import { uuidOf } from './ibid.js'

/** A UUID of version 7, which sorts by time. */
export function uuid7() {
  const bytes = crypto.getRandomValues(new Uint8Array(16))
  for (let at = 0, time = Date.now(); at < 6; at++) bytes[at] = Math.floor(time / 256 ** (5 - at))
  return uuidOf(bytes, 7)
}

/** user:operation:resource:timestamp */
export function operationKey(user, operation, resource) {
  const parts = [user, operation, resource].map(String)
  if (parts.some(part => !part || part.includes(':'))) throw TypeError('each part has at least one character, and no colon')
  return [...parts, Date.now()].join(':')
}

/** The same parts, the same key, here and in every other client of ibid. Needs https, or localhost. */
export async function derivedKey(...parts) {
  const framed = parts.flatMap(part => {
    const bytes = new TextEncoder().encode(part)
    const length = new DataView(new ArrayBuffer(8))
    length.setUint32(0, bytes.length, true)
    return [...new Uint8Array(length.buffer), ...bytes]
  })
  return uuidOf(new Uint8Array(await crypto.subtle.digest('SHA-256', new Uint8Array(framed))), 4)
}
