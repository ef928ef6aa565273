-- A fence above all that were ever given in this bucket.
local function next_fence(least)
  local highest = tonumber(redis.call('SET', KEYS[3], int(least), 'GET') or 0)
  if highest < least then return least end
  redis.call('SET', KEYS[3], int(highest + 1))
  return highest + 1
end

-- By far most claims find nothing here: written out, before anything else is set up.
found = redis.call('HMGET', KEYS[1], 'p', 't', 'n', 'v', 's', 'w')
if not (found[1] or found[2] or found[3] or found[4]) then
  local fence = next_fence(now)
  local u = now + ARGV[6]
  local e = u + ARGV[7]
  local fields = {
    'p', 'r', 't', ARGV[5], 'n', string.format('%d 1 0 0 0 %s %s', fence, ARGV[6], ARGV[7]),
    'v', string.format('%d %d %d', now, e, u), 'fp', ARGV[9],
  }
  if ARGV[10] ~= '' then fields[11], fields[12] = 'g', ARGV[10] end
  if ARGV[11] ~= '' then fields[#fields + 1], fields[#fields + 2] = 'l', ARGV[11] end
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('PEXPIREAT', KEYS[1], int(e / 1000 + 1))
  into_index(u, e)
  return {'G', int(fence), 1}
end
