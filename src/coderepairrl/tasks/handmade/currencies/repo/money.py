"""Amounts in the smallest unit of a currency, written for people."""

import json
from pathlib import Path

TABLE = json.loads(Path(__file__).with_name("currencies.json").read_text(encoding="utf-8"))


def show(amount, currency):
    """show(1999, "USD") is "$19.99"."""
    row = TABLE[currency]
    sign, digits = ("-" if amount < 0 else ""), str(abs(amount)).rjust(row["decimals"] + 1, "0")
    cut = len(digits) - row["decimals"]
    number = f"{digits[:cut]}.{digits[cut:]}" if row["decimals"] else digits
    return f"{sign}{row['symbol']}{number}" if row["before"] else f"{sign}{number} {row['symbol']}"
