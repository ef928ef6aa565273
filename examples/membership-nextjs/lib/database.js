import pg from 'pg'

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL })

const SCHEMA = `
  CREATE TABLE IF NOT EXISTS entries (
    id serial PRIMARY KEY,
    kind text NOT NULL,
    user_id text NOT NULL,
    content jsonb NOT NULL
  )`

let prepared

async function query(text, values) {
  await (prepared ??= pool.query(SCHEMA))
  return (await pool.query(text, values)).rows
}

export async function addEntry(kind, user, content) {
  const insert = 'INSERT INTO entries (kind, user_id, content) VALUES ($1, $2, $3) RETURNING id'
  const [row] = await query(insert, [kind, user, JSON.stringify(content)])
  return row.id
}

export async function countEntries(kind, user) {
  const [row] = await query('SELECT count(*)::int AS count FROM entries WHERE kind = $1 AND user_id = $2', [kind, user])
  return row.count
}
