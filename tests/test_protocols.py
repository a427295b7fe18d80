"""The protocols are all that is used of a part: behind a proxy with nothing else it works as well."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from coderepairrl import agents, config, engines, registry, rewards, sandbox, tasks
from coderepairrl.checks import exams, task_source
from coderepairrl.checks.task_source import verify_tasks
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Engine, EngineSpec, Sandbox, SandboxBackend
from coderepairrl.registry import Finding, protocol_members
from coderepairrl.stages import command, fix, serve
from coderepairrl.types import EngineNeeds, Task

beside: list[str] = []
"""Uses of parts outside their protocols, recorded because callers may swallow the error."""


class Narrow:
    """`inner` as a `protocol` and nothing else: any other attribute is an error."""

    def __init__(self, inner: Any, protocol: type) -> None:
        self._inner, self._protocol = inner, protocol

    def __getattr__(self, name: str) -> Any:
        if name not in protocol_members(self._protocol):
            problem = f"{name} is not a part of the protocol {self._protocol.__name__}"
            beside.append(problem)
            raise AttributeError(problem)
        return getattr(self._inner, name)

    async def __call__(self, *arguments: Any) -> Any:
        return await self._inner(*arguments)

    def __iter__(self) -> Any:
        return iter(self._inner)


class NarrowBackend(Narrow):
    """A backend whose sandboxes are narrow, too."""

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        async with self._inner.open(task) as box:
            yield cast(Sandbox, Narrow(box, Sandbox))


class NarrowSpec(Narrow):
    """An engine whose engine is narrow, too."""

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds) -> Engine:
        return cast(Engine, Narrow(await self._inner.start(model, log_dir=log_dir, needs=needs), Engine))


PROXIES = {SandboxBackend: NarrowBackend, EngineSpec: NarrowSpec}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whatever is made by name is behind a proxy; what it was, as ``kind name``."""
    made: list[str] = []
    instance = registry.make_instance

    def narrow(kind: str, name: str, found: Any, protocol: type, options: Any) -> Any:
        made.append(f"{kind} {name}")
        return PROXIES.get(protocol, Narrow)(instance(kind, name, found, protocol, options), protocol)

    monkeypatch.setattr(registry, "make_instance", narrow)
    beside.clear()
    yield made
    assert not beside


HELLO = ["run.steps=1", "rollout.tasks_per_step=2", "rollout.group_size=6", "eval.tasks=2", "eval.before=false"]


async def test_a_step_of_hello_uses_no_more(made: list[str], isolating: None, tmp_path: Path) -> None:
    """Two tasks, six times each so that rewards differ, an update of the weights, and an evaluation of them."""
    summary = await command.run_training(config.load_config("hello", [*HELLO, f"run.dir={tmp_path}"]), quiet=True)
    assert (summary["steps"], summary["version"]) == (1, 1)
    assert {f"sandbox {sandbox.choose_backend().name}", "engine tiny", "agent nano", "task source mutants"} < {*made}
    assert {"reward patch_edits", "reward tests"} < {*made}


async def test_fix_uses_no_more(made: list[str], isolating: None, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "add.py").write_text("def add(a, b):\n    return a - b\n")
    as_me = ["git", "-C", str(repository), "-c", "user.name=me", "-c", "user.email=me@here"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*as_me, *arguments], check=True)
    (issue := tmp_path / "issue.md").write_text("add() subtracts.")
    _, facts = await fix.attempt_repair(fix.plan_repair(repository, issue, "builtin:tiny", ["rollout.calls=2"]))
    assert facts["exit"] and {"engine tiny", "agent nano", f"sandbox {facts['sandbox']}"} <= {*made}


