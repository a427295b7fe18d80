"""Attempts by nodes: which one gets an attempt, and what becomes of those of a node that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

from coderepairrl.errors import CodeRepairError, EngineFault, NodeFault, RunError
from coderepairrl.protocols import Engine
from coderepairrl.rollout.episodes import Executor, Ticket
from coderepairrl.rollout.exchange import (
    Asked,
    Committed,
    FromNode,
    Kept,
    Left,
    Made,
    Make,
    Sampled,
    Stop,
    ToNode,
    portable,
)
from coderepairrl.rollout.local import begun, void
from coderepairrl.types import Episode, Turn

LONGEST_WAIT = 60.0
"""Seconds. A node that was lost is replaced at once, then after one, three, and so on."""
STOPPING = 10.0
"""Seconds that a node has to end an attempt that is called off."""

OnTurn = Callable[[str, Turn], None]


class Line(Protocol):
    """The way to a node. All raise `NodeFault` once it is lost."""

    name: str

    async def receive(self) -> Sequence[FromNode]:
        """The next messages of the node, in the order in which it gave them."""
        ...

    async def send(self, messages: Sequence[ToNode]) -> None:
        """Hand them to the node, after all that were sent before."""
        ...

    async def close(self) -> None:
        """Let the node end what it makes, and end it. Raises nothing."""
        ...

    def drop(self) -> None:
        """End the node at once, if it is there."""
        ...


class Place:
    """The controller's end of a `line`. Attempts that are open when it breaks become VOID."""

    def __init__(self, line: Line, engine: Engine, on_turn: OnTurn, room: int) -> None:
        self.line = line
        self.room = room
        self.finished = 0
        """Episodes so far."""
        self._engine = engine
        self._on_turn = on_turn
        self._outbox: list[ToNode] = []
        self._news = asyncio.Event()
        self._open: dict[str, asyncio.Future[Made]] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._lost: NodeFault | None = None

    @property
    def free(self) -> int:
        """How many attempts more it takes."""
        return 0 if self._lost else self.room - len(self._open)

    @property
    def busy(self) -> int:
        """How many attempts it makes."""
        return len(self._open)

    async def run(self, ticket: Ticket) -> Episode:
        """See `Executor.run`."""
        made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        turns = self._turns[ticket.episode] = []
        self._open[ticket.episode] = made
        began = time.monotonic()
        self._post(Make(ticket))
        try:
            result = await self._finished(ticket, made)
        except NodeFault as fault:
            lost = void(replace(begun(ticket), turns=tuple(turns)), fault)
            return replace(lost, timings={"total": round(time.monotonic() - began, 6)})
        finally:
            del self._open[ticket.episode], self._turns[ticket.episode]
        self.finished += 1
        if result.error is not None:
            raise result.error
        if result.made is None:
            raise AssertionError("an attempt was called off, and not by us")
        return replace(result.made, turns=tuple(turns))

    async def _finished(self, ticket: Ticket, made: asyncio.Future[Made]) -> Made:
        """What `made` comes to. When this is cancelled, the attempt is too, and its last turns are waited for."""
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            self._post(Stop(ticket.episode))
            with contextlib.suppress(TimeoutError, NodeFault):
                async with asyncio.timeout(STOPPING):
                    await asyncio.shield(made)
            raise

    async def serve(self) -> NodeFault:
        """Do what the node asks for, until it is lost; returns why."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send())
                both.create_task(self._receive(both))
        except* NodeFault as several:
            self._lose(next(error for error in several.exceptions if isinstance(error, NodeFault)))
        except* Exception as several:  # a bug, which ends the run: its attempts say what it was
            self._lose(NodeFault(f"{self.line.name} is given up: {several.exceptions[0]!r}"))
            raise
        finally:
            self._lose(NodeFault(f"{self.line.name} is ended, with the run"))
        if self._lost is None:
            raise AssertionError("it was lost")
        return self._lost

    def _lose(self, fault: NodeFault) -> None:
        self._lost = self._lost or fault
        for made in self._open.values():
            if not made.done():
                made.set_exception(self._lost)
                made.exception()  # it may be that nobody asks any more

    def _post(self, message: ToNode) -> None:
        if self._lost is not None:
            self._lose(self._lost)
            return
        self._outbox.append(message)
        self._news.set()

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            sent, self._outbox = self._outbox, []
            await self.line.send(sent)  # meanwhile, more may gather

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            for message in await self.line.receive():
                match message:
                    case Committed(number, episode, turn):
                        self._post(Kept(number, self._keep(episode, turn)))
                    case Asked():
                        request = self._requests[message.number] = tasks.create_task(self._sample(message))
                        request.add_done_callback(partial(self._forget, message.number))
                    case Left(number):
                        if (left := self._requests.get(number)) is not None:
                            left.cancel()
                    case Made(episode):
                        if (made := self._open.get(episode)) is not None and not made.done():
                            made.set_result(message)

    def _forget(self, request: int, _: asyncio.Task[None]) -> None:
        del self._requests[request]

    def _keep(self, episode: str, turn: Turn) -> Exception | None:
        try:
            self._on_turn(episode, turn)
        except CodeRepairError as error:  # a full disk: the verdict is not to be written either, which ends the run
            return portable(error)
        if episode in self._turns:
            self._turns[episode].append(turn)
        return None

    async def _sample(self, asked: Asked) -> None:
        """Pass on what the engine samples."""
        ids = array("I")
        ids.frombytes(asked.ids)
        error: Exception | None = None
        try:
            async with contextlib.aclosing(self._engine.generate(ids.tolist(), asked.sampling, asked.seed)) as chunks:
                async for chunk in chunks:
                    self._post(Sampled(asked.number, (chunk,)))
        except TimeoutError as late:
            error = EngineFault(f"the engine timed out: {late}")
        except Exception as found:
            error = portable(found)
        self._post(Sampled(asked.number, (), ended=True, error=error))


class Across(Executor):
    """Spreads attempts over `seats` nodes, each of `room` attempts at once; a node that is lost is replaced.

    `open_line` starts the node of a seat: it raises `NodeFault` where another try may do, and anything else ends the
    run. Without any node for `patience` seconds the run ends, too, and `state` says what there is. `say` tells what was
    lost, and why one does not start.
    """

    def __init__(
        self,
        open_line: Callable[[int], Awaitable[Line]],
        engine: Engine,
        on_turn: OnTurn,
        *,
        seats: int,
        room: int,
        patience: float,
        say: Callable[[str], None],
        state: Callable[[], str],
    ) -> None:
        self._open_line = open_line
        self._engine = engine
        self._on_turn = on_turn
        self._seats = seats
        self._room = room
        self._patience = patience
        self._say = say
        self._state = state
        self._places: list[Place] = []
        self._changed = asyncio.Event()
        self._why = "none has started yet"
        self._not_opened: dict[int, str] = {}
        """Of each seat without a node, why the last one did not start."""
        self._failed: Exception | None = None
        self._keeping: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Waits for the first node. Raises what `open_line` raises, and `RunError`."""
        self._keeping = [asyncio.create_task(self._keep(seat)) for seat in range(self._seats)]
        try:
            await self._free()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeping in self._keeping:
            keeping.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def run(self, ticket: Ticket) -> Episode:
        """See `Executor.run`. An attempt whose node is lost is VOID."""
        place = await self._free()
        try:
            return await place.run(ticket)
        finally:
            self._change()

    async def _free(self) -> Place:
        """The place with the most room, as soon as there is one."""
        while True:
            if self._failed is not None:
                raise self._failed
            best = max(self._places, key=lambda place: place.free, default=None)
            if best is not None and best.free:
                return best
            changed = self._changed
            try:
                async with asyncio.timeout(None if self._places else self._patience):
                    await changed.wait()
            except TimeoutError:
                raise RunError(
                    f"no machine has made episodes for {self._patience:g} seconds: {self._why}; {self._state()}",
                    fix="see what the cluster has and who holds it (ray status), then continue with --resume; or raise"
                    " rollout.ray.patience",
                ) from None

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep(self, seat: int) -> None:
        """Have a node in `seat`, again and again."""
        in_a_row = 0
        try:
            while True:
                try:
                    line = await self._open_line(seat)
                except NodeFault as fault:
                    self._not_open(seat, fault)
                else:
                    self._not_opened.pop(seat, None)
                    if await self._serve(line):
                        in_a_row = 0
                await asyncio.sleep(min(2.0**in_a_row - 1.0, LONGEST_WAIT))
                in_a_row += 1
        except Exception as error:  # what is wrong with that machine, or a bug
            self._failed = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._change()

    def _not_open(self, seat: int, fault: NodeFault) -> None:
        """Say why, but not again for every try and every seat."""
        self._why = str(fault)
        if self._why not in self._not_opened.values():
            self._say(f"{fault}; the others go on, and this is tried again")
        self._not_opened[seat] = self._why

    async def _serve(self, line: Line) -> bool:
        """Use the node until it is lost; whether it made anything."""
        place = Place(line, self._engine, self._on_turn, self._room)
        self._places.append(place)
        self._change()
        try:
            fault = await place.serve()
        except BaseException:  # the run ends
            await line.close()
            raise
        finally:
            self._places.remove(place)
            self._change()
        line.drop()  # should it come back, nobody would listen
        self._why = str(fault)
        self._say(f"{fault}; {place.busy} episodes were made there, and are void")
        return place.finished > 0
