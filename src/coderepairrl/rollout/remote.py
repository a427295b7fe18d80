"""Distributes attempts over workers (`coderepairrl.rollout.worker`), and replaces lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Protocol, Self

from coderepairrl.errors import CodeRepairError, EngineFault, RunError, WorkerFault
from coderepairrl.protocols import Engine
from coderepairrl.rollout.episodes import Executor, PlannedAttempt
from coderepairrl.rollout.local import mark_void, start_episode
from coderepairrl.rollout.worker import (
    AttemptFinished,
    CancelAttempt,
    CancelRequest,
    EngineOutput,
    EngineRequest,
    FromWorker,
    StartAttempt,
    ToWorker,
    TurnCommitted,
    TurnLogged,
    make_picklable,
    take_all,
)
from coderepairrl.types import Episode, Turn

MAX_BACKOFF = 60.0
"""Seconds. Lost workers are replaced at once, then after 1, 3, 7, ..."""
CANCEL_SECONDS = 10.0
"""Seconds for a worker to end a cancelled attempt."""

OnTurn = Callable[[str, Turn], None]


class Connection(Protocol):
    """Connection to a worker. Methods raise `WorkerFault` once it is lost."""

    name: str

    async def receive(self) -> Sequence[FromWorker]:
        """Receive the next messages, in order."""
        ...

    async def send(self, messages: Sequence[ToWorker]) -> None:
        """Send messages, in order."""
        ...

    async def close(self) -> None:
        """End the worker and its attempts. Raises no error."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...


