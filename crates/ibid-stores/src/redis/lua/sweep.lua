-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, how many to remove and to look at, at most.
-- Entries go by themselves, when their keys expire; what is left of them is here.
local INDEX, BASE, at_most, looks = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local due = redis.call('ZRANGEBYSCORE', INDEX, '-inf', int(now), 'LIMIT', 0, looks)
local removed, lapsed, more = 0, 0, #due == looks and 1 or 0
for _, address in ipairs(due) do
  local v = redis.call('HMGET', BASE .. address, 'p', 'n', 'v')
  local e = v[1] and with_numbers({ p = v[1] }, v[2], v[3])
  if not e or e.e <= now then
    if removed == at_most then
      more = 1
      break
    end
    redis.call('ZREM', INDEX, address)
    removed = removed + 1
  elseif e.p == 'r' and now < e.u then
    redis.call('ZADD', INDEX, int(e.u), address)
  elseif e.p == 'r' or e.p == 'u' then
    if e.p == 'r' then lapsed = lapsed + 1 end
    redis.call('ZADD', INDEX, int(e.e), address)
  else
    redis.call('ZREM', INDEX, address)
  end
end
return {removed, lapsed, more}
