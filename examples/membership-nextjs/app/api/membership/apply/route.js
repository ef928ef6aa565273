import { entryRoute } from '../../../../lib/handlers.js'

export const { POST, GET } = entryRoute('application', 'applicationId', ['club_id', 'personal_info'])
