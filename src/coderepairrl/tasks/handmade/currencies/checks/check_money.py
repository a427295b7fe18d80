import json

from money import show

assert show(1999, "USD") == "$19.99"
assert show(5, "EUR") == "0.05 \u20ac"
assert show(-250, "CHF") == "-Fr.2.50"

assert show(1500, "JPY") == "\u00a51500", show(1500, "JPY")
assert show(1500, "KWD") == "KD1.500", show(1500, "KWD")
assert show(0, "JPY") == "\u00a50"
with open("currencies.json", encoding="utf-8") as file:
    decimals = {name: row["decimals"] for name, row in json.load(file).items()}
assert decimals == {"CHF": 2, "EUR": 2, "JPY": 0, "KWD": 3, "SEK": 2, "USD": 2}, decimals
