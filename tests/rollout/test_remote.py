"""Attempts by workers, without Ray: what is the same as on one machine, and what a lost worker costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import (
    AgentFault,
    ConfigError,
    PrerequisiteError,
    RunError,
    SandboxFault,
    Several,
    WorkerFault,
)
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.processes.meter import unix_time
from coderepairrl.protocols import Agent, Engine, Sandbox
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import LocalExecutor, Rollout, Terms, Ticket, collect, slots
from coderepairrl.rollout.remote import Connection, RemoteExecutor
from coderepairrl.rollout.worker import (
    FromWorker,
    ToWorker,
    Worker,
    WorkerSetup,
    make_picklable,
    pack_messages,
    unpack_messages,
)
from coderepairrl.runs import Log, logged_episodes
from coderepairrl.runs.log import read_records
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import AgentReport, Ending, Endpoint, Episode, Limits, Sampling, Task, Turn

TASKS = [Task(f"toy/{number}", "add() subtracts.", "python", "dir:unused", b"") for number in range(3)]
LIMITS = Limits(calls=4, tokens=2000, seconds=20.0, turn_tokens=16)


class Waits(Agent):
    """Says something and then waits for a file that never comes."""

    name, placement = "waits", "host"

    async def run(self, task: Task, box: Sandbox, endpoint: Endpoint) -> AgentReport:
        await ScriptedAgent([Say("hello")]).run(task, box, endpoint)
        await asyncio.sleep(3600)
        return AgentReport("done")


def terms(agent: Agent) -> Mapping[str, Terms]:
    backend = ScriptedBackend({"a.py": b"x = 0\n"})
    return {"": Terms(agent, backend, LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})}


def lacking() -> Mapping[str, Terms]:
    raise PrerequisiteError("bubblewrap is not installed", fix="install it")


TALKS = ScriptedAgent([Say("Hello."), Write("a.py", "x = 1\n"), Say("Bye.")])


class Wire(Connection):
    """A worker in this process; all that travels is packed. `broken` is why it was lost."""

    def __init__(self, worker: Worker, home: AsyncExitStack, name: str) -> None:
        self.name = name
        self.worker = worker
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._home = home

    def cut(self) -> None:
        self.broken.set_exception(WorkerFault(f"{self.name} was lost"))
        self.broken.exception()

    async def receive(self) -> Sequence[FromWorker]:
        given = asyncio.create_task(self.worker.next_messages())
        await asyncio.wait([given, self.broken], return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            given.cancel()
            self.broken.result()
        messages: list[FromWorker] = unpack_messages(pack_messages(given.result()))
        return messages

    async def send(self, messages: Sequence[ToWorker]) -> None:
        await asyncio.sleep(0)
        if self.broken.done():
            self.broken.result()
        self.worker.receive(unpack_messages(pack_messages(messages)))

    async def close(self) -> None:
        await self._home.aclose()

    def kill(self) -> None:
        return


class Made:
    """A run's parts, and what was said."""

    def __init__(self, executor: RemoteExecutor, log: Log, wires: list[Wire], said: list[str]) -> None:
        self.executor = executor
        self.rollout = Rollout(executor=executor, log=log, concurrency=6)
        self.wires = wires
        self.said = said


class Slow(ScriptedEngine):
    """Takes its time, and counts what was called off."""

    aborted = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[object, None]:  # type: ignore[override]
        try:
            await asyncio.sleep(3600)
            yield
        finally:
            self.aborted += 1


def engine_of(model: Path) -> Engine:
    codec = tokens.load_codec(model)
    return ScriptedEngine(lambda ids, sampling, seed: [*codec.encode("ok" * (1 + seed % 3)), *codec.stop_ids[:1]])


@asynccontextmanager
async def opened(
    model: Path,
    folder: Path,
    *,
    agent: Agent = TALKS,
    engine: Engine | None = None,
    workers: int = 2,
    make: Callable[[], Mapping[str, Terms]] | None = None,
    on_turn: Callable[[str, Turn], None] | None = None,
    patience: float = 5.0,
    most: int = 9,
    watch: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Made]:
    wires: list[Wire] = []
    said: list[str] = []
    codec = tokens.load_codec(model)
    assert codec.loaded_from is not None
    setup = WorkerSetup(codec.loaded_from, make or partial(terms, agent))
    engine = engine or engine_of(model)

    async def connect(number: int) -> Connection:
        if len(wires) >= most:
            raise WorkerFault("there is no room")
        home = AsyncExitStack()
        worker = await home.enter_async_context(Worker.open(setup, engine.context))
        wires.append(Wire(worker, home, f"worker {len(wires)}"))
        return wires[-1]

    with closing(Log(folder / "log.jsonl")) as log:
        async with RemoteExecutor(
            connect,
            engine,
            on_turn or log.turn,
            workers=workers,
            capacity=3,
            patience=patience,
            say=said.append,
            describe=lambda: "two CPUs are free",
            watch=watch,
        ) as executor:
            yield Made(executor, log, wires, said)
        for wire in wires:
            await wire.close()


def timeless(episode: Episode) -> Episode:
    turns = [replace(turn, started=0.0, ended=0.0, digest="") for turn in episode.turns]
    return replace(episode, turns=tuple(turns), timings={}, tool_calls=())


async def groups(rollout: Rollout, retries: int = 0) -> list[Episode]:
    made = await collect(rollout, slots("train", 1, TASKS, 2, seed=0), sampling=Sampling(), retries=retries)
    return [timeless(episode) for group in made for episode in group.episodes]


