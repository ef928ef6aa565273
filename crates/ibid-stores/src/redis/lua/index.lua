-- An entry's first fields, if they were read already.
local found

-- In flight and unknown entries are found by when to look at them again: lease end, or expiry. The index outlives the
-- last of them by a day at most, so that one that is never swept (of a former generation) goes as well.
local function into_index(look, expires)
  redis.call('ZADD', KEYS[2], int(look), ARGV[3])
  local last = math.floor(expires / 1000) + 1
  if redis.call('PTTL', KEYS[2]) < last - math.floor(now / 1000) then
    redis.call('PEXPIREAT', KEYS[2], int(last + 86400000))
  end
end
