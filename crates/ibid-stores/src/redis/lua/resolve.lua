-- ARGV[1] the fence that the operator saw, ARGV[2] how it ends, ARGV[3] summary and record, ARGV[4] '1' if it failed,
-- ARGV[5] how long it lives, ARGV[6] when it may be taken over.
local e = load()
if not live(e) then return {'L'} end
local unknown = e.p == 'u' or (e.p == 'r' and e.life <= e.lapse)
if string.sub(e.value, 9, 16) ~= ARGV[1] or not unknown then return {'L', view(e)} end
local kind = ARGV[2]
-- Of a completed entry x says that an operator resolved it; of an unknown one, that its takeover was released.
local x = kind == 'c' or (kind == 'p' and e.p == 'u' and e.x)
apply(e, kind, tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[4] == '1', ARGV[3], x)
return {'H'}
