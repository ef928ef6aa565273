// A storage of files, for Node: it survives the end of the process, and processes that begin at once agree.

import { createHash, randomUUID } from 'node:crypto'
import { link, mkdir, open, readFile, rm } from 'node:fs/promises'
import { dirname, join } from 'node:path'

/** One folder, one file per operation. */
export function fileStorage(folder) {
  const path = name => join(folder, createHash('sha256').update(name).digest('hex') + '.key')
  return {
    async getItem(name) {
      try {
        return await readFile(path(name), 'utf8')
      } catch (error) {
        if (error.code === 'ENOENT') return null
        throw error
      }
    },

    // Written beside its place and synced, then linked into it, which fails if there is one already.
    async addItem(name, value) {
      const made = await mkdir(folder, { recursive: true, mode: 0o700 })
      if (made) await synced(dirname(made), 'r')
      const next = join(folder, `${randomUUID()}.next`)
      try {
        await synced(next, 'wx', file => file.writeFile(value))
        await link(next, path(name))
      } catch (error) {
        if (error.code !== 'EEXIST') throw error
      } finally {
        await rm(next, { force: true })
      }
      await synced(folder, 'r')
    },

    async removeItem(name) {
      await rm(path(name), { force: true })
      await synced(folder, 'r')
    },
  }
}

async function synced(path, flags, write = () => {}) {
  const file = await open(path, flags, 0o600)
  try {
    await write(file)
    await file.sync()
  } finally {
    await file.close()
  }
}
