-- Indexes unfinished entries that are not indexed yet, by when to look at them again: lease end, or expiry. KEYS[1] a
-- bucket's index. ARGV: what its entries' keys start with, then addresses.
--
-- The index outlives the last of them by a day at most, so that one that is never swept (of a former generation) goes as
-- well.
local INDEX, BASE, stays = KEYS[1], ARGV[1], 0
for nth = 2, #ARGV do
  local p, left, life = state_of(BASE .. ARGV[nth])
  if p == 'r' or p == 'u' then
    redis.call('ZADD', INDEX, 'NX', int(now() + (p == 'r' and left or life) * 1000), ARGV[nth])
    stays = math.max(stays, life)
  end
end
if stays > 0 and redis.call('PTTL', INDEX) < stays then redis.call('PEXPIRE', INDEX, int(stays + 86400000)) end
return 1
