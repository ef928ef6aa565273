-- The server's clock, and how an entry is read: `entry.rs` has the layout. Durations are milliseconds, times are
-- microseconds since the epoch: whole numbers far below 2^53, up to which Lua counts exactly.
local HEADER, HEADER_LENGTH = '>Bc1BBI4I8c16c33I8I8I8I8I8I4I4', 113
local clock

local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = time[1] * 1000000 + time[2]
  end
  return clock
end

local function int(number)
  return string.format('%d', number)
end

-- The phase of an entry, how long its lease is still valid, and how long it lives: 0 or less if it has expired and only its
-- key is left. Nothing if there is none.
local function state_of(key)
  local header = redis.pcall('GETRANGE', key, 0, HEADER_LENGTH - 1)
  if type(header) ~= 'string' or #header < HEADER_LENGTH then return nil end
  -- Of another version: what is indexed stays so until its key expires.
  if string.byte(header) ~= 1 then return 'u', 0, redis.call('PTTL', key) end
  local lapse, linger = struct.unpack('>I8I8', header, 82)
  local life = redis.call('PTTL', key) - linger
  return string.sub(header, 2, 2), life - lapse, life
end
