-- ARGV[1]: the value of the claim, without fence and attempt. ARGV[2]: whom to take over, as the eight bytes of its fence, or
-- nothing. ARGV[3]: '1' if replicas are waited for.
local ask, over = parse(ARGV[1]), ARGV[2]
local before = load()
if before and is_spent(before, ask.t) then return {'S'} end
local is_live = live(before)
if is_live then
  local same = before.t == ask.t
  if same and before.p == 'r' then
    touch(before, ARGV[3])
    return {'G', before.f, before.a}
  end
  if same and has_spent_its_token(before) then return {'S'} end
  local unknown = (before.p == 'r' and before.life <= before.lapse) or (before.p == 'u' and before.u <= now())
  if before.p ~= 'f' and not (unknown and over == string.sub(before.value, 9, 16)) then return view(before) end
end
ask.f = math.max(now(), before and before.f + 1 or 0)
ask.a = is_live and math.min(before.a + 1, 4294967295) or 1
ask.o = is_live and before.p ~= 'f'
ask.s = spent_after(before)
save(ask, ask.h + ask.k, true)
return {'G', ask.f, ask.a}
