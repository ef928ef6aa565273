-- What a script about one entry starts with: how the entry is kept, read and written.
--
-- KEYS[1] the entry, KEYS[2] the bucket's index, KEYS[3] the bucket's highest fence: all in one slot.
-- ARGV[1] PUBLISH or SPUBLISH, ARGV[2] what the bucket's channels start with, ARGV[3] the address in hex,
-- ARGV[4] '1' if the caller waits for replicas. What follows belongs to each script.
--
-- Fields: p phase (r running, u unknown, d done, f free), t token, n and v numbers, fp fingerprint, r record, ol outline; and if
-- there are any: g tags, l label, s spent tokens, w '1' if somebody waits.
--
-- A first write that needs memory is refused as a whole by a full server; one that does not lets all others pass.
-- So grants begin with SET; heartbeats, waits and ends begin with PEXPIREAT or HDEL: a full server refuses new claims, and
-- extends and settles those that run.
--
-- A command costs about as much as all else that a script does, so none is sent that changes nothing.
local K, INDEX, FENCES = KEYS[1], KEYS[2], KEYS[3]
local PUBLISH, CHANNEL, ADDRESS, REPLICATED = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local FREE_FOR = 60000000
local SPENT = 32

local function load()
  local v = found or redis.call('HMGET', K, 'p', 't', 'n', 'v', 's', 'w')
  if not v[1] then
    if v[2] or v[3] or v[4] then error('CORRUPT no phase in ' .. K) end
    return nil
  end
  local e = with_numbers({ p = v[1], t = v[2], s = v[5] or '', w = v[6] == '1' }, v[3], v[4])
  local known = e.p == 'r' or e.p == 'u' or e.p == 'd' or e.p == 'f'
  if not (known and e.t and #e.s % 32 == 0) then error('CORRUPT fields in ' .. K) end
  return e
end

-- Writes what every entry has, and `also` (name, value, …), but no empty tags or label. (A record may be empty.)
local function save(e, also)
  local fields = {'p', e.p, 't', e.t, 'n', numbers_of(e), 'v', times_of(e)}
  local n = 8
  for at = 1, also and #also or 0, 2 do
    if also[at + 1] ~= '' or (also[at] ~= 'g' and also[at] ~= 'l') then
      fields[n + 1], fields[n + 2] = also[at], also[at + 1]
      n = n + 2
    end
  end
  if e.s ~= '' then fields[n + 1], fields[n + 2] = 's', e.s end
  redis.call('HSET', K, unpack(fields))
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

-- The latest of those that must still be remembered.
local function trimmed(s)
  local kept = {}
  for at = 1, #s, 32 do
    if now < until_of(s, at) then kept[#kept + 1] = string.sub(s, at, at + 31) end
  end
  return table.concat(kept, '', math.max(1, #kept - SPENT + 1))
end

-- What is remembered as spent here once somebody else is the holder.
local function into_spent(e)
  if not e then return '' end
  if e.p == 'f' or (e.p == 'u' and e.x) then return trimmed(with_spent(e.s, e.t, e.e)) end
  return trimmed(e.s)
end

-- The key lives until nothing about it has to be remembered any more, rounded up: `e` alone decides expiry.
local function expire(e)
  local last = e.e
  for at = 1, #e.s, 32 do last = math.max(last, until_of(e.s, at)) end
  redis.call('PEXPIREAT', K, int(math.floor(last / 1000) + 1))
end

local function index(e)
  if e.p == 'r' or e.p == 'u' then
    into_index(e.p == 'r' and e.u or e.e, e.e)
  else
    redis.call('ZREM', INDEX, ADDRESS)
  end
end

-- A hint: whoever waits looks for itself too. Not being allowed to give it must not fail what is written by now.
local function wake(e)
  if e and e.w then redis.pcall(PUBLISH, CHANNEL .. 'wake', ADDRESS .. ':' .. e.f) end
end

-- WAIT promises to count from the caller's own last write only. So a repeated call writes too, without changing anything.
local function touch(e)
  if REPLICATED then expire(e) end
end

-- Writes an entry that is at its end, and wakes those who wait for it.
local function finish(e, also)
  local woken = { w = e.w, f = e.f }
  expire(e)
  if e.w then redis.call('HDEL', K, 'w') end
  save(e, also)
  index(e)
  wake(woken)
end

-- How a live entry ends. `x`: released, or resolved.
local function apply(e, kind, keep, retry_in, failed, record, outline, x)
  if e.p == 'u' and e.x and not is_spent(e, e.t) then e.s = with_spent(e.s, e.t, e.e) end
  if kind == 'c' then
    e.p, e.u, e.e, e.x = 'd', 0, now + keep, x
    e.failed = failed == '1'
    finish(e, {'r', record, 'ol', outline})
  elseif kind == 'p' then
    e.p, e.u, e.e, e.x = 'u', now + retry_in, now + keep, x
    finish(e)
  else
    redis.call('HDEL', K, 'r', 'ol', 'fp', 'g', 'l')
    e.p, e.u, e.e, e.x = 'f', 0, now + math.max(FREE_FOR, e.h), false
    finish(e)
  end
end
