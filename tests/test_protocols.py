"""The protocols are all that is used of a part: behind a proxy with nothing else it works as well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from coderepairrl import agents, engines, rewards, sandbox, tasks
from coderepairrl.certify import exams
from coderepairrl.certify.sandbox import sit
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Agent, Engine, EngineSpec, Reward, Sandbox, SandboxBackend, TaskSource
from coderepairrl.registry import protocol_members
from coderepairrl.types import Task


class Narrow:
    """`inner` as a `protocol` and nothing else: any other attribute is an error."""

    def __init__(self, inner: Any, protocol: type) -> None:
        self._inner, self._members = inner, protocol_members(protocol)

    def __getattr__(self, name: str) -> Any:
        if name not in self._members:
            raise AttributeError(f"{name} is no part of the protocol")
        return getattr(self._inner, name)

    async def __call__(self, *arguments: Any) -> Any:
        return await self._inner(*arguments)

    def __iter__(self) -> Any:
        return iter(self._inner)


class NarrowBackend(Narrow):
    """A backend whose sandboxes are narrow, too."""

    def __init__(self, inner: SandboxBackend) -> None:
        super().__init__(inner, SandboxBackend)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        async with self._inner.open(task) as box:
            yield cast(Sandbox, Narrow(box, Sandbox))


class NarrowSpec(Narrow):
    """An engine whose engine is narrow, too."""

    def __init__(self, inner: EngineSpec) -> None:
        super().__init__(inner, EngineSpec)

    async def start(self, model: Path, *, log_dir: Path) -> Engine:
        return cast(Engine, Narrow(await self._inner.start(model, log_dir=log_dir), Engine))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is made by name is behind a proxy."""
    of_agents, of_engines, of_rewards = agents.make, engines.make, rewards.make
    of_sandboxes, of_tasks = sandbox.make, tasks.make
    monkeypatch.setattr(agents, "make", lambda *a, **o: Narrow(of_agents(*a, **o), Agent))
    monkeypatch.setattr(engines, "make", lambda *a, **o: NarrowSpec(of_engines(*a, **o)))
    monkeypatch.setattr(rewards, "make", lambda spec: [(Narrow(one, Reward), w) for one, w in of_rewards(spec)])
    monkeypatch.setattr(sandbox, "make", lambda *a, **o: NarrowBackend(of_sandboxes(*a, **o)))
    monkeypatch.setattr(tasks, "make", lambda *a, **o: Narrow(of_tasks(*a, **o), TaskSource))


async def test_the_exams_ask_no_more(narrow: None) -> None:
    for kind, name in (("agent", "nano"), ("reward", "patch_edits"), ("reward", "tests")):
        asked = [entry async for entry in exams.examine(kind, name)]
        assert asked and not [entry for entry in asked if not entry.ok], (kind, name, asked)


async def test_the_exam_of_sandboxes_asks_no_more(narrow: None, tmp_path: Path) -> None:
    backend = sandbox.make(sandbox.choose().name)
    sandbox.require(backend)
    seen = [check async for check in sit(backend)]
    assert not [check for check in seen if "AttributeError" in check.detail or "protocol" in check.detail]
    assert [check.name for check in seen if not check.ok and not check.name.startswith("A command costs")] == []
    backend.close()


def test_rewards_that_judge_a_workspace_declare_it(narrow: None) -> None:
    on_state, on_patch = rewards.on_state_and_patch(rewards.make({"state_tests": 1.0, "tests": 1.0}))
    assert [reward.name for reward, _ in on_state] == ["state_tests"]
    assert [reward.name for reward, _ in on_patch] == ["tests"]


@pytest.mark.slow
async def test_the_exam_of_engines_asks_no_more(narrow: None) -> None:
    assert all([entry.ok async for entry in exams.examine("engine", "tiny")])


def test_a_part_used_beside_its_protocol_fails(narrow: None) -> None:
    """The control: what the proxy keeps out is there."""
    with pytest.raises(AttributeError, match="limits is no part"):
        cast(Any, sandbox.make("bwrap")).limits  # noqa: B018
    with pytest.raises(AttributeError, match="slots is no part"):
        cast(Any, engines.make("tiny")).slots  # noqa: B018
    assert engines.make("tiny").name == "tiny"


class Bare:
    name = "bare"
    placement = "host"


class Unrelated:
    name = "unrelated"

    async def __call__(self, task: Any, episode: Any, box: Any) -> None: ...


def test_what_a_class_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is no Agent: it lacks run") as lacking:
        agents.make(f"{__name__}:Bare")
    assert "define run" in lacking.value.fix
    with pytest.raises(ConfigError, match="it lacks compare, drawn, on_state, repairs") as underived:
        rewards.make(f"{__name__}:Unrelated")
    assert "derive it from coderepairrl.protocols.Reward" in underived.value.fix
