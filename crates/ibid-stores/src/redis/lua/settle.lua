-- ARGV[6] how long the ended entry lives, ARGV[7] when it may be taken over, ARGV[8] '1' if replicas are waited for.
local kind, life, retry_in = ARGV[3], tonumber(ARGV[6]), tonumber(ARGV[7])
local e = load()
local spent_for = math.max(REMEMBERED, lease.h)
if not live(e) or gives_way(e) then
  if unseen then
    -- A lost claim never came: nothing to put back, but a late copy of it must find its token spent.
    restore(e, 'f', spent_for)
    return {kind == 'r' and 'H' or 'L'}
  end
  if kind == 'r' and lease.o then
    restore(e, 'u', math.max(spent_for, lease.k), now(), true)
  elseif kind == 'r' then
    restore(e, 'f', spent_for)
  elseif kind == 'p' then
    restore(e, 'u', life, now() + retry_in * 1000)
  else
    restore(e, 'd', life)
  end
  return {'R'}
end
if not held(e) then
  local spent = (e.t == lease.t and has_spent_its_token(e)) or is_spent(e, lease.t)
  if unseen and not spent then
    -- A late copy of that claim must find its token spent, also when whoever is here has gone.
    local seen = view(e)
    e.s = trimmed(with_spent(e.s, lease.t, now() + spent_for * 1000))
    save(e, e.life)
    return {'L', seen}
  elseif spent and kind == 'r' and not unseen then
    return {'H'}
  end
  return {'L', view(e)}
end
local unknown, released = e.p == 'u' and not e.x, e.p == 'u' and e.x
if not (e.p == 'r' or (unknown and kind == 'c')) then
  local repeated = (e.p == 'd' and not e.x and kind == 'c') or (unknown and kind == 'p')
    or ((released or e.p == 'f') and kind == 'r')
  if not repeated then return {'L', view(e)} end
  touch(e, ARGV[8])
  return {'H'}
end
if e.o and kind == 'r' then
  -- That a takeover did not happen says nothing about the first: unknown again.
  e.p, e.u, e.x = 'u', now(), true
  save(e, math.max(e.life, REMEMBERED, e.h))
else
  apply(e, kind, life, retry_in, lease.failed, lease.r, false)
end
return {'H'}