async def test_episodes_are_those_of_one_machine(miniature: Path, tmp_path: Path) -> None:
    async with opened(miniature, tmp_path) as made:
        there = await groups(made.rollout)
        assert {len(wire.worker._attempts) for wire in made.wires} == {0}
    logged = {each.id: timeless(each) for each in logged_episodes(read_records(tmp_path / "log.jsonl"))}
    assert [logged[each.id] for each in there] == there
    with closing(Log(tmp_path / "local.jsonl")) as log:
        gateway = Gateway(
            PolicySource(tokens.load_codec(miniature), engine_of(miniature)), sampling=Sampling(), on_turn=log.turn
        )
        async with gateway.listening():
            here = await groups(Rollout(executor=LocalExecutor(gateway, terms(TALKS)), log=log, concurrency=6))
    assert there == here
    assert all(len(each.turns) == 2 and each.reward == 0.5 and each.patch for each in here)


async def test_attempts_are_spread_and_no_worker_gets_more_than_its_capacity(miniature: Path, tmp_path: Path) -> None:
    async with opened(miniature, tmp_path, agent=Waits()) as made:
        async with asyncio.timeout(20):
            while len(made.wires) < 2:
                await asyncio.sleep(0.01)
        running = [asyncio.create_task(made.rollout.run(ticket(number))) for number in range(7)]
        async with asyncio.timeout(20):
            while sum(len(wire.worker._attempts) for wire in made.wires) < 6:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert [len(wire.worker._attempts) for wire in made.wires] == [3, 3]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert [len(wire.worker._attempts) for wire in made.wires] == [0, 0], "they were called off there, too"


def ticket(number: int) -> Ticket:
    return Ticket(TASKS[0], "train", 1, "train-00001-000", number, number, Sampling())


async def test_a_lost_worker_voids_its_attempts_which_are_made_again_elsewhere(miniature: Path, tmp_path: Path) -> None:
    cut: list[Wire] = []

    def on_turn(episode: str, turn: Turn) -> None:
        log.turn(episode, turn)
        if not cut and turn.index == 1:  # in the midst of its attempts, whichever it is
            cut.append(next(wire for wire in made.wires if episode in wire.worker._attempts))
            cut[0].cut()

    async with opened(miniature, tmp_path, on_turn=on_turn) as made:
        log = made.rollout.log
        episodes = await groups(made.rollout, retries=2)
    records = list(logged_episodes(read_records(tmp_path / "log.jsonl")))
    void = [each for each in records if each.ending is Ending.VOID]
    assert void and {each.reason for each in void} == {"worker"}
    assert {each.fault for each in void} == {f"WorkerFault: {cut[0].name} was lost"}
    assert made.said == [f"{cut[0].name} was lost; {len(void)} episodes were made there, and are void"]
    assert [each.ending for each in episodes] == [Ending.DONE] * 6
    assert {each.id.partition("-retry")[0] for each in void} == {
        each.id.partition("-retry")[0] for each in episodes if "retry" in each.id
    }
    assert len(made.wires) == 3, "it was replaced"


async def test_a_machine_that_lacks_something_is_said_at_once(miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="bubblewrap"):
        async with opened(miniature, tmp_path, make=lacking):
            raise AssertionError("it opened")


async def test_without_any_worker_the_run_ends(miniature: Path, tmp_path: Path) -> None:
    began = unix_time()
    with pytest.raises(RunError, match=r"no machine .* 0\.2 seconds: there is no room; two CPUs are free") as caught:
        async with opened(miniature, tmp_path, patience=0.2, most=0):
            raise AssertionError("it opened")
    assert "ray status" in caught.value.fix
    assert unix_time() - began < 10


async def test_a_cluster_that_is_gone_voids_what_is_under_way_and_ends_the_run(miniature: Path, tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def watch() -> None:
        await gone.wait()
        raise RunError("the head is gone", fix="start it anew")

    engine = Slow(lambda ids, sampling, seed: [])
    async with opened(miniature, tmp_path, engine=engine, watch=watch) as made:
        waiting = asyncio.create_task(made.rollout.run(ticket(0)))
        while not any(worker.busy for worker in made.executor.workers) and not waiting.done():
            await asyncio.sleep(0.01)
        gone.set()
        episode = await waiting
        assert (episode.ending, episode.fault) == (Ending.VOID, "WorkerFault: the head is gone")
        with pytest.raises(RunError, match="the head is gone") as caught:
            await made.rollout.run(ticket(1))
    assert caught.value.fix == "start it anew" and made.said == ["the head is gone"]


async def test_a_reply_that_nobody_waits_for_is_called_off_in_the_engine(miniature: Path, tmp_path: Path) -> None:
    engine = Slow(lambda ids, sampling, seed: [])
    async with opened(miniature, tmp_path, engine=engine) as made:
        running = asyncio.create_task(made.rollout.run(ticket(0)))
        async with asyncio.timeout(20):
            while not any(wire.worker._engine._outputs for wire in made.wires):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(20):
            while not engine.aborted:
                await asyncio.sleep(0.01)


def faults() -> Iterator[Exception]:
    yield AgentFault("it broke", how="SIGSEGV", printed="oh")
    yield SandboxFault("gone", fix="again")
    yield Several([ConfigError("one", fix="a"), PrerequisiteError("two", fix="b")])
    yield ValueError("no room")


@pytest.mark.parametrize("error", list(faults()), ids=lambda error: type(error).__name__)
def test_errors_travel_whole(error: Exception) -> None:
    there = unpack_messages(pack_messages(make_picklable(error)))
    assert type(there) is type(error)
    assert (str(there), repr(there.__dict__)) == (str(error), repr(error.__dict__))
