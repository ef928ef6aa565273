local e = load()
if live(e) and e.p ~= 'f' then return view(e) end
return false
