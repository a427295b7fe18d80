"""Attempts by workers: what is the same as on one machine, what a lost worker costs, and where a Ray will not do."""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollouts import open_rollout, read_episodes

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Write
from coderepairrl.config import Config
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import (
    AgentFault,
    CodeRepairError,
    CombinedError,
    ConfigError,
    PrerequisiteError,
    RunError,
    SandboxFault,
    WorkerFault,
)
from coderepairrl.gateway import PolicySource
from coderepairrl.plan.terms import check_executor
from coderepairrl.processes.meter import unix_time
from coderepairrl.protocols import Agent, Engine, Sandbox
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import ray_cluster, ray_executor
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt, Rollout
from coderepairrl.rollout.groups import make_groups, plan_groups
from coderepairrl.rollout.ray_executor import WorkerActor, read_versions
from coderepairrl.rollout.remote import Connection, RemoteExecutor
from coderepairrl.rollout.worker import FromWorker, ToWorker, Worker, WorkerSetup, make_picklable
from coderepairrl.runs import Log
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


def terms(agent: Agent) -> Mapping[str, AttemptSettings]:
    backend = ScriptedBackend({"a.py": b"x = 0\n"})
    return {"": AttemptSettings(agent, backend, LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})}


def lacking() -> Mapping[str, AttemptSettings]:
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
        messages: list[FromWorker] = pickle.loads(pickle.dumps(given.result()))
        return messages

    async def send(self, messages: Sequence[ToWorker]) -> None:
        await asyncio.sleep(0)
        if self.broken.done():
            self.broken.result()
        self.worker.receive(pickle.loads(pickle.dumps(messages)))

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
    make: Callable[[], Mapping[str, AttemptSettings]] | None = None,
    on_turn: Callable[[str, Turn], None] | None = None,
    patience: float = 5.0,
    most: int = 9,
    watch: Callable[[], Awaitable[object]] = lambda: asyncio.Event().wait(),
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
            wanted=workers,
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
    made = await make_groups(rollout, plan_groups("train", 1, TASKS, 2, seed=0), sampling=Sampling(), retries=retries)
    return [timeless(episode) for group in made for episode in group.episodes]


async def test_episodes_are_those_of_one_machine(miniature: Path, tmp_path: Path) -> None:
    async with opened(miniature, tmp_path) as made:
        there = await groups(made.rollout)
        assert {len(wire.worker._attempts) for wire in made.wires} == {0}
    logged = {each.id: timeless(each) for each in read_episodes(tmp_path)}
    assert [logged[each.id] for each in there] == there
    (tmp_path / "local").mkdir()
    source = PolicySource(tokens.load_codec(miniature), engine_of(miniature))
    async with open_rollout(source, tmp_path / "local", terms(TALKS)[""]) as local:
        here = await groups(local)
    assert there == here
    assert all(len(each.turns) == 2 and each.reward == 0.5 and each.patch for each in here)


async def test_attempts_are_spread_and_no_worker_gets_more_than_its_capacity(miniature: Path, tmp_path: Path) -> None:
    async with opened(miniature, tmp_path, agent=Waits()) as made:
        async with asyncio.timeout(20):
            while len(made.wires) < 2:
                await asyncio.sleep(0.01)
        running = [asyncio.create_task(made.rollout.run(planned(number))) for number in range(7)]
        async with asyncio.timeout(20):
            while sum(len(wire.worker._attempts) for wire in made.wires) < 6:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert [len(wire.worker._attempts) for wire in made.wires] == [3, 3]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert [len(wire.worker._attempts) for wire in made.wires] == [0, 0], "they were called off there, too"


