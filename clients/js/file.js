// A storage of files, for Node: it survives the end of the process, and processes that begin at once agree.

import { createHash, randomUUID } from 'node:crypto'
import { link, mkdir, open, readFile, readdir, rename, rm } from 'node:fs/promises'
import { dirname, join } from 'node:path'

/** One folder, one file per operation. */
export function fileStorage(folder) {
  const own = /^[0-9a-f]{64}\.key$/
  const path = name => join(folder, own.test(name) ? name : createHash('sha256').update(name).digest('hex') + '.key')
  // Written beside its place and synced, then put into it.
  const write = async (value, put) => {
    const made = await mkdir(folder, { recursive: true, mode: 0o700 })
    if (made) await synced(dirname(made), 'r')
    const next = join(folder, `${randomUUID()}.next`)
    try {
      await synced(next, 'wx', file => file.writeFile(value))
      await put(next)
    } catch (error) {
      if (error.code !== 'EEXIST') throw error
    } finally {
      await rm(next, { force: true })
    }
    await synced(folder, 'r')
  }
  return {
    async getItem(name) {
      try {
        return await readFile(path(name), 'utf8')
      } catch (error) {
        if (error.code === 'ENOENT') return null
        throw error
      }
    },

    // A link fails if there is one already.
    addItem: (name, value) => write(value, next => link(next, path(name))),

    setItem: (name, value) => write(value, next => rename(next, path(name))),

    async removeItem(name) {
      await rm(path(name), { force: true })
      await synced(folder, 'r')
    },

    // As their files are called, which is as good a name.
    names: async () => (await readdir(folder)).filter(name => own.test(name)),
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
