-- What every script starts with: the store's clock, an entry as it is kept, and how it is read and written.
--
-- KEYS[1] the entry, KEYS[2] the bucket's index, KEYS[3] the bucket's highest fence: all in one slot.
-- ARGV[1] PUBLISH or SPUBLISH, ARGV[2] what the bucket's channels start with, ARGV[3] the address in hex,
-- ARGV[4] '1' if the caller waits for replicas. What follows belongs to each script.
--
-- Fields: p phase (r running, u unknown, d done, f free), t token, f fence, a attempt, o '1' if it took over,
-- c claimed, e expires, h hold, k keep, u lease end or earliest takeover, x '1' if released (u) or resolved (d),
-- F '1' if failed, s spent tokens, w '1' if somebody waits, fp fingerprint, g tags, l label, r record, ol outline.
-- Times are microseconds since the epoch, by this server's clock: whole numbers far below 2^53.
--
-- A first write that needs memory is refused as a whole by a full server; one that does not lets all others pass.
-- So grants begin with HSET, and ends with HDEL: a full server refuses new claims and settles those that run.
local K, INDEX, FENCES = KEYS[1], KEYS[2], KEYS[3]
local PUBLISH, CHANNEL, ADDRESS, REPLICATED = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local FREE_FOR = 60000000
local SPENT = 32

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function int(n)
  return string.format('%.0f', n)
end

local function flag(yes)
  return yes and '1' or '0'
end

local function load()
  local v = redis.call('HMGET', K, 'p', 't', 'f', 'a', 'o', 'c', 'e', 'h', 'k', 'u', 'x', 'F', 's', 'w')
  if not v[1] then
    if redis.call('EXISTS', K) == 1 then error('CORRUPT no phase in ' .. K) end
    return nil
  end
  local e = {
    p = v[1], t = v[2], f = v[3], a = tonumber(v[4]), o = v[5] == '1', c = tonumber(v[6]), e = tonumber(v[7]),
    h = tonumber(v[8]), k = tonumber(v[9]), u = tonumber(v[10]), x = v[11] == '1', failed = v[12] == '1',
    s = v[13] or '', w = v[14] == '1',
  }
  local known = e.p == 'r' or e.p == 'u' or e.p == 'd' or e.p == 'f'
  if not (known and e.t and tonumber(e.f) and e.a and e.c and e.e and e.h and e.k and e.u and #e.s % 32 == 0) then
    error('CORRUPT fields in ' .. K)
  end
  return e
end

local function live(e)
  return e and now < e.e
end

-- What somebody else's claim finds here, and what a holder that lost its claim is told.
local function view(e)
  if e.p == 'f' then return {'S'} end
  if e.p == 'd' then
    local d = redis.call('HMGET', K, 'fp', 'r')
    return {'D', e.f, e.a, d[1], e.failed and 1 or 0, e.e - now, d[2]}
  end
  local runs = e.p == 'r' and now < e.u
  local fp = redis.call('HGET', K, 'fp')
  return {runs and 'B' or 'U', e.f, e.a, fp, math.max(0, now - e.c), math.max(0, e.u - now)}
end

-- Spent tokens stand one behind the other: 16 bytes of token, 16 digits of the time until which it is remembered.
local function until_of(s, at)
  return tonumber(string.sub(s, at + 16, at + 31))
end

local function is_spent(e, token)
  for at = 1, #e.s, 32 do
    if string.sub(e.s, at, at + 15) == token and now < until_of(e.s, at) then return true end
  end
  return false
end

local function with_spent(s, token, till)
  return s .. token .. string.format('%016.0f', till)
end

-- What is remembered as spent here once somebody else is the holder.
local function into_spent(e)
  if not e then return '' end
  local s = e.s
  if e.p == 'f' or (e.p == 'u' and e.x) then s = with_spent(s, e.t, e.e) end
  local kept = {}
  for at = 1, #s, 32 do
    if now < until_of(s, at) then kept[#kept + 1] = string.sub(s, at, at + 31) end
  end
  return table.concat(kept, '', math.max(1, #kept - SPENT + 1))
end

-- The key lives until nothing about it has to be remembered any more, rounded up: `e` alone decides expiry.
local function expire(e)
  local last = e.e
  for at = 1, #e.s, 32 do last = math.max(last, until_of(e.s, at)) end
  redis.call('PEXPIREAT', K, int(math.floor(last / 1000) + 1))
end

-- In flight and unknown entries are found by when to look at them again: lease end, or expiry.
local function index(e)
  if e.p == 'r' then
    redis.call('ZADD', INDEX, int(e.u), ADDRESS)
  elseif e.p == 'u' then
    redis.call('ZADD', INDEX, int(e.e), ADDRESS)
  else
    redis.call('ZREM', INDEX, ADDRESS)
  end
end

local function wake(e)
  if e and e.w then redis.call(PUBLISH, CHANNEL .. 'wake', ADDRESS .. ':' .. e.f) end
end

-- WAIT counts from the caller's own last write: one that changes nothing, so that a repeated call waits as well.
local function touch(e)
  if REPLICATED then expire(e) end
end

-- Writes how a live entry ends. `x`: released, or resolved.
local function apply(e, kind, keep, retry_in, failed, record, outline, x)
  local woken = { w = e.w, f = e.f }
  if e.p == 'u' and e.x and not is_spent(e, e.t) then e.s = with_spent(e.s, e.t, e.e) end
  if kind == 'c' then
    redis.call('HDEL', K, 'w')
    e.p, e.u, e.e, e.x = 'd', 0, now + keep, x
    redis.call('HSET', K, 'F', failed, 'r', record, 'ol', outline)
  elseif kind == 'p' then
    redis.call('HDEL', K, 'w')
    e.p, e.u, e.e, e.x = 'u', now + retry_in, now + keep, x
  else
    redis.call('HDEL', K, 'w', 'r', 'ol', 'fp', 'g', 'l')
    e.p, e.u, e.e, e.x = 'f', 0, now + math.max(FREE_FOR, e.h), false
  end
  redis.call('HSET', K, 'p', e.p, 'u', int(e.u), 'e', int(e.e), 'x', flag(e.x), 's', e.s)
  expire(e)
  index(e)
  wake(woken)
end
