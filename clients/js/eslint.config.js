import js from '@eslint/js'

const globals = names => Object.fromEntries(names.split(' ').map(name => [name, 'readonly']))
const everywhere = 'AbortController AbortSignal DOMException Headers Request Response TextDecoder TextEncoder URL console crypto fetch setTimeout clearTimeout'

export default [
  { ignores: ['ibid.min.js'] },
  js.configs.recommended,
  { languageOptions: { ecmaVersion: 2022, globals: globals(everywhere) }, rules: { 'no-empty': ['error', { allowEmptyCatch: true }] } },
  { files: ['ibid.js'], languageOptions: { globals: globals('BroadcastChannel FormData document localStorage navigator window') } },
  { files: ['server.js', 'file.js', 'test/*.mjs'], languageOptions: { globals: globals('Blob Buffer FormData ReadableStream URLSearchParams performance process setInterval clearInterval') } },
]
