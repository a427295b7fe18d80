"""Attempts by workers: the same episodes as on one machine, lost workers, and Ray clusters that cannot be used."""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
from rollouts import open_rollout, read_episodes

from coderepairrl import tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Wait, Write
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
from coderepairrl.protocols import Agent, Engine
from coderepairrl.rewards import ScriptedReward
from coderepairrl.rollout import ray_cluster, ray_executor
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt, Rollout
from coderepairrl.rollout.groups import make_groups, plan_groups
from coderepairrl.rollout.ray_executor import WorkerActor, read_versions
from coderepairrl.rollout.remote import Connection, RemoteExecutor
from coderepairrl.rollout.worker import FromWorker, ToWorker, Worker, WorkerSetup, make_picklable
from coderepairrl.runs import Log
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import Ending, Episode, Limits, Sampling, Task, Turn

TASKS = [Task(f"toy/{number}", "add() subtracts.", "python", "dir:unused", b"") for number in range(3)]
LIMITS = Limits(calls=4, tokens=2000, seconds=20.0, turn_tokens=16)


def terms(agent: Agent) -> Mapping[str, AttemptSettings]:
    backend = ScriptedBackend({"a.py": b"x = 0\n"})
    return {"": AttemptSettings(agent, backend, LIMITS, {"train": [(ScriptedReward(default=0.5), 1.0)]})}


def refuse_terms() -> Mapping[str, AttemptSettings]:
    raise PrerequisiteError("bubblewrap is not installed", fix="install it")


TALKS = ScriptedAgent([Say("Hello."), Write("a.py", "x = 1\n"), Say("Bye.")])


class Wire(Connection):
    """Connection to a worker in this process; messages are pickled. `broken` is set once it is lost."""

    def __init__(self, worker: Worker, home: AsyncExitStack, name: str) -> None:
        self.name = name
        self.worker = worker
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._home = home

    def cut(self) -> None:
        self.broken.set_exception(WorkerFault(f"{self.name} was lost"))
        self.broken.exception()

    async def receive(self) -> Sequence[FromWorker]:
        receiving = asyncio.create_task(self.worker.next_messages())
        await asyncio.wait([receiving, self.broken], return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            receiving.cancel()
            self.broken.result()
        messages: list[FromWorker] = pickle.loads(pickle.dumps(receiving.result()))
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


class Opened(NamedTuple):
    """Parts of a run, and the messages for its user."""

    executor: RemoteExecutor
    rollout: Rollout
    wires: list[Wire]
    said: list[str]


def start_endless_engine() -> ScriptedEngine:
    return ScriptedEngine(lambda ids, sampling, seed: [65], delay=3600.0)


def start_engine(model: Path) -> Engine:
    codec = tokens.load_codec(model)
    return ScriptedEngine(lambda ids, sampling, seed: [*codec.encode("ok" * (1 + seed % 3)), *codec.stop_ids[:1]])


@asynccontextmanager
async def open_remote(
    model: Path,
    folder: Path,
    *,
    agent: Agent = TALKS,
    engine: Engine | None = None,
    make: Callable[[], Mapping[str, AttemptSettings]] | None = None,
    on_turn: Callable[[str, Turn], None] | None = None,
    patience: float = 5.0,
    most: int = 9,
    watch: Callable[[], Awaitable[object]] = lambda: asyncio.Event().wait(),
) -> AsyncIterator[Opened]:
    wires: list[Wire] = []
    said: list[str] = []
    codec = tokens.load_codec(model)
    assert codec.loaded_from is not None
    setup = WorkerSetup(codec.loaded_from, make or partial(terms, agent))
    engine = engine or start_engine(model)

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
            wanted=2,
            capacity=3,
            patience=patience,
            say=said.append,
            describe=lambda: "two CPUs are free",
            watch=watch,
        ) as executor:
            yield Opened(executor, Rollout(executor=executor, log=log, concurrency=6), wires, said)
        for wire in wires:
            await wire.close()


def remove_times(episode: Episode) -> Episode:
    turns = [replace(turn, started=0.0, ended=0.0, digest="") for turn in episode.turns]
    return replace(episode, turns=tuple(turns), timings={}, tool_calls=())


