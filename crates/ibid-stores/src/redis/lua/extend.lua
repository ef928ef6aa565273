local hold = tonumber(ARGV[14])
local e = load()
if not live(e) or gives_way(e) then
  restore(e, 'r', now + hold, now + hold + lease.k, false)
  return {'R'}
end
if not held(e) or e.p ~= 'r' then return {'L', view(e)} end
e.u = now + hold
e.e = math.max(e.e, now + hold + e.k)
-- First, so that a full server lets the rest pass: see common.lua.
expire(e)
redis.call('HSET', K, 'v', times_of(e))
index(e)
return {'H'}
