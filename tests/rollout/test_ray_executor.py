"""What is said where a cluster or one of its machines will not do. The real Ray is in `e2e/test_on_ray.py`."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl import tokens
from coderepairrl.assembly.workers import check_executor, require_ray
from coderepairrl.config import Config
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import CodeRepairError, ConfigError, PrerequisiteError, RunError, WorkerFault
from coderepairrl.processes.extras import install_extra
from coderepairrl.rollout import Terms, ray_cluster, ray_executor
from coderepairrl.rollout.messages import pack, portable, unpack
from coderepairrl.rollout.ray_executor import WorkerActor, versions
from coderepairrl.rollout.worker import WorkerSetup


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
    loaded_from = tokens.load(model).loaded_from
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


async def test_without_a_cluster(miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake(raising(AssertionError("asked")), head=raising(ConnectionError("Could not find any running Ray")))
    error = await opened(miniature, monkeypatch, ray)
    assert isinstance(error, PrerequisiteError)
    assert str(error) == "cannot join the Ray cluster auto: ConnectionError: Could not find any running Ray"
    assert "docs/guides/cluster.md" in error.fix and "rollout.ray.address=local" in error.fix
    with pytest.raises(PrerequisiteError, match="Could not find any running Ray"):  # before a run has a folder
        require_ray(asked())


async def test_another_version_of_ray(miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\nThis process was with:\n    Ray: 2.60.0"
    error = await opened(miniature, monkeypatch, fake(raising(RuntimeError(words))))
    assert isinstance(error, PrerequisiteError)
    assert "cluster was started with: Ray: 2.9.0 This process was with: Ray: 2.60.0" in str(error)
    assert "the same Ray and Python on all of its machines" in error.fix


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
    assert str(error) == f"what listens at {found} is no head of a Ray cluster that works: no answer"


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
    assert "--resume" in caught.value.fix and next(answers, None) is None, "one that comes back is no end"


async def test_an_object_store_that_stays_full_ends_the_run_with_its_cause(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remote(*_: Any) -> None:
        raise ObjectStoreFullError("Failed to put object: the object store is full.\n\tobjects: 12\nSpill or raise it.")

    error = await opened(miniature, monkeypatch, fake(options=SimpleNamespace(remote=remote)))
    assert str(error).startswith("no machine has made episodes for 0.3 seconds: an actor ")
    assert "ObjectStoreFullError: Failed to put object: the object store is full. Spill or raise it." in str(error)
    assert str(error).endswith("; an actor takes 1 CPU, and of the cluster's 4 there are 1 free")


async def test_a_full_object_store_in_the_midst_of_a_run_is_a_lost_node() -> None:
    def full(*_: Any) -> None:
        raise ObjectStoreFullError("the object store is full")

    method = SimpleNamespace(remote=full)
    connection = ray_executor._ActorConnection(
        fake(), SimpleNamespace(receive=method, outgoing=method, close=method), "actor 3 on there"
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


async def test_a_machine_without_our_package_ends_the_run_at_once(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "The actor died.\nWorkerActor failed to import on the worker. No module named 'coderepairrl'"
    error = await opened(miniature, monkeypatch, fake(options=dying(words)))
    assert isinstance(error, PrerequisiteError) and "No module named 'coderepairrl'" in str(error)
    assert "the same versions on all machines" in error.fix


async def test_a_passing_trouble_of_a_machine_is_said_once_and_waited_out(
    miniature: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = pack(portable(OSError(28, "No space left on device")))
    error = await opened(miniature, monkeypatch, fake(options=dying(given=("there", full))))
    assert not isinstance(error, PrerequisiteError) and "No space left on device" in str(error)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("an actor on there did not start: OSError: [Errno 28] No space left")


async def test_machines_too_small_for_an_actor_are_named(
    miniature: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = SimpleNamespace(remote=lambda *_: SimpleNamespace(open=SimpleNamespace(remote=lambda: asyncio.sleep(9))))
    error = await opened(miniature, monkeypatch, fake(options=nowhere, memory=5e8))
    small = (
        "an actor of 1 episodes claims 1.1 GB of memory, more than Ray has on there (0.5 GB): lower"
        " sandbox.options.memory"
    )
    assert str(error).endswith(small) and capsys.readouterr().out == small + "\n"
    assert "rollout.ray.episodes=3 would fit" in ray_executor.too_small(
        fake(memory=7e9).nodes(), memory=2 << 30, capacity=8
    )
    error = await opened(miniature, monkeypatch, fake(options=nowhere, memory=5e8), "local")
    assert isinstance(error, PrerequisiteError) and str(error) == small


async def wrong(actor: WorkerActor) -> CodeRepairError:
    name, packed = await actor.open()
    assert name == socket.gethostname()
    error: CodeRepairError = unpack(packed)
    assert isinstance(error, PrerequisiteError)
    return error


async def test_a_machine_with_other_versions(tmp_path: Path) -> None:
    error = await wrong(WorkerActor(versions() | {"transformers": "4.0"}, str(tmp_path), [], b"", 100))
    assert " has transformers " in str(error) and ", not 4.0: its episodes would not be the same" in str(error)
    assert "the same versions on all machines" in error.fix


async def test_a_machine_with_another_commit(tmp_path: Path) -> None:
    error = await wrong(WorkerActor(versions() | {"code of coderepairrl": "0123"}, str(tmp_path), [], b"", 100))
    assert " has code of coderepairrl " in str(error) and ", not 0123: its episodes would" in str(error)


async def test_a_missing_token_is_asked_for(miniature: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = await opened(miniature, monkeypatch, fake(raising(RuntimeError("InvalidAuthToken: it is missing"))))
    assert isinstance(error, PrerequisiteError) and "RAY_AUTH_TOKEN" in error.fix


async def test_a_full_disk_is_why_a_ray_of_ones_own_does_not_start(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    free = SimpleNamespace(free=3 << 20)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: free if tmp_path in path.parents else SimpleNamespace(free=9e9)
    )
    error = await opened(miniature, monkeypatch, fake(raising(RuntimeError("Timed out waiting for file"))), "local")
    assert str(error) == f"cannot join the Ray cluster local: {tmp_path}/ray has 3 MiB free"
    assert "make room" in error.fix and "RAY_TMPDIR" in error.fix


async def test_a_machine_without_the_folder(tmp_path: Path) -> None:
    error = await wrong(WorkerActor(versions(), str(tmp_path / "nowhere"), [], b"", 100))
    assert "nowhere: No such file or directory" in str(error) and "share" in error.fix


async def test_an_actor_that_lacks_something_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup = WorkerSetup(tokens.LoadedFrom("nowhere", "auto", False), lacking)
    error = await wrong(WorkerActor(versions(), str(tmp_path), ["/somewhere/of/mine"], pack(setup), 100))
    assert (str(error), error.fix) == ("bubblewrap is not installed", "install it")
    assert sys.path.pop() == "/somewhere/of/mine", "where a user's own classes are"


def lacking() -> Mapping[str, Terms]:
    raise PrerequisiteError("bubblewrap is not installed", fix="install it")


LOCAL = Config.model_validate({"run": {"name": "a"}})


def asked(address: str = "auto") -> Config:
    return Config.model_validate({"run": {"name": "a"}, "rollout": {"executor": "ray", "ray": {"address": address}}})


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ""])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="rollout.ray.address=") as caught:
        check_executor(asked(address))
    assert "HOST:PORT" in caught.value.fix


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "[::1]:6379"])
def test_addresses(address: str) -> None:
    check_executor(asked(address))


def test_somebody_elses_model_needs_no_cluster() -> None:
    with pytest.raises(ConfigError, match="somebody else serves"):
        check_executor(asked(), remote=True)
    check_executor(LOCAL, remote=True)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrerequisiteError, match="needs the package ray") as caught:
        require_ray(asked())
    assert caught.value.fix == install_extra("ray")
    require_ray(LOCAL)
