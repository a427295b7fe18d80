"""The gateway between agents and the policy.

`server` speaks HTTP, a dialect (`chat`, `responses`, `messages`) translates, and everything behind `Session.admit` is
the capture core: `tree` finds where a conversation goes on from, `generation` samples, `call` lets connections come
and go.

How an episode's limits end, as the clients of each dialect understand it: a request beyond ``calls + 2`` model calls
or after `Limits.seconds` is answered with status 400 and code ``episode_limit_reached``, a conversation longer than
`Limits.tokens` or the engine's context with 400 and ``context_length_exceeded``. A reply that a limit cuts short ends
as one that is too long does. No error is retried by the SDKs (``x-should-retry: false``). See
docs/reference/gateway.md.
"""

from __future__ import annotations

from coderepairrl.gateway.remote import Remote
from coderepairrl.gateway.server import Gateway, Server
from coderepairrl.gateway.session import OnTurn, Session, request_seed
from coderepairrl.gateway.source import Policy, Source

__all__ = ["Gateway", "OnTurn", "Policy", "Remote", "Server", "Session", "Source", "request_seed"]
