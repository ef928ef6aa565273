-- KEYS[1] a lock, ARGV[1] whose it must be to be given back.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
