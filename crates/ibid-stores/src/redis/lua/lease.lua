-- A lease, as the value that its holder wrote: ARGV[1]. A fence of 0: the claim's answer was lost.
local lease = parse(ARGV[1])
local unseen = lease.f == 0

local function held(e)
  return e.t == lease.t and (unseen or e.f == lease.f)
end

-- Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
local function gives_way(e)
  return e.p == 'f' and not unseen and e.t ~= lease.t and not is_spent(e, lease.t)
end

-- Puts an entry back that is absent or has expired. `before` is what is left of it.
local function restore(before, p, life, u, x)
  local record, failed = lease.r, lease.failed
  lease.p, lease.u, lease.x, lease.s, lease.lapse = p, u or 0, x or false, spent_after(before), lease.k
  if p ~= 'd' then lease.r, lease.failed = '', false end
  if p == 'f' then lease.g, lease.l = '', '' end
  save(lease, life)
  lease.r, lease.failed = record, failed
end
