module ibid

go 1.19
