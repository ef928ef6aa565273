local kind, keep, retry_in, failed, record, outline =
  ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[16]), ARGV[17], ARGV[18], ARGV[19]
local e = load()
local spent_until = now + math.max(FREE_FOR, lease.h)
if not live(e) or gives_way(e) then
  if lease.f == '0' then
    -- A lost claim never came: nothing to put back, but a late copy of it must find its token spent.
    restore(e, 'f', 0, spent_until, false)
    if kind == 'r' then return {'H'} end
    return {'L', {'S'}}
  end
  if kind == 'r' and lease.o then
    restore(e, 'u', now, math.max(spent_until, now + lease.k), true)
  elseif kind == 'r' then
    restore(e, 'f', 0, spent_until, false)
  elseif kind == 'p' then
    restore(e, 'u', now + retry_in, now + keep, false)
  else
    restore(e, 'd', 0, now + keep, false, failed == '1')
    redis.call('HSET', K, 'r', record, 'ol', outline)
  end
  return {'R'}
end
if not held(e) then
  local own = e.t == lease.t and (e.p == 'f' or (e.p == 'u' and e.x))
  local spent = own or is_spent(e, lease.t)
  if lease.f == '0' and not spent then
    -- A late copy of that claim must find its token spent, also when whoever is here has gone.
    e.s = trimmed(with_spent(e.s, lease.t, spent_until))
    expire(e)
    redis.call('HSET', K, 's', e.s)
  elseif spent and kind == 'r' and lease.f ~= '0' then
    return {'H'}
  end
  return {'L', view(e)}
end
local unknown, released = e.p == 'u' and not e.x, e.p == 'u' and e.x
if not (e.p == 'r' or (unknown and kind == 'c')) then
  local repeated = (e.p == 'd' and not e.x and kind == 'c') or (unknown and kind == 'p')
    or ((released or e.p == 'f') and kind == 'r')
  if not repeated then return {'L', view(e)} end
  touch(e)
  return {'H'}
end
if e.o and kind == 'r' then
  -- That a takeover did not happen says nothing about the first: unknown again.
  e.p, e.u, e.x, e.e = 'u', now, true, math.max(e.e, now + math.max(FREE_FOR, e.h))
  finish(e)
else
  apply(e, kind, keep, retry_in, failed, record, outline, false)
end
return {'H'}
