"""``crrl hello``: the whole loop on any machine, with a tiny shipped policy."""

from coderepairrl.apps.hello.command import hello, resolved

__all__ = ["hello", "resolved"]
