"""The scripted teacher: the same conversation gets the same reply, and the real agent repairs tasks with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web

from coderepairrl import agents
from coderepairrl.agents.scripted import FolderSandbox
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, exercise, mutants
from coderepairrl.types import Endpoint, Task
from workshop.tiny import prompt, teacher
from workshop.tiny.demonstrations import habits
from workshop.tiny.workspace import Workspace


@pytest.fixture(scope="module")
def exercises() -> list[Exercise]:
    made = (exercise(m, Random(f"{m.key}/0"), quoted) for m in mutants() for quoted in (True, False))
    return [each for each in made if each is not None]


def conversation(expert: teacher.Teacher, made: Exercise) -> tuple[list[dict[str, Any]], Workspace]:
    """What an agent and the teacher say to each other, the calls numbered as clients do."""
    workspace, messages = Workspace(made.files), prompt.opening(made.prompt)
    while True:
        reply = dict(expert.reply(messages))
        messages.append(reply)
        if not reply.get("tool_calls"):
            return messages, workspace
        for at, call in enumerate(reply["tool_calls"]):
            function = call["function"]
            answer = workspace.call(function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": f"call_{at}", "content": answer})


def test_without_mistakes_it_repairs_every_task_though_several_share_their_issue(exercises: Sequence[Exercise]) -> None:
    by_issue: dict[str, list[Exercise]] = {}
    for made in exercises:
        by_issue.setdefault(made.prompt, []).append(made)
    shared = [made for own in by_issue.values() if len(own) > 1 for made in own]
    assert len(shared) > 500
    expert = teacher.Teacher(habits(1.0))
    for made in [*shared, *exercises[::20]]:
        assert conversation(expert, made)[1].files[made.path] == made.fixed


@asynccontextmanager
async def served(expert: teacher.Teacher) -> AsyncIterator[str]:
    runner = web.AppRunner(teacher.application(expert), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_the_real_agent_repairs_tasks_over_http(tmp_path: Path, exercises: Sequence[Exercise]) -> None:
    async with served(teacher.Teacher(habits(1.0))) as url:
        for number, made in enumerate(exercises[:: len(exercises) // 4]):
            root = tmp_path / str(number)
            root.mkdir()
            sandbox = FolderSandbox(root, {path: text.encode() for path, text in made.files.items()})
            task = Task(made.mutant.key, made.prompt, "python", f"dir:{root}", b"")
            agent = agents.make_agent("nano", **prompt.AGENT_OPTIONS)
            report = await agent.run(task, sandbox, Endpoint(url, "none", teacher.NAME))
            assert report.exit == "submitted"
            assert (root / made.path).read_text() == made.fixed
