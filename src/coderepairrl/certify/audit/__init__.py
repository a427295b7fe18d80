"""``crrl audit``: whether the tasks of a set are what they are taken for (docs/guides/audit.md)."""

from coderepairrl.certify.audit.rates import Rate, as_json, dumps, rates, table
from coderepairrl.certify.audit.trials import Audited, Settings, apart, audit, chosen

__all__ = [
    "Audited",
    "Rate",
    "Settings",
    "apart",
    "as_json",
    "audit",
    "chosen",
    "dumps",
    "rates",
    "table",
]
