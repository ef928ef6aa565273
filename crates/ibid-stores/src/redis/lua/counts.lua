-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, the first to count, how many.
local INDEX, BASE, from, n = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local processing, unknown = 0, 0
local some = redis.call('ZRANGE', INDEX, from, from + n - 1)
for _, address in ipairs(some) do
  local v = redis.call('HMGET', BASE .. address, 'p', 'u', 'e')
  if v[1] and now < tonumber(v[3]) then
    if v[1] == 'r' and now < tonumber(v[2]) then
      processing = processing + 1
    elseif v[1] == 'r' or v[1] == 'u' then
      unknown = unknown + 1
    end
  end
end
return {processing, unknown, #some}
