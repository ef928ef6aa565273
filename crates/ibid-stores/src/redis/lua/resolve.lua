local e = load()
if not live(e) then return {'L', {'S'}} end
local unknown = e.p == 'u' or (e.p == 'r' and e.u <= now)
if e.f ~= ARGV[5] or not unknown then return {'L', view(e)} end
local kind = ARGV[6]
-- Of a done entry x says that an operator resolved it; of an unknown one, that its takeover was released.
local x = kind == 'c' or (kind == 'p' and e.p == 'u' and e.x)
apply(e, kind, tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9], ARGV[10], ARGV[11], x)
return {'H'}
