"""``crrl serve``: a model behind the gateway, for external agents and trainers (docs/guides/serve.md)."""

from coderepairrl.apps.serve.command import Places, resolve, serve

__all__ = ["Places", "resolve", "serve"]
