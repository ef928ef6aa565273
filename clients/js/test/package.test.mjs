// What is shipped: its size, its types, its keys.

import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { existsSync } from 'node:fs'
import { cp, mkdir, mkdtemp, readFile, rm, symlink } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { gzipSync } from 'node:zlib'

import * as source from '../ibid.js'
import * as min from '../ibid.min.js'
import { fileStorage } from '../file.js'
import { derivedKey, operationKey, uuid7 } from '../keys.js'

const here = resolve(import.meta.dirname, '..')
const tools = process.env.IBID_JS_TOOLS ?? resolve(here, '../../target/js-client')
const tool = (name, args, cwd = here) => {
  const path = join(tools, 'node_modules/.bin', name)
  if (!existsSync(path)) throw Error(`${path} is missing: scripts/tools installs it`)
  return promisify(execFile)(path, args, { cwd })
}
const temporary = async t => {
  const folder = await mkdtemp(join(tmpdir(), 'ibid-js-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  return folder
}

test('the shipped file is under 3.4 kB compressed', async () => {
  const size = gzipSync(await readFile(join(here, 'ibid.min.js')), { level: 9 }).length
  assert.ok(size < 3400, `${size} bytes`)
})

test('the shipped file is made of the source', async () => {
  const { build } = JSON.parse(await readFile(join(here, 'package.json'))).scripts
  const [, ...args] = build.replace(/ --output .*/, '').split(' ')
  const { stdout } = await tool('terser', args)
  assert.equal(await readFile(join(here, 'ibid.min.js'), 'utf8'), stdout.trimEnd(), 'npm run build makes it anew')
  assert.deepEqual(Object.keys(min).sort(), Object.keys(source).sort())
})

test('the types say what the code does', async () => {
  const flags = ['--noEmit', '--strict', '--target', 'es2022', '--module', 'nodenext', '--lib', 'es2022,dom']
  await tool('tsc', [...flags, 'test/types.ts']).catch(error => assert.fail(error.stdout))
})

test('the source passes its linter', async t => {
  // The configuration imports its rules, which are installed elsewhere.
  const folder = join(await temporary(t), 'js')
  await cp(here, folder, { recursive: true })
  await symlink(join(tools, 'node_modules'), join(folder, 'node_modules'))
  await tool('eslint', ['--max-warnings', '0', '.'], folder).catch(error => assert.fail(error.stdout || error))
})

test('the packed package has its types, its licence and a working import of each entry', async t => {
  const folder = await temporary(t)
  const run = (command, args, cwd) => promisify(execFile)(command, args, { cwd })
  const { stdout } = await run('npm', ['pack', '--json', '--pack-destination', folder], here)
  const [{ filename, files, version }] = JSON.parse(stdout)
  const { exports, ...about } = JSON.parse(await readFile(join(here, 'package.json')))
  assert.deepEqual([about.license, about.version, about.type], ['MIT OR Apache-2.0', version, 'module'])
  const packed = new Set(files.map(file => file.path))
  for (const name of ['README.md', 'LICENSE-MIT', 'LICENSE-APACHE', 'package.json']) assert.ok(packed.has(name), name)
  assert.ok(![...packed].some(name => /test|eslint/.test(name)), [...packed].join(' '))
  await mkdir(join(folder, 'node_modules/ibid-client'), { recursive: true })
  await run('tar', ['-xzf', join(folder, filename), '--strip-components=1', '-C', join(folder, 'node_modules/ibid-client')])
  for (const [entry, { types, default: file }] of Object.entries(exports)) {
    assert.ok(packed.has(types.slice(2)) && packed.has(file.slice(2)), entry)
    const name = entry.replace('.', 'ibid-client')
    await run(process.execPath, ['--input-type=module', '-e', `await import('${name}')`], folder)
  }
})

test('keys have the forms that servers ask for', async () => {
  const shape = version => RegExp(`^[0-9a-f]{8}-[0-9a-f]{4}-${version}[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
  const some = make => Array.from({ length: 200 }, make)
  for (const key of some(source.uuid)) assert.match(key, shape(4))
  for (const key of some(uuid7)) assert.match(key, shape(7))
  assert.equal(new Set(some(source.uuid)).size, 200)
  assert.equal(parseInt(uuid7().replace('-', '').slice(0, 12), 16) - Date.now() < 10, true)
  assert.match(operationKey('u1', 'booking.create', 'r9'), /^u1:booking\.create:r9:\d{13}$/)
  assert.throws(() => operationKey('u:1', 'o', 'r'), TypeError)
  assert.throws(() => operationKey('', 'o', 'r'), TypeError)
  // The same as ibid::derive_key(&["invoice", "17", "ü"]).
  assert.equal(await derivedKey('invoice', '17', 'ü'), DERIVED)
  assert.notEqual(await derivedKey('ab', 'c'), await derivedKey('a', 'bc'))
})

const DERIVED = '0ee9896b-d819-4c46-9b73-128482f0ff3a'

test('files keep what was there first', async t => {
  const storage = fileStorage(join(await temporary(t), 'keys'))
  assert.equal(await storage.getItem('a'), null)
  await Promise.all(Array.from({ length: 20 }, (_, at) => storage.addItem('a', `${at}`)))
  const first = await storage.getItem('a')
  await storage.addItem('a', 'later')
  assert.equal(await storage.getItem('a'), first)
  await storage.setItem('a', 'changed')
  assert.equal(await storage.getItem('a'), 'changed')
  const [name, ...others] = await storage.names()
  assert.deepEqual([await storage.getItem(name), others], ['changed', []])
  await storage.removeItem(name)
  await storage.removeItem('a')
  assert.equal(await storage.getItem('a'), null)
})