async def make_episodes(rollout: Rollout, retries: int = 0) -> list[Episode]:
    slots = plan_groups("train", 1, TASKS, 2, seed=0)
    groups = await make_groups(rollout, slots, sampling=Sampling(), retries=retries)
    return [remove_times(episode) for group in groups for episode in group.episodes]


async def wait_until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_episodes_are_those_of_one_machine(miniature: Path, tmp_path: Path) -> None:
    async with open_remote(miniature, tmp_path) as run:
        remote = await make_episodes(run.rollout)
        assert {len(wire.worker._attempts) for wire in run.wires} == {0}
    logged = {each.id: remove_times(each) for each in read_episodes(tmp_path)}
    assert [logged[each.id] for each in remote] == remote
    (tmp_path / "local").mkdir()
    source = PolicySource(tokens.load_codec(miniature), start_engine(miniature))
    async with open_rollout(source, tmp_path / "local", terms(TALKS)[""]) as local_rollout:
        local = await make_episodes(local_rollout)
    assert remote == local
    assert all(len(each.turns) == 2 and each.reward == 0.5 and each.patch for each in local)


async def test_attempts_are_spread_and_no_worker_gets_more_than_its_capacity(miniature: Path, tmp_path: Path) -> None:
    async with open_remote(miniature, tmp_path, agent=ScriptedAgent([Say("hello"), Wait(3600.0)])) as run:

        def count_attempts() -> list[int]:
            return [len(wire.worker._attempts) for wire in run.wires]

        await wait_until(lambda: len(run.wires) == 2)
        running = [asyncio.create_task(run.rollout.run(plan_attempt(number))) for number in range(7)]
        await wait_until(lambda: sum(count_attempts()) >= 6)
        await asyncio.sleep(0.05)
        assert count_attempts() == [3, 3]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert count_attempts() == [0, 0], "the workers cancelled them, too"


def plan_attempt(number: int) -> PlannedAttempt:
    return PlannedAttempt(TASKS[0], "train", 1, "train-00001-000", number, number, Sampling())


async def test_a_lost_worker_voids_its_attempts_which_are_made_again_elsewhere(miniature: Path, tmp_path: Path) -> None:
    cut: list[Wire] = []

    def on_turn(episode: str, turn: Turn) -> None:
        run.rollout.log.turn(episode, turn)
        if not cut and turn.index == 1:  # the first worker with a second turn
            cut.append(next(wire for wire in run.wires if episode in wire.worker._attempts))
            cut[0].cut()

    async with open_remote(miniature, tmp_path, on_turn=on_turn) as run:
        episodes = await make_episodes(run.rollout, retries=2)
    void = [each for each in read_episodes(tmp_path) if each.ending is Ending.VOID]
    assert void and {each.reason for each in void} == {"worker"}
    assert {each.fault for each in void} == {f"WorkerFault: {cut[0].name} was lost"}
    assert run.said == [f"{cut[0].name} was lost; its {len(void)} open episodes are void"]
    assert [each.ending for each in episodes] == [Ending.DONE] * 6
    assert {each.id.partition("-retry")[0] for each in void} == {
        each.id.partition("-retry")[0] for each in episodes if "retry" in each.id
    }
    assert len(run.wires) == 3, "it was replaced"


async def test_a_machine_that_cannot_run_attempts_is_named_at_once(miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="bubblewrap"):
        async with open_remote(miniature, tmp_path, make=refuse_terms):
            raise AssertionError("it opened")


