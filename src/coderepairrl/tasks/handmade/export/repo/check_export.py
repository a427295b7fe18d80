from export import export, names

assert {"csv", "tsv"} <= set(names())
assert export([["a", 'b"c'], [1, 2]], "csv") == 'a,"b""c"\n1,2\n'
assert export([["a b", "c\td"]], "tsv") == "a b\tc d\n"
