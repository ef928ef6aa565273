-- ARGV[1] the fence that the operator saw.
local e = load()
if not live(e) then return {'L'} end
if string.sub(e.value, 9, 16) ~= ARGV[1] or e.p == 'f' then return {'L', view(e)} end
apply(e, 'r')
return {'H'}
