"""A further node of a learner, ``crrl learner``: it comes to the controller, starts the processes that it is told to,
and carries frames between the two until the run is over."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from coderepairrl.errors import CodeRepairError, LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Address, Link
from coderepairrl.printable import logged
from coderepairrl.processes.children import Child, ChildDied

MODULE = "coderepairrl.learn.learner"
_AGAIN = 1.0
"""Seconds between two attempts to reach the controller."""
_VANISHED = 60.0
"""Seconds within which the controller notices that an earlier process of this node's number vanished without a word
(half a minute, see `rendezvous.Link`)."""


class _Taken(UsageError):
    """The controller has a node of this number."""


async def work(address: Address, number: int, *, seconds: float, log_dir: Path) -> None:
    """Be node `number` of the learner whose controller listens at `address`, until the run is over.

    Raises `LearnerFault` when nobody listens there for `seconds`, or the controller goes away in the middle,
    `PrerequisiteError` when versions differ, and `UsageError` for a key that is not right, a number that is too large,
    or one that another node has and keeps.
    """
    link, here = await _come(address, number, rendezvous.key(), seconds)
    node = _Working(link, log_dir)
    try:
        print(logged(f"node {number}: with the run at {address} ({here})"), file=sys.stderr, flush=True)
        await node.serve()
    except (OSError, ValueError, LookupError) as error:
        raise LearnerFault(
            f"the controller at {address} went away: {error}",
            fix="its own messages say why; start this again before, or within train.node_seconds after, crrl train",
        ) from error
    finally:
        await node.end()
        await link.close()


async def _come(address: Address, number: int, key: bytes, seconds: float) -> tuple[Link, str]:
    """A connection on which both ends know each other; what the controller calls its machine."""
    reason, taken = "", 0.0
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    link = Link(*await asyncio.open_connection(address.host, address.port))
                    try:
                        return link, await _introduce(link, address, number, key)
                    except BaseException:
                        await link.close()
                        raise
                except _Taken as error:  # by one that is gone, it may be
                    taken = taken or time.monotonic()
                    if time.monotonic() - taken > _VANISHED:
                        raise
                    reason = str(error)
                    await asyncio.sleep(_AGAIN)
                except OSError as error:  # not there yet, or on its way out
                    reason = os.strerror(error.errno) if error.errno else str(error)
                    await asyncio.sleep(_AGAIN)
    except TimeoutError:
        raise LearnerFault(
            f"no controller at {address} within {seconds:g} s: {reason or 'it does not answer'}",
            fix="start crrl train with train.nodes and this train.rendezvous; does a firewall let this node through?",
        ) from None


async def _introduce(link: Link, address: Address, number: int, key: bytes) -> str:
    ours, stranger = rendezvous.nonce(), f"what listens at {address} is no crrl with this {rendezvous.KEY}"
    fix = "the same key on every node, and the rendezvous of the run"
    await link.send({"node": number, "nonce": ours})
    try:
        hello = await link.answer()
        theirs = str(hello["nonce"])
        known = rendezvous.same(hello["proof"], rendezvous.proof(key, "controller", number, ours, theirs))
    except (ValueError, LookupError, TimeoutError) as error:
        raise UsageError(stranger, fix=fix) from error
    if not known:
        raise UsageError(stranger, fix=fix)
    own = {"host": os.uname().nodename, "versions": rendezvous.versions()}
    await link.send({"proof": rendezvous.proof(key, "node", number, ours, theirs), **own})
    answer = await link.receive()
    if "error" in answer:
        kinds = {"prerequisite": PrerequisiteError, "taken": _Taken}
        raise kinds.get(answer["kind"], UsageError)(answer["error"], fix=answer["fix"])
    return str(answer["welcome"])


class _Working:
    """The processes here, one set after the other."""

    def __init__(self, link: Link, log_dir: Path) -> None:
        self._link = link
        self._log_dir = log_dir
        self._children: list[Child] = []
        self._carrying: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Until the controller says that the run is over."""
        while True:
            match await self._link.receive():
                case {"begin": terms}:
                    await self._begin(terms)
                case {"request": request}:
                    for child in self._children:
                        try:
                            await child.send(request)
                        except ChildDied:  # which `_carry` reports
                            continue
                case {"kill": _}:
                    for child in self._children:
                        child.kill()
                case {"end": _}:
                    await self.end()
                    await self._link.send({"ended": True})
                case {"over": _}:
                    return

    async def end(self) -> None:
        """End the processes."""
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))
        self._children, self._carrying = [], []

    async def _begin(self, terms: dict[str, Any]) -> None:
        """Start processes, with numbers and the address of their rendezvous: all that the controller decides."""
        await self.end()
        first, count, world = int(terms["first"]), int(terms["count"]), int(terms["world"])
        store = str(Address.parse(str(terms["store"])))
        try:
            for local in range(count):
                rank = first + local
                env = rendezvous.environment(rank, local, count, world, store, self._link.here)
                log = self._log_dir / f"learner-{rank}.log"
                self._children.append(await Child.spawn(MODULE, log=log, env=env))
        except (OSError, CodeRepairError) as error:
            await self.end()
            await self._link.send({"error": f"cannot start its processes: {error}"})
            return
        await self._link.send({"begun": [child.pid for child in self._children]})
        self._carrying = [
            asyncio.ensure_future(self._carry(first + local, child)) for local, child in enumerate(self._children)
        ]

    async def _carry(self, rank: int, child: Child) -> None:
        """What a process says, to the controller."""
        try:
            while True:
                await self._link.send({"rank": rank, "reply": await child.receive()})
        except ChildDied as death:
            await self._link.send({"rank": rank, "died": str(death)})
