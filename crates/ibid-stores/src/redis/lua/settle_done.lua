-- KEYS[1] the entry. ARGV[1] the value, ARGV[2] fence and token of the holder, ARGV[3] how it ends, ARGV[4] how long the key
-- stays, ARGV[5] '1' if the caller caches the answer. Most ends complete a plain first run: written out, before anything
-- else is set up. Flags, spent tokens and linger are 0.
local found = redis.call('GET', KEYS[1])
if found and ARGV[3] == 'c' and string.sub(found, 1, 4) == '\1r\0\0' and string.sub(found, 9, 32) == ARGV[2]
  and string.sub(found, 90, 97) == '\0\0\0\0\0\0\0\0' and not redis.pcall('SET', KEYS[1], ARGV[1], 'PX', ARGV[4]).err then
  -- What is read after the write is tracked.
  if ARGV[5] == '1' then redis.call('EXISTS', KEYS[1]) end
  return {'H'}
end
