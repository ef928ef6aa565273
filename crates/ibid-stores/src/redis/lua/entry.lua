-- What every script starts with: the store's clock, and an entry's numbers.
--
-- Times are microseconds since the epoch, by this server's clock: whole numbers far below 2^53. An entry's numbers stand
-- in two fields, because a field costs some eighty bytes of its own, unless all are of at most 64.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function int(n)
  return string.format('%d', n)
end

local function flag(yes)
  return yes and '1' or '0'
end

-- n: f fence (as text), a attempt, o took over, x released (of an unknown entry) or resolved (of a finished one), failed,
-- h hold, k keep. v: c claimed, e expires, u lease end or earliest takeover.
local function numbers_of(e)
  return string.format('%s %d %s %s %s %d %d', e.f, e.a, flag(e.o), flag(e.x), flag(e.failed), e.h, e.k)
end

local function times_of(e)
  return string.format('%d %d %d', e.c, e.e, e.u)
end

local function with_numbers(e, n, v)
  local f, a, o, x, failed, h, k = string.match(n or '', '^(%d+) (%d+) ([01]) ([01]) ([01]) (%d+) (%d+)$')
  local c, expires, u = string.match(v or '', '^(%d+) (%d+) (%d+)$')
  if not (f and c) then error('CORRUPT numbers of an entry') end
  e.f, e.a, e.o, e.x, e.failed, e.h, e.k = f, tonumber(a), o == '1', x == '1', failed == '1', tonumber(h), tonumber(k)
  e.c, e.e, e.u = tonumber(c), tonumber(expires), tonumber(u)
  return e
end
