// Stripe's own SDK, with the gateway as its API: node client.mjs http://HOST:PORT
//
// Each line of stdin is a call: {"do": "create" | "retrieve", "key", "amount", "retries"}. Each line of stdout is what came of it.

import { createRequire } from 'node:module'
import { join } from 'node:path'
import { createInterface } from 'node:readline'

const { default: Stripe } = await import(createRequire(join(process.env.NODE_MODULES, 'x.js')).resolve('stripe'))
const { hostname: host, port } = new URL(process.argv[2])
const stripe = new Stripe('sk_test_1', { host, port, protocol: 'http', telemetry: false })

const call = ({ do: what, key: idempotencyKey, amount, retries: maxNetworkRetries = 0 }) =>
  what === 'retrieve'
    ? stripe.paymentIntents.retrieve('pi_1', {}, { maxNetworkRetries })
    : stripe.paymentIntents.create({ amount, currency: 'usd' }, { idempotencyKey, maxNetworkRetries })

for await (const line of createInterface({ input: process.stdin })) {
  const told = await call(JSON.parse(line)).then(
    ({ id, lastResponse: { headers } }) => ({ id, replayed: headers['idempotent-replayed'], key: headers['idempotency-key'] }),
    ({ constructor, statusCode: status, rawType: type, code, message, headers }) => ({
      error: constructor.name,
      status,
      type,
      code,
      message,
      key: headers?.['idempotency-key'],
    }),
  )
  console.log(JSON.stringify(told))
}
