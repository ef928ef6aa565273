import { entryRoute } from '../../../../lib/handlers.js'

export const { POST, GET } = entryRoute('session', 'sessionId', ['title', 'session_date'])
