local e = load()
if not live(e) then return {'L', {'S'}} end
if e.f ~= ARGV[5] or e.p == 'f' then return {'L', view(e)} end
apply(e, 'r')
redis.call(PUBLISH, CHANNEL .. 'forget', ADDRESS)
return {'H'}
