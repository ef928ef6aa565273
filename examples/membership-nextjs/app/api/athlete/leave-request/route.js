import { entryRoute } from '../../../../lib/handlers.js'

export const { POST, GET } = entryRoute('leave-request', 'leaveRequestId', ['sessionId', 'reason'])
