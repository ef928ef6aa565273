local token, hold, keep, over = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local before = load()
if before and is_spent(before, token) then return {'S'} end
if live(before) then
  local same = before.t == token
  if same and before.p == 'r' then
    touch(before)
    return {'G', before.f, before.a}
  end
  if same and (before.p == 'f' or (before.p == 'u' and before.x)) then return {'S'} end
  local taken = over == before.f and (before.p == 'r' or before.p == 'u') and before.u <= now
  if before.p ~= 'f' and not taken then return view(before) end
end

local highest = tonumber(redis.call('GET', FENCES) or 0)
local fence = math.max(highest + 1, now, before and tonumber(before.f) + 1 or 0)
local e = {
  p = 'r', t = token, f = int(fence), c = now, u = now + hold, e = now + hold + keep, h = hold, k = keep,
  a = live(before) and math.min(before.a + 1, 4294967295) or 1,
  o = live(before) and before.p ~= 'f' or false,
  x = false, failed = false, s = into_spent(before),
}
save(e, ARGV[9], ARGV[10], ARGV[11])
if before then
  redis.call('HDEL', K, 'r', 'ol', 'w')
  if ARGV[10] == '' then redis.call('HDEL', K, 'g') end
  if ARGV[11] == '' then redis.call('HDEL', K, 'l') end
end
redis.call('SET', FENCES, e.f)
expire(e)
index(e)
return {'G', e.f, e.a}
