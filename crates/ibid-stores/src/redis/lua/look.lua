-- KEYS: entries of one bucket. One row for each, false where nothing is to be seen.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local rows = {}
for nth, key in ipairs(KEYS) do
  local v = redis.call('HMGET', key, 'p', 'u', 'e', 'F', 'f', 'a', 'fp', 'g', 'l', 'c', 'ol')
  local phase, expires = v[1], tonumber(v[3] or 0)
  rows[nth] = false
  if phase and phase ~= 'f' and now < expires then
    local state = 'U'
    if phase == 'd' then state = v[4] == '1' and 'F' or 'D' end
    if phase == 'r' and now < tonumber(v[2]) then state = 'P' end
    local outline = phase == 'd' and v[11] or ''
    rows[nth] = {state, v[5], tonumber(v[6]), v[7], v[8], v[9], math.max(0, now - tonumber(v[10])), expires - now, outline}
  end
end
return rows
