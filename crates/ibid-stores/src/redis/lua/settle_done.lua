-- By far most ends are the first answer of one who runs, with nobody waiting: written out, before anything else is set up.
-- Of its numbers only the times change.
found = redis.call('HMGET', KEYS[1], 'p', 't', 'n', 'v', 's', 'w')
if ARGV[14] == 'c' and ARGV[17] ~= '1' and found[1] == 'r' and found[2] == ARGV[5] and not (found[5] or found[6])
  and ARGV[6] == string.match(found[3] or '', '^%d+') then
  local claimed, expires = string.match(found[4] or '', '^(%d+) (%d+) %d+$')
  if claimed and now < tonumber(expires) then
    local e = now + ARGV[15]
    redis.call('PEXPIREAT', KEYS[1], int(e / 1000 + 1))
    redis.call('HSET', KEYS[1], 'p', 'd', 'v', string.format('%s %d 0', claimed, e), 'r', ARGV[18], 'ol', ARGV[19])
    redis.call('ZREM', KEYS[2], ARGV[3])
    return {'H'}
  end
end
