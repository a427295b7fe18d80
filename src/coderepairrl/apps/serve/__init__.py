"""``crrl serve``: a model behind the gateway, for anybody's agents and anybody's trainer (docs/guides/serve.md)."""

from coderepairrl.apps.serve.command import DEFAULTS, USED, Places, serve
from coderepairrl.assembly.policy import Choice, choose, relayed, replying

__all__ = ["DEFAULTS", "USED", "Choice", "Places", "choose", "relayed", "replying", "serve"]
