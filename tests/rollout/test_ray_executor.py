"""What is said where a cluster or one of its machines will not do. The real Ray is in `e2e/test_on_ray.py`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl import tokens
from coderepairrl.config import Config
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import CodeRepairError, ConfigError, PrerequisiteError, RunError, WorkerFault
from coderepairrl.plan.terms import check_executor
from coderepairrl.rollout import Terms, ray_cluster, ray_executor
from coderepairrl.rollout.ray_executor import WorkerActor, executor_versions
from coderepairrl.rollout.worker import WorkerSetup, make_picklable, pack_messages, unpack_messages


class RayError(Exception):
    """Of Ray: all of its own."""


class ObjectStoreFullError(RayError):
    """Of Ray."""


def fake(
    init: Any = None, options: Any = None, memory: float = 8e9, head: Any = lambda address: None, asked: Any = None
) -> SimpleNamespace:
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
        nodes=lambda: [{"Alive": True, "NodeManagerHostname": "there", "Resources": {"CPU": 4.0, "memory": memory}}],
        remote=lambda cls: SimpleNamespace(options=given),
    )


def raising(error: Exception) -> Any:
    def init(*_: Any, **__: Any) -> None:
        raise error

    return init


def nothing() -> Mapping[str, Terms]:
    return {}


async def opened(model: Path, monkeypatch: pytest.MonkeyPatch, ray: Any, address: str = "auto") -> CodeRepairError:
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
        error = await opened(miniature, monkeypatch, ray, address if named == "address" else "auto")
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
        error = await opened(miniature, monkeypatch, ray, there)
        found = services.canonicalize_bootstrap_address(address)
    assert isinstance(error, PrerequisiteError) and "docs/guides/cluster.md" in error.fix
    assert str(error) == f"what listens at {found} is not a head of a Ray cluster that works: no answer"


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
        fake(), SimpleNamespace(receive=method, next_piece=method, close=method), "actor 3 on there"
    )
    for asked in (connection.send([]), connection.receive()):
        with pytest.raises(
            WorkerFault, match="^actor 3 on there was lost: ObjectStoreFullError: the object store is full$"
        ):
            await asked
    await connection.close()


def dying(words: str = "", given: tuple[str, bytes] = ("there", b"")) -> Any:
    """Options of an actor that is made, and then does not open."""

    async def opening() -> tuple[str, bytes]:
        if words:
            raise RayError(words)
        return given

    return SimpleNamespace(remote=lambda *_: SimpleNamespace(open=SimpleNamespace(remote=opening)))


async def test_a_passing_trouble_of_a_machine_is_said_once_and_waited_out(
    miniature: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = pack_messages(make_picklable(OSError(28, "No space left on device")))
    error = await opened(miniature, monkeypatch, fake(options=dying(given=("there", full))))
    assert not isinstance(error, PrerequisiteError) and "No space left on device" in str(error)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("an actor on there did not start: OSError: [Errno 28] No space left")


async def wrong(actor: WorkerActor) -> CodeRepairError:
    name, packed = await actor.open()
    assert name == socket.gethostname()
    error: CodeRepairError = unpack_messages(packed)
    assert isinstance(error, PrerequisiteError)
    return error


async def test_a_machine_with_other_versions(tmp_path: Path) -> None:
    error = await wrong(WorkerActor(executor_versions() | {"transformers": "4.0"}, str(tmp_path), [], b"", 100))
    assert " has transformers " in str(error) and ", not 4.0: its episodes would not be the same" in str(error)
    assert "the same versions on all machines" in error.fix
    error = await wrong(WorkerActor(executor_versions(), str(tmp_path / "nowhere"), [], b"", 100))
    assert "nowhere: No such file or directory" in str(error) and "share" in error.fix


async def test_a_machine_without_our_package_ends_the_run_at_once(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "The actor died.\nWorkerActor failed to import on the worker. No module named 'coderepairrl'"
    error = await opened(miniature, monkeypatch, fake(options=dying(words)))
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
