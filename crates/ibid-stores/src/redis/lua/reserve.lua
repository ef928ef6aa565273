-- Adds to what somebody has used. The window begins with the first use.
-- KEYS: the count. ARGV: how many, the window in milliseconds.
local total = redis.call('INCRBY', KEYS[1], ARGV[1])
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    left = tonumber(ARGV[2])
end
return { total, left }
