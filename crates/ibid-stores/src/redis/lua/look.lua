-- KEYS: entries of one bucket. One row for each, false where nothing is to be seen.
local rows = {}
for nth, key in ipairs(KEYS) do
  local v = redis.call('HMGET', key, 'p', 'n', 'v', 'fp', 'g', 'l', 'ol')
  local e = v[1] and with_numbers({ p = v[1] }, v[2], v[3])
  rows[nth] = false
  if e and e.p ~= 'f' and now < e.e then
    local state = 'U'
    if e.p == 'd' then state = e.failed and 'F' or 'D' end
    if e.p == 'r' and now < e.u then state = 'P' end
    local outline = e.p == 'd' and v[7] or ''
    rows[nth] = {state, e.f, e.a, v[4], v[5] or '', v[6] or '', math.max(0, now - e.c), e.e - now, outline}
  end
end
return rows
