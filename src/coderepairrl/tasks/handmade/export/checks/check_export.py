from export import export, names

assert {"csv", "tsv"} <= set(names())
assert export([["a", 'b"c'], [1, 2]], "csv") == 'a,"b""c"\n1,2\n'
assert export([["a b", "c\td"]], "tsv") == "a b\tc d\n"

assert "markdown" in names()
table = export([["name", "size"], ["a", 1], ["b|c", 2]], "markdown")
assert table == "| name | size |\n| --- | --- |\n| a | 1 |\n| b\\|c | 2 |\n", table
assert export([["x"]], "markdown") == "| x |\n| --- |\n"
assert export([], "markdown") == ""
