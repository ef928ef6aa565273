local hold = tonumber(ARGV[14])
local e = load()
if not live(e) or gives_way(e) then
  restore(e, 'r', now + hold, now + hold + lease.k, false)
  return {'R'}
end
if not held(e) or e.p ~= 'r' then return {'L', view(e)} end
e.u = now + hold
e.e = math.max(e.e, now + hold + e.k)
redis.call('HSET', K, 'v', times_of(e))
expire(e)
index(e)
return {'H'}
