-- A lease, as the scripts that get one are told of it: ARGV[5] to ARGV[13].
local lease = {
  t = ARGV[5], f = ARGV[6], a = tonumber(ARGV[7]), o = ARGV[8] == '1', h = tonumber(ARGV[9]), k = tonumber(ARGV[10]),
  fp = ARGV[11], g = ARGV[12], l = ARGV[13],
}

local function held(e)
  return e.t == lease.t and (lease.f == '0' or e.f == lease.f)
end

-- Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
local function gives_way(e)
  return e.p == 'f' and lease.f ~= '0' and e.t ~= lease.t and not is_spent(e, lease.t)
end

-- Puts an entry back that is absent or has expired. `before` is what is left of it.
local function restore(before, p, u, till, x, failed)
  local e = {
    p = p, t = lease.t, f = lease.f, a = lease.a, o = lease.o, c = now, e = till, h = lease.h, k = lease.k, u = u, x = x,
    failed = failed or false, s = into_spent(before),
  }
  redis.call('HDEL', K, 'r', 'ol', 'w', 's', 'fp', 'g', 'l')
  if p == 'f' then save(e) else save(e, {'fp', lease.fp, 'g', lease.g, 'l', lease.l}) end
  if tonumber(redis.call('GET', FENCES) or 0) < tonumber(lease.f) then redis.call('SET', FENCES, lease.f) end
  expire(e)
  index(e)
  wake(before)
end
