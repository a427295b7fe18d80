"""``crrl serve``: a model behind the gateway, for anybody's agents and anybody's trainer (docs/guides/serve.md)."""

from coderepairrl.apps.serve.command import Places, resolve, serve

__all__ = ["Places", "resolve", "serve"]
