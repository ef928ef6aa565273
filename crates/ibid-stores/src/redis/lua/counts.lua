-- KEYS[1] a bucket's index. ARGV: what its entries' keys start with, the first to count, how many.
local BASE, from, n = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local processing, unknown = 0, 0
local some = redis.call('ZRANGE', KEYS[1], from, from + n - 1)
for _, address in ipairs(some) do
  local p, left, life = state_of(BASE .. address)
  if not p or life <= 0 then
    -- It has expired.
  elseif p == 'r' and left > 0 then
    processing = processing + 1
  elseif p == 'r' or p == 'u' then
    unknown = unknown + 1
  end
end
return {processing, unknown, #some}
