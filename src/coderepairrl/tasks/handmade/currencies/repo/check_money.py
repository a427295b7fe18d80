from money import show

assert show(1999, "USD") == "$19.99"
assert show(5, "EUR") == "0.05 \u20ac"
assert show(-250, "CHF") == "-Fr.2.50"