class RemoteWorker:
    """A worker that takes `capacity` attempts, seen from the controller. Its loss makes open attempts VOID."""

    def __init__(self, connection: Connection, engine: Engine, on_turn: OnTurn, capacity: int) -> None:
        self.connection = connection
        self.capacity = capacity
        self.finished = 0
        self._engine = engine
        self._on_turn = on_turn
        self._outbox = asyncio.Queue[ToWorker]()
        self._results: dict[str, asyncio.Future[AttemptFinished]] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._lost: WorkerFault | None = None  # why the worker is lost

    @property
    def free(self) -> int:
        """Number of further attempts it takes."""
        return 0 if self._lost else self.capacity - len(self._results)

    @property
    def busy(self) -> int:
        """Number of attempts under way."""
        return len(self._results)

    async def run(self, planned: PlannedAttempt) -> Episode:
        """See `Executor.run`."""
        result: asyncio.Future[AttemptFinished] = asyncio.get_running_loop().create_future()
        turns = self._turns[planned.episode_id] = []
        self._results[planned.episode_id] = result
        began = time.monotonic()
        self._send(StartAttempt(planned))
        try:
            finished = await self._wait_for_result(planned, result)
        except WorkerFault as fault:
            lost = mark_void(replace(start_episode(planned), turns=tuple(turns)), fault)
            return replace(lost, timings={"total": round(time.monotonic() - began, 6)})
        finally:
            del self._results[planned.episode_id], self._turns[planned.episode_id]
        self.finished += 1
        if finished.error is not None:
            raise finished.error
        assert finished.result is not None, "an attempt was cancelled by something else"
        return replace(finished.result, turns=tuple(turns))

    async def _wait_for_result(
        self, planned: PlannedAttempt, result: asyncio.Future[AttemptFinished]
    ) -> AttemptFinished:
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            self._send(CancelAttempt(planned.episode_id))  # its last turns still arrive
            with contextlib.suppress(TimeoutError, WorkerFault):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await asyncio.shield(result)
            raise

    async def serve(self) -> WorkerFault:
        """Exchange messages until the worker is lost; return the reason."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_outbox())
                tasks.create_task(self._receive(tasks))
        except* WorkerFault as several:
            self.mark_lost(next(error for error in several.exceptions if isinstance(error, WorkerFault)))
        except* Exception as several:  # a bug, which ends the run; its attempts report it
            self.mark_lost(WorkerFault(f"{self.connection.name} is given up: {several.exceptions[0]!r}"))
            raise
        finally:
            self.mark_lost(WorkerFault(f"{self.connection.name} ended with the run"))
        assert self._lost is not None  # by `mark_lost` above
        return self._lost

    def mark_lost(self, fault: WorkerFault) -> None:
        """Fail current and future attempts, with the first fault."""
        self._lost = self._lost or fault
        for result in self._results.values():
            if not result.done():
                result.set_exception(self._lost)
                result.exception()  # marks it as retrieved: its attempt may be cancelled

    def _send(self, message: ToWorker) -> None:
        if self._lost is not None:
            self.mark_lost(self._lost)  # fails an attempt that began just now
            return
        self._outbox.put_nowait(message)

    async def _send_outbox(self) -> None:
        while True:
            await self.connection.send(await take_all(self._outbox))  # meanwhile, more may gather

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            for message in await self.connection.receive():
                match message:
                    case TurnCommitted(number, episode, turn):
                        self._send(TurnLogged(number, self._log_turn(episode, turn)))
                    case EngineRequest(number):
                        request = self._requests[number] = tasks.create_task(self._sample(message))
                        request.add_done_callback(partial(self._forget_request, number))
                    case CancelRequest(number):
                        if (cancelled := self._requests.get(number)) is not None:
                            cancelled.cancel()
                    case AttemptFinished(episode):
                        if (result := self._results.get(episode)) is not None and not result.done():
                            result.set_result(message)

    def _forget_request(self, number: int, _: asyncio.Task[None]) -> None:
        del self._requests[number]

    def _log_turn(self, episode: str, turn: Turn) -> Exception | None:
        try:
            self._on_turn(episode, turn)
        except CodeRepairError as error:  # a full disk, for example: writing the verdict fails too, and ends the run
            return make_picklable(error)
        if episode in self._turns:
            self._turns[episode].append(turn)
        return None

    async def _sample(self, request: EngineRequest) -> None:
        ids = array("I")
        ids.frombytes(request.ids)
        error: Exception | None = None
        try:
            sampled = self._engine.generate(ids.tolist(), request.sampling, request.seed)
            async with contextlib.aclosing(sampled) as chunks:
                async for chunk in chunks:
                    self._send(EngineOutput(request.number, (chunk,)))
        except TimeoutError as late:
            error = EngineFault(f"the engine timed out: {late}")
        except Exception as raised:
            error = make_picklable(raised)
        self._send(EngineOutput(request.number, (), ended=True, error=error))


@dataclass(eq=False)
class RemoteExecutor(Executor):
    """Distributes attempts over `wanted` workers, each with `capacity` at once; replaces lost ones.

    `connect` starts a numbered worker, again after a `WorkerFault`; other errors end the run. So do `patience` seconds
    without a worker; the error includes `describe`, the state of the cluster. `say` reports failed workers. `watch`
    raises once the cluster is gone, which voids all attempts and ends the run.
    """

    connect: Callable[[int], Awaitable[Connection]]
    engine: Engine
    on_turn: OnTurn
    _: KW_ONLY
    wanted: int
    capacity: int
    patience: float
    say: Callable[[str], None]
    describe: Callable[[], str]
    watch: Callable[[], Awaitable[object]]

    def __post_init__(self) -> None:
        self.workers: list[RemoteWorker] = []
        self._changed = asyncio.Event()
        self._last_fault = "none has started yet"
        self._not_started: dict[int, str] = {}  # reasons, by number of the worker
        self._failed: Exception | None = None
        self._supervisors: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._supervisors = [asyncio.create_task(self._supervise(number)) for number in range(self.wanted)]
        self._supervisors.append(asyncio.create_task(self._supervise_cluster()))
        try:
            await self._wait_for_worker()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    async def run(self, planned: PlannedAttempt) -> Episode:
        """See `Executor.run`. A lost worker's attempt is VOID."""
        worker = await self._wait_for_worker()
        try:
            return await worker.run(planned)
        finally:
            self._notify()

    async def _wait_for_worker(self) -> RemoteWorker:
        while True:
            if self._failed is not None:
                raise self._failed
            best = max(self.workers, key=lambda worker: worker.free, default=None)
            if best is not None and best.free:
                return best
            changed = self._changed
            try:
                async with asyncio.timeout(None if self.workers else self.patience):
                    await changed.wait()
            except TimeoutError:
                raise RunError(
                    f"no machine has made episodes for {self.patience:g} seconds: {self._last_fault};"
                    f" {self.describe()}",
                    fix="check what is free (ray status), and that machines have space in /tmp/ray, or lower"
                    " rollout.ray.episodes; then continue with --resume",
                ) from None

    def _notify(self) -> None:
        self._changed.set()  # wakes those who wait now; later ones wait for the next change
        self._changed = asyncio.Event()

    async def _supervise(self, number: int) -> None:
        losses = 0
        try:
            while True:
                try:
                    connection = await self.connect(number)
                except WorkerFault as fault:
                    self._report_not_started(number, fault)
                else:
                    self._not_started.pop(number, None)
                    if await self._serve(connection):
                        losses = 0
                await asyncio.sleep(min(2.0 ** min(losses, 16) - 1.0, MAX_BACKOFF))
                losses += 1
        except Exception as error:  # a problem of that machine, or a bug
            self._failed = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._notify()

    async def _supervise_cluster(self) -> None:
        try:
            await self.watch()
        except Exception as error:
            self._failed = error
            self.say(str(error))  # now, since closing may take long
            for worker in self.workers:
                worker.mark_lost(WorkerFault(str(error)))
            self._notify()

    def _report_not_started(self, number: int, fault: WorkerFault) -> None:
        # once, not for every attempt and worker
        self._last_fault = str(fault)
        if self._last_fault not in self._not_started.values():
            self.say(f"{fault}; other workers continue, and this one is retried")
        self._not_started[number] = self._last_fault

    async def _serve(self, connection: Connection) -> bool:
        """Use a worker until it is lost; return whether it finished any attempt."""
        worker = RemoteWorker(connection, self.engine, self.on_turn, self.capacity)
        self.workers.append(worker)
        self._notify()
        try:
            fault = await worker.serve()
        except BaseException:  # the run ends
            await connection.close()
            raise
        finally:
            self.workers.remove(worker)
            self._notify()
        connection.kill()  # its messages would be ignored if it came back
        self._last_fault = str(fault)
        self.say(f"{fault}; its {worker.busy} open episodes are void")
        return worker.finished > 0
