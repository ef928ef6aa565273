-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, how many to remove and to look at, at most.
-- Entries go by themselves, when their keys expire; what is left of them is here.
local INDEX, BASE, at_most, looks = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local due = redis.call('ZRANGEBYSCORE', INDEX, '-inf', string.format('%.0f', now), 'LIMIT', 0, looks)
local removed, lapsed, more = 0, 0, #due == looks and 1 or 0
for _, address in ipairs(due) do
  local v = redis.call('HMGET', BASE .. address, 'p', 'u', 'e')
  local phase, till, expires = v[1], tonumber(v[2] or 0), tonumber(v[3] or 0)
  if not phase or expires <= now then
    if removed == at_most then
      more = 1
      break
    end
    redis.call('ZREM', INDEX, address)
    removed = removed + 1
  elseif phase == 'r' and now < till then
    redis.call('ZADD', INDEX, v[2], address)
  elseif phase == 'r' or phase == 'u' then
    if phase == 'r' then lapsed = lapsed + 1 end
    redis.call('ZADD', INDEX, v[3], address)
  else
    redis.call('ZREM', INDEX, address)
  end
end
return {removed, lapsed, more}