def planned(number: int) -> PlannedAttempt:
    return PlannedAttempt(TASKS[0], "train", 1, "train-00001-000", number, number, Sampling())


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
    void = [each for each in read_episodes(tmp_path) if each.ending is Ending.VOID]
    assert void and {each.reason for each in void} == {"worker"}
    assert {each.fault for each in void} == {f"WorkerFault: {cut[0].name} was lost"}
    assert made.said == [f"{cut[0].name} was lost; its {len(void)} open episodes are void"]
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
        waiting = asyncio.create_task(made.rollout.run(planned(0)))
        while not any(worker.busy for worker in made.executor.workers) and not waiting.done():
            await asyncio.sleep(0.01)
        gone.set()
        episode = await waiting
        assert (episode.ending, episode.fault) == (Ending.VOID, "WorkerFault: the head is gone")
        with pytest.raises(RunError, match="the head is gone") as caught:
            await made.rollout.run(planned(1))
    assert caught.value.fix == "start it anew" and made.said == ["the head is gone"]


async def test_a_reply_that_nobody_waits_for_is_called_off_in_the_engine(miniature: Path, tmp_path: Path) -> None:
    engine = Slow(lambda ids, sampling, seed: [])
    async with opened(miniature, tmp_path, engine=engine) as made:
        running = asyncio.create_task(made.rollout.run(planned(0)))
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
    yield CombinedError([ConfigError("one", fix="a"), PrerequisiteError("two", fix="b")])
    yield ValueError("no room")


@pytest.mark.parametrize("error", list(faults()), ids=lambda error: type(error).__name__)
def test_errors_travel_whole(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(make_picklable(error)))
    assert type(there) is type(error)
    assert (str(there), repr(there.__dict__)) == (str(error), repr(error.__dict__))


class RayError(Exception):
    """Of Ray: all of its own."""


class ObjectStoreFullError(RayError):
    """Of Ray."""


def fake(init: Any = None, options: Any = None, head: Any = lambda address: None, asked: Any = None) -> SimpleNamespace:
    """As much of Ray as is asked for before there is an actor. `head` finds that of an address, or that there is none,
    and `asked` is called with what a head that was joined is asked for."""

    def given(**wanted: Any) -> Any:
        assert wanted["memory"] == 1 << 30, "what its sandboxes may use"
        return options

    return SimpleNamespace(
        is_initialized=lambda: init is None,
        init=init,
        shutdown=lambda: None,
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=RayError),
        _private=SimpleNamespace(
            services=SimpleNamespace(canonicalize_bootstrap_address=head),
            worker=SimpleNamespace(global_worker=SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=asked))),
        ),
        cluster_resources=lambda: {"CPU": 4.0},
        available_resources=lambda: {"CPU": 1.0},
        remote=lambda cls: SimpleNamespace(options=given),
    )


def raising(error: Exception) -> Any:
    def init(*_: Any, **__: Any) -> None:
        raise error

    return init


def nothing() -> Mapping[str, AttemptSettings]:
    return {}


async def refused(model: Path, monkeypatch: pytest.MonkeyPatch, ray: Any, address: str = "auto") -> CodeRepairError:
    """What is raised instead of an executor."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    loaded_from = tokens.load_codec(model).loaded_from
    assert loaded_from is not None
    with pytest.raises(CodeRepairError) as caught:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                ray_executor.ray_executor(
                    WorkerSetup(loaded_from, nothing),
                    ScriptedEngine(lambda ids, sampling, seed: []),
                    lambda episode, turn: None,
                    address=address,
                    concurrency=2,
                    capacity=1,
                    memory=1 << 30,
                    patience=0.3,
                    say=print,
                )
            )
    return caught.value


@pytest.mark.parametrize("named", ["address", "auto"], ids=["named", "remembered"])
async def test_an_address_where_nothing_listens(named: str, miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for ever, also where it has remembered the address of a head that is gone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ray = fake(raising(AssertionError("asked")), head=lambda _: address)
        error = await refused(miniature, monkeypatch, ray, address if named == "address" else "auto")
    assert isinstance(error, PrerequisiteError) and f"nothing listens at the Ray address {address}" in str(error)


@pytest.mark.parametrize("named", ["address", "RAY_ADDRESS"])
async def test_an_address_where_something_else_listens(
    named: str, miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for ever, and no signal would end it."""
    services = pytest.importorskip("ray")._private.services
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 3.0)
    with socket.create_server(("0.0.0.0", 0)) as silent:  # Ray asks for the machine's own address, not for loopback's
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if named == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        ray = fake(raising(AssertionError("asked")), head=services.canonicalize_bootstrap_address)
        there = "auto" if named == "RAY_ADDRESS" else address
        error = await refused(miniature, monkeypatch, ray, there)
        found = services.canonicalize_bootstrap_address(address)
    assert isinstance(error, PrerequisiteError) and "docs/guides/cluster.md" in error.fix
    assert str(error) == f"{found} is not the head of a working Ray cluster: no answer"


