-- ARGV[1] the fence that the operator saw, ARGV[2] the new record. The summary stays.
local e = load()
if not live(e) then return {'L'} end
if string.sub(e.value, 9, 16) ~= ARGV[1] or e.p ~= 'd' then return {'L', view(e)} end
local kept = #e.value - #e.r + 26
redis.call('SET', K, string.sub(e.value, 1, kept) .. ARGV[2], 'KEEPTTL')
return {'H'}
