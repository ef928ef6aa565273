// A client to be killed: node pay.mjs URL FOLDER OPERATION. Prints what it was answered.

import { fileStorage } from '../file.js'
import { idempotentFetch } from '../ibid.js'

const [url, folder, operation] = process.argv.slice(2)
const options = { operation, storage: fileStorage(folder) }
const answer = await idempotentFetch(url, { method: 'POST', body: '{"amount":1}' }, options)
console.log(JSON.stringify({ status: answer.status, body: await answer.json(), ...answer.idempotency }))