async def test_serve_uses_no_more(made: list[str], tmp_path: Path) -> None:
    plan, admin = serve.plan_server("builtin:tiny"), tmp_path / "admin.sock"
    where: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve.serve_model(plan, port=0, admin=admin, ready=where.set_result, say=print))
    await asyncio.wait([where, serving], return_when=asyncio.FIRST_COMPLETED)
    assert where.done(), serving.exception()
    host = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(admin)), base_url="http://host", timeout=60)
    async with host, httpx.AsyncClient(timeout=60) as client:
        session = (await host.post("/sessions", json={"limits": {"turn_tokens": 8}})).raise_for_status().json()
        body = {"model": session["model"], "messages": [{"role": "user", "content": "Repair it."}]}
        key = {"Authorization": f"Bearer {session['key']}"}
        asked = await client.post(f"{session['base_url']}/chat/completions", json=body, headers=key)
        assert asked.raise_for_status().json()["choices"]
        [turn] = (await host.delete(f"/sessions/{session['id']}")).raise_for_status().json()["turns"]
        assert turn["output"]["ids"]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert "engine tiny" in made


async def exam(kind: str, name: str, **options: Any) -> list[Finding]:
    findings = [finding async for finding in exams.run_exam(kind, name, options)]
    assert findings
    return findings


def list_failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


@pytest.mark.parametrize("name", ["nano", "nano4", "direct", "agentless"])
async def test_the_exam_of_agents_uses_no_more(made: list[str], name: str) -> None:
    assert not list_failed(await exam("agent", name))


async def test_the_exams_of_task_sources_use_no_more(made: list[str], isolating: None, tmp_path: Path) -> None:
    source = tasks.make_source("handmade", split="test")
    tasks.write_jsonl(list(source)[:1], tmp_path / "tasks.jsonl")
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    for name, options in (("handmade", {}), ("mutants", {"n": 2}), ("jsonl", {"path": str(tmp_path / "tasks.jsonl")})):
        findings = await task_source.examine_task_source(tasks.make_source(name, **options), backend, limit=2)
        assert findings and not list_failed(findings), name
    assert len(await verify_tasks(source, backend, limit=1)) == 2


@pytest.mark.by_hand  # two minutes; their exams are asked in tests/sandbox, the chosen one's behind proxies above
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [found.name for found in sandbox.check_backends() if found.ok])
async def test_the_whole_exam_of_sandboxes_uses_no_more(made: list[str], name: str) -> None:
    """All that work here, with their attacks; ``unsafe-local`` fails it, and asks no more either."""
    wrong = list_failed(await exam("sandbox", name))
    assert name == "unsafe-local" or not [one for one in wrong if not one.name.startswith("A command costs")]


@pytest.mark.timeout(900)
async def test_the_exam_of_engines_uses_no_more(made: list[str]) -> None:
    assert not list_failed(await exam("engine", "tiny"))
    assert list_failed(await exam("engine", "scripted", script=[[5, 6, 7]] * 1000))


def test_rewards_that_judge_a_workspace_declare_it(made: list[str]) -> None:
    on_state, on_patch = rewards.split_state_rewards(rewards.make_rewards({"state_tests": 1.0, "tests": 1.0}))
    assert [reward.name for reward, _ in on_state] == ["state_tests"]
    assert [reward.name for reward, _ in on_patch] == ["tests"]


def test_a_part_used_beside_its_protocol_fails(made: list[str]) -> None:
    """Control: attributes behind the proxy exist, and each use is recorded even without an error."""
    with pytest.raises(AttributeError, match="limits is not a part"):
        cast(Any, sandbox.make_backend("bwrap")).limits  # noqa: B018
    assert not hasattr(engines.make_engine("tiny"), "slots")
    assert engines.make_engine("tiny").name == "tiny"
    assert [problem.split()[0] for problem in beside] == ["limits", "slots"]
    beside.clear()


class Bare:
    name = "bare"
    placement = "host"


class Unrelated:
    name = "unrelated"

    async def __call__(self, task: Any, episode: Any, box: Any) -> None: ...


def test_what_a_class_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"does not implement Agent: it lacks run") as lacking:
        agents.make_agent(f"{__name__}:Bare")
    assert "define run" in lacking.value.fix
    with pytest.raises(ConfigError, match="it lacks compare, drawn, on_state, repairs") as underived:
        rewards.make_rewards(f"{__name__}:Unrelated")
    assert "derive it from coderepairrl.protocols.Reward" in underived.value.fix
