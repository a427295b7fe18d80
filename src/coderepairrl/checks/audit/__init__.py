"""``crrl audit``: whether tasks are sound (docs/guides/audit.md)."""

from coderepairrl.checks.audit.rates import Rate, as_json, dumps, rates, table
from coderepairrl.checks.audit.trials import Audited, Settings, apart, audit, chosen

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
