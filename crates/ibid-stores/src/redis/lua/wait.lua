-- How long ARGV[5] still runs; -1 if it does not. Marked as waited for, so that its end is published.
local e = load()
if not (live(e) and e.p == 'r' and e.f == ARGV[5] and now < e.u) then return -1 end
if not e.w then
  -- The lifetime does not change; a full server then accepts the mark.
  expire(e)
  redis.call('HSET', K, 'w', '1')
end
return e.u - now
