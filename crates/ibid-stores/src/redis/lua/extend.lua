-- ARGV[2]: how long the lease is to be valid.
local hold = tonumber(ARGV[2])
local e = load()
if not live(e) or gives_way(e) then
  restore(e, 'r', hold + lease.k)
  return {'R'}
end
if not held(e) or e.p ~= 'r' then return {'L', view(e)} end
local life = hold + e.k
if life >= e.life and e.lapse == e.k then
  -- The value stays as it is.
  redis.call('PEXPIRE', K, int(life + e.linger))
else
  life = math.max(life, e.life)
  e.lapse = life - hold
  save(e, life)
end
return {'H'}
