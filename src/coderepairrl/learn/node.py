"""A further node of a learner, ``crrl learner``: it joins the controller, starts the processes that it is told to, and
forwards frames between the two until the run is over. The other end is `coderepairrl.learn.node_pool`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from coderepairrl.errors import CodeRepairError, LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import rendezvous
from coderepairrl.learn.rendezvous import Address, Channel
from coderepairrl.printable import logged
from coderepairrl.processes.children import Child, ChildDied

MODULE = "coderepairrl.learn.learner"
_RETRY = 1.0
"""Seconds between two attempts to reach the controller."""
_VANISHED = 60.0
"""Seconds within which the controller notices that an earlier process of this node's number vanished without a word
(half a minute, see `rendezvous.Channel`)."""


class _NumberTaken(UsageError):
    """The controller has a node of this number."""


async def run_node(address: Address, number: int, *, seconds: float, log_dir: Path) -> None:
    """Join as node `number` the learner whose controller listens at `address`, until the run is over.

    Raises `LearnerFault` when nobody listens there for `seconds`, or the controller goes away in the middle,
    `PrerequisiteError` when versions differ, and `UsageError` for a key that is not right, a number that is too large,
    or one that another node has and keeps.
    """
    channel, here = await _connect(address, number, rendezvous.key(), seconds)
    node = _NodeProcesses(channel, log_dir)
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
        await channel.close()


async def _connect(address: Address, number: int, key: bytes, seconds: float) -> tuple[Channel, str]:
    """A connection on which both ends know each other; what the controller calls its machine."""
    reason, taken = "", 0.0
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    channel = Channel(*await asyncio.open_connection(address.host, address.port))
                    try:
                        return channel, await _handshake(channel, address, number, key)
                    except BaseException:
                        await channel.close()
                        raise
                except _NumberTaken as error:  # by one that is gone, it may be
                    taken = taken or time.monotonic()
                    if time.monotonic() - taken > _VANISHED:
                        raise
                    reason = str(error)
                    await asyncio.sleep(_RETRY)
                except OSError as error:  # not there yet, or on its way out
                    reason = os.strerror(error.errno) if error.errno else str(error)
                    await asyncio.sleep(_RETRY)
    except TimeoutError:
        raise LearnerFault(
            f"no controller at {address} within {seconds:g} s: {reason or 'it does not answer'}",
            fix="start crrl train with train.nodes and this train.rendezvous; does a firewall let this node through?",
        ) from None


async def _handshake(channel: Channel, address: Address, number: int, key: bytes) -> str:
    ours, stranger = rendezvous.nonce(), f"what listens at {address} is no crrl with this {rendezvous.KEY}"
    fix = "the same key on every node, and the rendezvous of the run"
    await channel.send({"node": number, "nonce": ours})
    try:
        hello = await channel.receive_greeting()
        theirs = str(hello["nonce"])
        known = rendezvous.proof_matches(hello["proof"], rendezvous.prove(key, "controller", number, ours, theirs))
    except (ValueError, LookupError, TimeoutError) as error:
        raise UsageError(stranger, fix=fix) from error
    if not known:
        raise UsageError(stranger, fix=fix)
    own = {"host": os.uname().nodename, "versions": rendezvous.versions()}
    await channel.send({"proof": rendezvous.prove(key, "node", number, ours, theirs), **own})
    answer = await channel.receive()
    if "error" in answer:
        kinds = {"prerequisite": PrerequisiteError, "taken": _NumberTaken}
        raise kinds.get(answer["kind"], UsageError)(answer["error"], fix=answer["fix"])
    return str(answer["welcome"])


class _NodeProcesses:
    """The learner's processes on this node: one set after the other, when the controller starts a learner anew."""

    def __init__(self, channel: Channel, log_dir: Path) -> None:
        self._channel = channel
        self._log_dir = log_dir
        self._children: list[Child] = []
        self._forwarding: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Do what the controller says, until it says that the run is over."""
        while True:
            match await self._channel.receive():
                case {"spawn": terms}:
                    await self._spawn(terms)
                case {"request": request}:
                    for child in self._children:
                        try:
                            await child.send(request)
                        except ChildDied:  # which `_forward` reports
                            continue
                case {"kill": _}:
                    for child in self._children:
                        child.kill()
                case {"end": _}:
                    await self.end()
                    await self._channel.send({"ended": True})
                case {"over": _}:
                    return

    async def end(self) -> None:
        """End the processes."""
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))
        self._children, self._forwarding = [], []

    async def _spawn(self, terms: dict[str, Any]) -> None:
        """Start processes, with numbers and the address of their rendezvous: all that the controller decides."""
        await self.end()
        first, count, world = int(terms["first"]), int(terms["count"]), int(terms["world"])
        store = str(Address.parse(str(terms["store"])))
        try:
            for local in range(count):
                rank = first + local
                env = rendezvous.process_environment(rank, local, count, world, store, self._channel.address)
                log = self._log_dir / f"learner-{rank}.log"
                self._children.append(await Child.spawn(MODULE, log=log, env=env))
        except (OSError, CodeRepairError) as error:
            await self.end()
            await self._channel.send({"error": f"cannot start its processes: {error}"})
            return
        await self._channel.send({"spawned": [child.pid for child in self._children]})
        self._forwarding = [
            asyncio.ensure_future(self._forward(first + local, child)) for local, child in enumerate(self._children)
        ]

    async def _forward(self, rank: int, child: Child) -> None:
        """Send the controller what a process replies, and its death."""
        try:
            while True:
                await self._channel.send({"rank": rank, "reply": await child.receive()})
        except ChildDied as death:
            await self._channel.send({"rank": rank, "died": str(death)})
