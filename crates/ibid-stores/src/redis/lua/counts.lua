-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, the first to count, how many.
local INDEX, BASE, from, n = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local processing, unknown = 0, 0
local some = redis.call('ZRANGE', INDEX, from, from + n - 1)
for _, address in ipairs(some) do
  local v = redis.call('HMGET', BASE .. address, 'p', 'n', 'v')
  local e = v[1] and with_numbers({ p = v[1] }, v[2], v[3])
  if e and now < e.e then
    if e.p == 'r' and now < e.u then
      processing = processing + 1
    elseif e.p == 'r' or e.p == 'u' then
      unknown = unknown + 1
    end
  end
end
return {processing, unknown, #some}
