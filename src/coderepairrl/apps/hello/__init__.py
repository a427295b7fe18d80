"""``crrl hello``: the main job on any machine, on a tiny policy that ships with the package."""

from coderepairrl.apps.hello.command import hello, resolved

__all__ = ["hello", "resolved"]
