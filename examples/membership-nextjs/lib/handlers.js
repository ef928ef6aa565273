// What the four route handlers share: who calls, what is stored, and how a response looks.
import { Ibid, withIdempotency } from 'ibid-client/server'
import { addEntry, countEntries } from './database.js'

// A real app verifies a session here.
const userOf = request => /^Bearer (\w+)$/.exec(request.headers.get('authorization') ?? '')?.[1]

// A key is valid for one user: the app says who it is, whatever X-User-Id the client sends.
const identify = request => ({ 'X-User-Id': userOf(request) ?? 'nobody' })

const failure = (status, code, message) => Response.json({ success: false, error: { code, message } }, { status })

/** The POST and GET of a kind of entry. `fields` must be there. */
export function entryRoute(kind, idName, fields) {
  const ibid = new Ibid({ address: 'unix:ibid.sock', identify })
  const post = async request => {
    const user = userOf(request)
    if (!user) return failure(401, 'UNAUTHENTICATED', 'send Authorization: Bearer USER')
    const content = await request.json().catch(() => null)
    const missing = fields.find(name => !content?.[name])
    if (missing) return failure(400, 'VALIDATION_ERROR', `${missing}: missing`)
    return Response.json({ success: true, data: { [idName]: await addEntry(kind, user, content) } }, { status: 201 })
  }
  const get = async request => Response.json({ success: true, data: { count: await countEntries(kind, userOf(request)) } })
  return { POST: withIdempotency(post, ibid), GET: get }
}
