-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, how many to remove and to look at, at most.
-- Entries go by themselves, when their keys expire; what is left of them is here.
local INDEX, BASE, at_most, looks = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local due = redis.call('ZRANGEBYSCORE', INDEX, '-inf', int(now()), 'LIMIT', 0, looks)
local removed, lapsed, more = 0, 0, #due == looks and 1 or 0
for _, address in ipairs(due) do
  local p, left, life = state_of(BASE .. address)
  if not p or life <= 0 then
    if removed == at_most then
      more = 1
      break
    end
    redis.call('ZREM', INDEX, address)
    removed = removed + 1
  elseif p == 'r' and left > 0 then
    redis.call('ZADD', INDEX, int(now() + left * 1000), address)
  elseif p == 'r' or p == 'u' then
    if p == 'r' then lapsed = lapsed + 1 end
    redis.call('ZADD', INDEX, int(now() + life * 1000), address)
  else
    redis.call('ZREM', INDEX, address)
  end
end
return {removed, lapsed, more}
