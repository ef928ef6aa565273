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

local fence = next_fence(math.max(now, before and tonumber(before.f) + 1 or 0))
local e = {
  p = 'r', t = token, f = int(fence), c = now, u = now + hold, e = now + hold + keep, h = hold, k = keep,
  a = live(before) and math.min(before.a + 1, 4294967295) or 1,
  o = live(before) and before.p ~= 'f' or false,
  x = false, failed = false, s = into_spent(before),
}
if before then redis.call('HDEL', K, 'r', 'ol', 'w', 's', 'g', 'l') end
save(e, {'fp', ARGV[9], 'g', ARGV[10], 'l', ARGV[11]})
expire(e)
index(e)
return {'G', e.f, e.a}
