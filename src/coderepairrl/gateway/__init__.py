"""The gateway between agents and the policy.

`server` speaks HTTP, a dialect (`chat`, `responses`, `messages`) translates, and everything behind `Session.admit`
records: `tree` finds the recorded turn that a conversation continues, `generation` samples, and `call` runs
independently of the connections that wait for it.

What clients see when an episode reaches a limit: a request beyond ``calls + 2`` model calls
or after `Limits.seconds` is answered with status 400 and code ``episode_limit_reached``, a conversation longer than
`Limits.tokens` or the engine's context with 400 and ``context_length_exceeded``. A reply that a limit cuts short ends
as one that is too long does. No error is retried by the SDKs (``x-should-retry: false``). See
docs/reference/gateway.md.
"""

from __future__ import annotations

from coderepairrl.gateway.remote import Remote
from coderepairrl.gateway.server import Gateway
from coderepairrl.gateway.session import Session, request_seed
from coderepairrl.gateway.source import PolicySource, ReplySource

__all__ = ["Gateway", "PolicySource", "Remote", "ReplySource", "Session", "request_seed"]
