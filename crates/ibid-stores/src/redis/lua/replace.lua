local e = load()
if not live(e) then return {'L', {'S'}} end
if e.f ~= ARGV[5] or e.p ~= 'd' then return {'L', view(e)} end
redis.call('HSET', K, 'r', ARGV[6])
return {'H'}
