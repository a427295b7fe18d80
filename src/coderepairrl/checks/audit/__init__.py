"""``crrl tasks verify --deep``: whether tasks are sound (docs/guides/audit.md)."""
