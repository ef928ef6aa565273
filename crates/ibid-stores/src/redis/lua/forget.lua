local e = load()
if not live(e) then return {'L', {'S'}} end
if e.f ~= ARGV[5] or e.p == 'f' then return {'L', view(e)} end
-- First, so that nothing is written if it is not allowed. It is heard after the script has ended all the same.
redis.call(PUBLISH, CHANNEL .. 'forget', ADDRESS)
apply(e, 'r')
return {'H'}
