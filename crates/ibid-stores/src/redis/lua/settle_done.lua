-- KEYS[1] the entry. ARGV[1] the value, ARGV[2] fence and token of the holder, ARGV[3] how it ends, ARGV[4] how long the key
-- stays, ARGV[5] '1' if the caller caches the answer. Most ends complete a plain first run: written out, before anything
-- else is set up. Flags, spent tokens and linger are 0.
local found, value, NONE = redis.call('GET', KEYS[1]), ARGV[1], '\0\0\0\0\0\0\0\0'
if found and ARGV[3] == 'c' and string.sub(found, 1, 4) == '\1r\0\0' and string.sub(found, 90, 97) == NONE then
  local holder = string.sub(found, 9, 32)
  -- A holder that does not know its fence is identified by its token. The entry keeps its attempt and fence.
  if string.sub(ARGV[2], 1, 8) == NONE and string.byte(value, 3) % 2 == 0 then
    holder = NONE .. string.sub(holder, 9)
    value = string.sub(value, 1, 4) .. string.sub(found, 5, 16) .. string.sub(value, 17)
  end
  if holder == ARGV[2] and not redis.pcall('SET', KEYS[1], value, 'PX', ARGV[4]).err then
    -- What is read after the write is tracked.
    if ARGV[5] == '1' then redis.call('EXISTS', KEYS[1]) end
    return {'H'}
  end
end
