-- One entry, of which KEYS[1] is the key. A script uses no other key: while its slot moves to another node, a script with
-- several keys is refused.
local K = KEYS[1]
-- How long spent tokens and fences are remembered at least, and how many spent tokens at most.
local REMEMBERED, MAX_SPENT = 60000, 32

local function parse(value)
  if #value < HEADER_LENGTH then error('CORRUPT value of ' .. K) end
  local e, version = {}, string.byte(value)
  if version ~= 1 then
    error('CORRUPT entry of format version ' .. version .. ', and this ibid reads version 1; use the ibid that wrote it')
  end
  local flags, spent, tags, label, at
  version, e.p, flags, spent, e.a, e.f, e.t, e.fp, e.h, e.k, e.lapse, e.linger, e.u, tags, label, at =
    struct.unpack(HEADER, value)
  if at + spent * 24 + tags + label > #value + 1 then error('CORRUPT lengths in ' .. K) end
  e.o, e.x, e.failed = flags % 2 == 1, flags % 4 >= 2, flags >= 4
  local function take(length)
    at = at + length
    return string.sub(value, at - length, at - 1)
  end
  e.s, e.g, e.l = take(spent * 24), take(tags), take(label)
  e.r = string.sub(value, at)
  return e
end

-- The entry with its value, its key's expiry, and how long it lives itself: not at all if it has expired.
local function load()
  local value = redis.call('GET', K)
  if not value then return nil end
  local e = parse(value)
  e.value, e.pttl = value, redis.call('PTTL', K)
  if e.pttl < 0 then error('CORRUPT no expiry of ' .. K) end
  e.life = e.pttl - e.linger
  return e
end

local function live(e)
  return e and e.life > 0
end

local function view(e)
  return {'V', e.value, e.pttl, now()}
end

-- Spent tokens: 16 bytes of token, 8 bytes of the time until which it is remembered.
local function until_of(s, at)
  return (struct.unpack('>I8', s, at + 16))
end

local function is_spent(e, token)
  for at = 1, #e.s, 24 do
    if string.sub(e.s, at, at + 15) == token and now() < until_of(e.s, at) then return true end
  end
  return false
end

local function with_spent(s, token, till)
  return s .. token .. struct.pack('>I8', till)
end

-- The latest of those that must still be remembered.
local function trimmed(s)
  local kept = {}
  for at = 1, #s, 24 do
    if now() < until_of(s, at) then kept[#kept + 1] = string.sub(s, at, at + 23) end
  end
  return table.concat(kept, '', math.max(1, #kept - MAX_SPENT + 1))
end

-- Whether the holder's own token can never be granted again.
local function has_spent_its_token(e)
  return e.p == 'f' or (e.p == 'u' and e.x)
end

-- What is remembered as spent here once somebody else is the holder.
local function spent_after(e)
  if not e then return '' end
  if has_spent_its_token(e) then return trimmed(with_spent(e.s, e.t, now() + e.life * 1000)) end
  return trimmed(e.s)
end

-- A full server refuses a script's first write if it needs memory, and lets all others pass. Claims are refused;
-- whoever runs is extended and settled.
local function set(value, stays, refusable)
  if not refusable then
    local done = redis.pcall('SET', K, value, 'PX', int(stays))
    if not done.err then return end
    redis.call('PEXPIRE', K, int(stays))
  end
  redis.call('SET', K, value, 'PX', int(stays))
end

-- Writes an entry that lives for `life`. Its key stays until nothing about it has to be remembered.
local function save(e, life, refusable)
  life = math.max(1, math.ceil(life))
  local stays = math.max(life, REMEMBERED)
  for at = 1, #e.s, 24 do stays = math.max(stays, math.ceil((until_of(e.s, at) - now()) / 1000)) end
  e.linger = stays - life
  if e.p == 'd' then e.u = now() + life * 1000 end
  local flags = (e.o and 1 or 0) + (e.x and 2 or 0) + (e.failed and 4 or 0)
  local header = struct.pack(HEADER, 1, e.p, flags, #e.s / 24, e.a, e.f, e.t, e.fp, e.h, e.k, e.lapse, e.linger, e.u,
    #e.g, #e.l)
  set(header .. e.s .. e.g .. e.l .. e.r, stays, refusable)
end

-- How a live entry ends. `x`: released, or resolved. `record`: summary and record.
local function apply(e, kind, life, retry_in, failed, record, x)
  if e.p == 'u' and e.x and not is_spent(e, e.t) then e.s = with_spent(e.s, e.t, now() + e.life * 1000) end
  if kind == 'c' then
    e.p, e.x, e.failed, e.r = 'd', x, failed, record
  elseif kind == 'p' then
    e.p, e.x, e.u = 'u', x, now() + retry_in * 1000
  else
    e.p, e.x, e.g, e.l, e.r = 'f', false, '', '', ''
    life = math.max(REMEMBERED, e.h)
  end
  save(e, life)
end

-- WAIT counts from the caller's own last write only. So a repeated call writes too, without changing anything.
local function touch(e, replicated)
  if replicated == '1' then redis.call('PEXPIRE', K, int(e.pttl)) end
end
