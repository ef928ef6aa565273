import { entryRoute } from '../../../../lib/handlers.js'

export const { POST, GET } = entryRoute('check-in', 'checkInId', ['sessionId'])
