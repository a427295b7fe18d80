"""Gateway between agents and the policy (docs/reference/gateway.md).

`server` speaks HTTP, a dialect (`chat`, `responses`, `messages`) translates, `tree` places conversations, `source`
samples, `call` outlives its connections.
"""

from __future__ import annotations

from coderepairrl.gateway.remote import Remote
from coderepairrl.gateway.server import Gateway
from coderepairrl.gateway.session import Session, request_seed
from coderepairrl.gateway.source import PolicySource, ReplySource

__all__ = ["Gateway", "PolicySource", "Remote", "ReplySource", "Session", "request_seed"]
