"""Which of several servers a prompt goes to: where the longest part of it was last, unless that one is too busy.

The idea is that of the routers of SGLang (v0.4, "cache-aware load balancer", 2024) and Preble (Srivatsa et al., ICLR
2025): what a server has in its prefix cache is not asked but remembered from what it was sent. The bound on its load is
that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 16
"""Tokens that are remembered together: a block of vLLM's cache on a GPU."""
REMEMBERED = 1 << 16
"""Blocks remembered of a server, the least recently sent forgotten first: about a million tokens."""
EXCESS, SLACK = 1.25, 4
"""A server may have `EXCESS` times the mean of open requests and `SLACK` more: else a group of attempts that begins
while little else runs would be spread, and its prompt computed at each server."""


def block_hashes(ids: Sequence[int]) -> list[int]:
    """A number for each whole block of `ids`, of it and all before it.

    >>> one, two = block_hashes([1] * 40), block_hashes([1] * 16 + [2] * 16)
    >>> len(one), len(two), one[0] == two[0], one[1] == two[1]
    (2, 2, True, False)
    """
    blocks, last = [], 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        last = hash((last, *ids[end - BLOCK : end]))
        blocks.append(last)
    return blocks


class PrefixRouter:
    """What each server was sent since the weights changed, and the choice of the next one.

    >>> router = PrefixRouter()
    >>> group, other = [1] * 64, [2] * 64
    >>> router.choose(group, {0: 0, 1: 0}), router.choose(other, {0: 1, 1: 0})
    (0, 1)
    >>> router.choose(group, {0: 3, 1: 1})
    0
    >>> router.choose(group, {0: 40, 1: 1})
    1
    """

    def __init__(self, *, affinity: bool = True) -> None:
        """Without `affinity` the least busy server is chosen."""
        self._affinity = affinity
        self._sent: dict[int, OrderedDict[int, None]] = {}
        self._requests: dict[int, int] = {}

    def choose(self, ids: Sequence[int], busy: Mapping[int, int]) -> int:
        """The server for a prompt; `busy` has the open requests of each that serves, by its number. Remembers it."""
        blocks = block_hashes(ids) if self._affinity else []
        most = EXCESS * (sum(busy.values()) + 1) / len(busy) + SLACK if self._affinity else 0.0
        # one with no more than the mean is always among them
        able = [server for server in busy if busy[server] + 1 <= most] or list(busy)
        chosen = max(able, key=lambda at: (self._remembered_blocks(at, blocks), -busy[at], -self._requests.get(at, 0)))
        self._requests[chosen] = self._requests.get(chosen, 0) + 1
        sent = self._sent.setdefault(chosen, OrderedDict())
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > REMEMBERED:
            sent.popitem(last=False)
        return chosen

    def forget(self, server: int | None = None) -> None:
        """What `server` was sent, or all: its cache is empty, or of older weights."""
        for at in list(self._sent) if server is None else [server]:
            self._sent.pop(at, None)

    def failed(self, server: int, ids: Sequence[int]) -> None:
        """`server` failed at this prompt, which is no reason to send it there again."""
        sent = self._sent.get(server, OrderedDict[int, None]())
        for block in block_hashes(ids):
            sent.pop(block, None)

    def _remembered_blocks(self, server: int, blocks: Sequence[int]) -> int:
        """How many of the first `blocks` the server was sent."""
        sent = self._sent.get(server, OrderedDict[int, None]())
        return next((number for number, block in enumerate(blocks) if block not in sent), len(blocks))