async def test_a_head_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(ray_cluster, "GONE_SECONDS", 0.5)
    answers = iter([True, None, True])

    def exists(*_: Any, **__: Any) -> None:
        if next(answers, None) is None:
            raise RayError("Deadline Exceeded")

    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel still listens
        ray = fake(asked=exists)
        ray.get_runtime_context = lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{frozen.getsockname()[1]}")
        with pytest.raises(RunError, match="does not answer: RayError: Deadline Exceeded") as caught:
            await ray_cluster.watch_head(ray)
    assert "--resume" in caught.value.fix and next(answers, None) is None, "one that comes back is not an end"


async def test_a_full_object_store_in_the_midst_of_a_run_is_a_lost_node() -> None:
    def full(*_: Any) -> None:
        raise ObjectStoreFullError("the object store is full")

    method = SimpleNamespace(remote=full)
    connection = ray_executor._ActorConnection(
        fake(), SimpleNamespace(receive=method, next_messages=method, close=method), "actor 3 on there"
    )
    for asked in (connection.send([]), connection.receive()):
        with pytest.raises(
            WorkerFault, match="^actor 3 on there was lost: ObjectStoreFullError: the object store is full$"
        ):
            await asked
    await connection.close()


def dying(words: str = "", given: tuple[str, bytes] = ("there", b"")) -> Any:
    """Options of an actor that is made, and then does not open."""

    async def opening(*_: object) -> tuple[str, bytes]:
        if words:
            raise RayError(words)
        return given

    return SimpleNamespace(remote=lambda *_: SimpleNamespace(open=SimpleNamespace(remote=opening)))


async def test_a_passing_trouble_of_a_machine_is_said_once_and_waited_out(
    miniature: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = pickle.dumps(make_picklable(OSError(28, "No space left on device")))
    error = await refused(miniature, monkeypatch, fake(options=dying(given=("there", full))))
    assert not isinstance(error, PrerequisiteError) and "No space left on device" in str(error)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("an actor on there did not start: OSError: [Errno 28] No space left")


async def wrong(versions: Mapping[str, str], folder: Path) -> CodeRepairError:
    name, packed = await WorkerActor().open(versions, str(folder), [], b"", 100)
    assert name == socket.gethostname()
    error: CodeRepairError = pickle.loads(packed)
    assert isinstance(error, PrerequisiteError)
    return error


async def test_a_machine_with_other_versions(tmp_path: Path) -> None:
    error = await wrong(read_versions() | {"transformers": "4.0"}, tmp_path)
    assert " has transformers " in str(error) and ", not 4.0: its episodes would not be the same" in str(error)
    assert "the same versions on all machines" in error.fix
    error = await wrong(read_versions(), tmp_path / "nowhere")
    assert "nowhere: No such file or directory" in str(error) and "share" in error.fix


async def test_a_machine_without_our_package_ends_the_run_at_once(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "The actor died.\nWorkerActor failed to import on the worker. No module named 'coderepairrl'"
    error = await refused(miniature, monkeypatch, fake(options=dying(words)))
    assert isinstance(error, PrerequisiteError) and "No module named 'coderepairrl'" in str(error)


def asked(address: str = "auto") -> Config:
    return Config.model_validate({"run": {"name": "a"}, "rollout": {"executor": "ray", "ray": {"address": address}}})


def test_an_address_that_is_none_and_somebody_elses_model_are_refused() -> None:
    for address in ("ray://head:10001", "head", "head:", ""):
        with pytest.raises(ConfigError, match="rollout.ray.address="):
            check_executor(asked(address))
    for address in ("auto", "local", "head:6379", "[::1]:6379"):
        check_executor(asked(address))
    with pytest.raises(ConfigError, match="a remote model"):
        check_executor(asked(), remote=True)