async def test_without_any_worker_the_run_ends(miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no machine .* 0\.2 seconds: there is no room; two CPUs are free") as caught:
        async with asyncio.timeout(10), open_remote(miniature, tmp_path, patience=0.2, most=0):
            raise AssertionError("it opened")
    assert "ray status" in caught.value.fix


async def test_a_lost_cluster_voids_open_attempts_and_ends_the_run(miniature: Path, tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def watch() -> None:
        await gone.wait()
        raise RunError("the head is gone", fix="restart it")

    async with open_remote(miniature, tmp_path, engine=start_endless_engine(), watch=watch) as run:
        waiting = asyncio.create_task(run.rollout.run(plan_attempt(0)))
        await wait_until(lambda: any(worker.busy for worker in run.executor.workers))
        gone.set()
        episode = await waiting
        assert (episode.ending, episode.fault) == (Ending.VOID, "WorkerFault: the head is gone")
        with pytest.raises(RunError, match="the head is gone") as caught:
            await run.rollout.run(plan_attempt(1))
    assert caught.value.fix == "restart it" and run.said == ["the head is gone"]


async def test_a_cancelled_attempt_cancels_its_request_to_the_engine(miniature: Path, tmp_path: Path) -> None:
    engine = start_endless_engine()
    async with open_remote(miniature, tmp_path, engine=engine) as run:
        running = asyncio.create_task(run.rollout.run(plan_attempt(0)))
        await wait_until(lambda: engine.requests)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await wait_until(lambda: engine.aborted)


@pytest.mark.parametrize(
    "error",
    [
        AgentFault("it broke", how="SIGSEGV", printed="oh"),
        SandboxFault("gone", fix="again"),
        CombinedError([ConfigError("one", fix="a"), PrerequisiteError("two", fix="b")]),
        ValueError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_with_all_attributes(error: Exception) -> None:
    pickled = pickle.loads(pickle.dumps(make_picklable(error)))
    assert type(pickled) is type(error)
    assert (str(pickled), repr(pickled.__dict__)) == (str(error), repr(error.__dict__))


class RayError(Exception):
    """Base class of Ray's errors."""


def fake_ray(init: Any = None, options: Any = None, head: Any = None, ask_head: Any = None) -> MagicMock:
    """Ray as far as it is used before an actor runs. `head(address)` finds the head, `ask_head` is a request to it."""

    def make_options(**resources: Any) -> Any:
        assert resources["memory"] == 1 << 30, "the limit of its sandboxes"
        return options

    ray = MagicMock(init=init)
    ray.is_initialized.return_value = init is None
    ray.exceptions.RayError = RayError
    ray.get_runtime_context.return_value.gcs_address = "127.0.0.1:1"
    ray._private.services.canonicalize_bootstrap_address = head
    ray._private.worker.global_worker.gcs_client.internal_kv_exists = ask_head
    ray.cluster_resources.return_value = {"CPU": 4.0}
    ray.available_resources.return_value = {"CPU": 1.0}
    ray.remote.return_value.options = make_options
    return ray


def fail_init(*_: Any, **__: Any) -> None:
    raise AssertionError("Ray would wait for the head without end")


async def fail_to_open(model: Path, monkeypatch: pytest.MonkeyPatch, ray: Any) -> CodeRepairError:
    """Return the error of opening an executor with `ray`."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    loaded_from = tokens.load_codec(model).loaded_from
    assert loaded_from is not None
    with pytest.raises(CodeRepairError) as caught:
        async with ray_executor.ray_executor(
            WorkerSetup(loaded_from, refuse_terms),
            start_endless_engine(),
            lambda episode, turn: None,
            address="auto",
            concurrency=2,
            capacity=1,
            memory=1 << 30,
            patience=0.3,
            say=print,
        ):
            raise AssertionError("it opened")
    return caught.value


async def test_an_address_where_nothing_listens_is_refused(miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Ray remembers it as the head of an ended cluster (``auto``)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = await fail_to_open(miniature, monkeypatch, fake_ray(fail_init, head=lambda _: address))
    assert isinstance(error, PrerequisiteError) and f"nothing listens at the Ray address {address}" in str(error)


async def test_an_address_where_another_program_listens_is_refused(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = pytest.importorskip("ray")._private.services
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 3.0)
    with socket.create_server(("0.0.0.0", 0)) as silent:  # Ray asks for the machine's own address, not for loopback's
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        ray = fake_ray(fail_init, head=services.canonicalize_bootstrap_address)
        error = await fail_to_open(miniature, monkeypatch, ray)
        head = services.canonicalize_bootstrap_address("auto")
    assert isinstance(error, PrerequisiteError) and "docs/guides/cluster.md" in error.fix
    assert str(error) == f"{head} is not the head of a working Ray cluster: no answer"


async def test_a_head_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(ray_cluster, "GONE_SECONDS", 0.5)
    answers = iter([True, None, True])

    def exists(*_: Any, **__: Any) -> None:
        if next(answers, None) is None:
            raise RayError("Deadline Exceeded")

    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel still listens
        ray = fake_ray(ask_head=exists)
        ray.get_runtime_context.return_value.gcs_address = f"127.0.0.1:{frozen.getsockname()[1]}"
        with pytest.raises(RunError, match="does not answer: RayError: Deadline Exceeded") as caught:
            await ray_cluster.watch_head(ray)
    assert "--resume" in caught.value.fix and next(answers, None) is None, "a head that answers again ends nothing"


async def test_a_full_object_store_during_a_run_is_a_lost_worker() -> None:
    method = MagicMock(**{"remote.side_effect": RayError("the object store is full")})
    actor = MagicMock(receive=method, next_messages=method, close=method)
    connection = ray_executor._ActorConnection(fake_ray(), actor, "actor 3 on there")
    for call in (connection.send([]), connection.receive()):
        with pytest.raises(WorkerFault, match="^actor 3 on there was lost: RayError: the object store is full$"):
            await call
    await connection.close()


def make_failing_actor(error: Exception) -> Any:
    """Return options of an actor that does not open: a `RayError` is Ray's, other errors are the worker's."""

    async def fail(*_: object) -> tuple[str, bytes]:
        if isinstance(error, RayError):
            raise error
        return "there", pickle.dumps(make_picklable(error))

    return SimpleNamespace(remote=lambda *_: SimpleNamespace(open=SimpleNamespace(remote=fail)))


async def test_a_temporary_problem_of_a_machine_is_reported_once_and_waited_out(
    miniature: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = make_failing_actor(OSError(28, "No space left on device"))
    error = await fail_to_open(miniature, monkeypatch, fake_ray(options=actor))
    assert not isinstance(error, PrerequisiteError) and "No space left on device" in str(error)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("an actor on there did not start: OSError: [Errno 28] No space left")


@pytest.mark.parametrize(
    ("versions", "folder", "message", "fix"),
    [
        ({"transformers": "4.0"}, ".", "has transformers .*, not 4.0: its episodes would not", "the same versions"),
        ({}, "/nowhere", "cannot enter /nowhere: No such file or directory", "share"),
    ],
    ids=["other versions", "no folder"],
)
async def test_a_machine_that_differs_is_refused(versions: dict[str, str], folder: str, message: str, fix: str) -> None:
    name, pickled = await WorkerActor().open(read_versions() | versions, folder, [], b"", 100)
    error: CodeRepairError = pickle.loads(pickled)
    assert isinstance(error, PrerequisiteError) and re.match(f"{name} {message}", str(error))
    assert name == socket.gethostname() and fix in error.fix


async def test_a_machine_without_our_package_ends_the_run_at_once(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    death = RayError("The actor died.\nWorkerActor failed to import on the worker. No module named 'coderepairrl'")
    error = await fail_to_open(miniature, monkeypatch, fake_ray(options=make_failing_actor(death)))
    assert isinstance(error, PrerequisiteError) and "No module named 'coderepairrl'" in str(error)


def configure_ray(address: str = "auto") -> Config:
    return Config.model_validate({"run": {"name": "a"}, "rollout": {"executor": "ray", "ray": {"address": address}}})


def test_ray_needs_a_valid_address_and_a_model_of_this_run() -> None:
    for address in ("ray://head:10001", "head", "head:", ""):
        with pytest.raises(ConfigError, match="rollout.ray.address="):
            check_executor(configure_ray(address))
    for address in ("auto", "local", "head:6379", "[::1]:6379"):
        check_executor(configure_ray(address))
    with pytest.raises(ConfigError, match="a remote model"):
        check_executor(configure_ray(), remote=True)
