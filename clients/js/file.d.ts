import type { KeyStorage } from './ibid.js'

/** A storage of files in this folder, for Node. It survives the end of the process; processes that share it agree on keys. */
export function fileStorage(folder: string): KeyStorage
