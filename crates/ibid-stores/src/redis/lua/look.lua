-- KEYS: entries of one bucket. ARGV[1]: '1' to return records too. One row for each: value, expiry of the key, time; or
-- false where nothing is.
local rows = {}
for nth, key in ipairs(KEYS) do
  local value = redis.call('GET', key)
  rows[nth] = false
  if value then
    if ARGV[1] ~= '1' and #value >= HEADER_LENGTH then
      local tags, label = struct.unpack('>I4I4', value, 106)
      value = string.sub(value, 1, HEADER_LENGTH + string.byte(value, 4) * 24 + tags + label + 26)
    end
    rows[nth] = {value, redis.call('PTTL', key), now()}
  end
end
return rows
