/** A UUID of version 7, which sorts by time. Not for routes that ask for `uuid4`. */
export function uuid7(): string

/** `user:operation:resource:timestamp`, the time in ms. */
export function operationKey(user: string, operation: string, resource: string): string

/** A UUID made of parts: the same parts are the same operation, so no two operations may have the same. */
export function derivedKey(...parts: string[]): Promise<string>
