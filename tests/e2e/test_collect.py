"""``crrl collect`` as users call it: a teacher behind a URL, the built-in engine, and filters."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coderepairrl import models, tokens
from coderepairrl.errors import UsageError
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.runs.examples import EXAMPLES_FILE, Example, read_examples
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.collect import collect_attempts, select_attempts
from coderepairrl.stages.evaluation import Evaluation
from coderepairrl.tasks.select import is_held_out
from gateway.test_remote import listening

from .conftest import Project, make_completion, wait_until

Handler = Callable[[Mapping[str, Any], int], web.Response]
QUESTIONS = [f"q/{number}" for number in range(40)]
COLLECTED = {name for name in QUESTIONS if is_held_out(name, 0.25)}


def make_reply(text: str | None, **more: Any) -> web.Response:
    return web.json_response(make_completion(text, "teacher-1", **more))


@asynccontextmanager
async def teacher(reply: Handler) -> AsyncIterator[str]:
    """URL of a server that answers with `reply`, given the request's body and the number of requests before it."""
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        assert request.headers["Authorization"] == "Bearer s3cret-key"
        seen += 1
        return reply(await request.json(), seen - 1)

    async with listening(handler) as url:
        yield url


@pytest.fixture
def questions(project: Project, monkeypatch: pytest.MonkeyPatch, isolating: None) -> Project:
    """Project with tasks that take an answer, and a key for the teacher."""
    monkeypatch.chdir(project.path)
    monkeypatch.setenv("TEACHER_KEY", "s3cret-key")
    rows = [{"id": name, "prompt": f"{name}?", "language": "c", "answer": "yes"} for name in QUESTIONS]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return project


def plan_collection(source: str, url: str, *settings: str, **more: Any) -> list[Evaluation]:
    remote = ("engine.options.backoff=0", "engine.options.model_name=teacher", "engine.options.key_env=TEACHER_KEY")
    return plan_evaluations(source, [*settings, *remote], [url], collects=True, **more)


def drop_retry_numbers(example: Example) -> Example:
    """Drop what depends on how often an attempt had to begin."""
    return replace(example, **{key: re.sub(r"-retry\d+", "", getattr(example, key)) for key in ("id", "episode")})


async def test_a_teacher_that_throttles_and_refuses_is_paid_once_and_its_good_answers_are_kept(
    questions: Project,
) -> None:
    refusing = sorted(COLLECTED)[::3]

    def reply(body: Mapping[str, Any], before: int) -> web.Response:
        if before % 3 == 0:
            return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0"})
        asked = body["messages"][-1]["content"]
        if any(f"{name}?" in asked for name in refusing):
            return make_reply(None, refusal="I cannot help with that.")
        return make_reply(f"<answer>yes</answer> as {len(asked)}", reasoning_content="hm")

    answering = ("path=questions.jsonl", "agent=direct", 'agent.options={system=""}', "eval.attempts=2")
    async with teacher(reply) as url:
        found = await collect_attempts(plan_collection("jsonl", url, *answering, prices="1,10"))
    calls = 2 * len(COLLECTED)
    assert found["cost"]["calls"] == calls and found["cost"]["money"] == pytest.approx(calls * (10 + 30) / 1e6)
    assert (found["attempts"], found["tasks"]) == (calls, len(COLLECTED) - len(refusing))
    assert found["kept"] == found["rows"] == found["rendered"] == found["tasks"], "the same conversation counts once"
    examples = read_examples(Path(found["examples"]))
    assert {each.task_id for each in examples} == COLLECTED - set(refusing)
    assert all(each.messages[-1]["reasoning_content"] == "hm" and not each.exact for each in examples)
    assert {(each.policy, each.agent, each.reward, each.language) for each in examples} == {
        ("teacher-1", "direct", 1.0, "c")
    }
    assert "s3cret-key" not in Path(found["examples"]).with_suffix(".json").read_text()
    assert b"s3cret-key" not in (Path(found["run"]) / "log.jsonl").read_bytes()

    account = json.loads(questions.crrl("collect", "--select", found["run"], "keep.total=3", "--json").stdout)
    assert account["kept"] == 3 and account["filters"][-1]["filter"] == "keep.total=3"
    refused = questions.crrl("collect", "--select", found["run"], "keep.passed=true", check=False)
    assert refused.returncode == 2 and "keep.passed=true leaves none" in refused.stderr
    assert len(read_examples(Path(found["examples"]))) == 3, "the selection before stays"
    for arguments in (["eval", found["run"], "--resume"], ["collect", "--select", found["run"], "best=1"]):
        assert questions.crrl(*arguments, check=False).returncode == 2


async def test_tools_are_kept_with_the_conversation_and_broken_calls_are_left_out(questions: Project) -> None:
    calls = {"shell": '{"cmd": "echo fixed > notes.txt"}', "broken": '{"cmd": "echo', "other": "{}"}

    def reply(body: Mapping[str, Any], before: int) -> web.Response:
        names = [tool["function"]["name"] for tool in body["tools"]]
        assert "shell" in names
        results = sum(message["role"] == "tool" for message in body["messages"])
        if results == 2:
            return make_reply("done")
        kind = "shell" if results else ("shell", "broken", "other")[before // 3 % 3]
        name = "unheard_of" if kind == "other" else "shell"
        call = {"id": f"c{before}", "type": "function", "function": {"name": name, "arguments": calls[kind]}}
        return make_reply("", tool_calls=[call])

    settings = ("tasks.holdout=1", "select.n=6", "rollout.concurrency=1", "reward=patch_lines", "keep.above=-1")
    async with teacher(reply) as url:
        plans = plan_collection("handmade", url, *settings, "eval.attempts=1", output=Path("tools"))
        found = await collect_attempts(plans)
    wellformed = next(step for step in found["filters"] if step["filter"] == "well-formed tool calls")
    assert (wellformed["dropped"], wellformed["left"], found["kept"]) == (3, 2, 2)
    for example in read_examples(Path(found["examples"])):
        assert [tool["function"]["name"] for tool in example.tools][:1] == ["shell"]
        assert example.tools[0]["function"]["parameters"]["properties"]
        made_calls = [call["function"] for each in example.messages for call in each.get("tool_calls", ())]
        assert made_calls == [{"name": "shell", "arguments": calls["shell"]}] * 2


@pytest.mark.timeout(600)
async def test_our_own_engine_gives_the_tokens_that_it_sampled_whether_it_was_killed_or_not(
    project: Project, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.path)
    given = ["select.n=3", "tasks.holdout=1", "rollout.seconds=600", "keep.above=-1"]
    twice = [*given, "eval.attempts=2"]
    whole = await collect_attempts(
        plan_evaluations("mutants", twice, ["builtin:tiny"], output=Path("whole"), collects=True)
    )
    examples = read_examples(Path(whole["examples"]))
    assert len(examples) == whole["exact"] == 5 and whole["rendered"] == 0, "of six, two make the same patch"
    folder = models.find_model_folder("builtin:tiny")
    codec = tokens.load_codec(folder)
    sampled = {each.id: each.sampled for each in logged_episodes(RunFolder(Path("whole")).records())}
    whole_calls = 0
    for example in examples:
        [row] = tokens.make_conversation_rows(codec, example.messages, example.tools)
        assert codec.decode(row.ids) == codec.decode(example.ids), "messages and tools say what the ids do"
        if not any("<tool_call>" in str(each.get("content", "")) for each in example.messages):  # of a malformed call
            assert (row.ids, row.trained) == (example.ids, example.trained)
            whole_calls += 1
        assert sum(example.trained) == sampled[example.episode]
        assert example.tokenizer == tokens.digest_tokenizer(folder)
    assert whole_calls >= 3

    log = RunFolder(project.path / "killed").log
    tiny = ("collect", "mutants", *given, "--policy", "builtin:tiny", "--attempts", "2", "-o", "killed")
    with project.started(*tiny) as process:
        await wait_until(process, lambda: log.is_file() and log.read_bytes().count(b'{"type":"verdict"') >= 2)
    project.crrl("collect", "killed", "--resume")
    project.crrl(*tiny, "--resume")
    for resume in (False, True):
        [again] = plan_evaluations("mutants", given, ["builtin:tiny"], output=Path("x"), resume=resume, collects=True)
        assert again.plan.config.eval.attempts == 4, "--resume has the same default"
    assert [drop_retry_numbers(each) for each in read_examples(Path("killed") / EXAMPLES_FILE)] == [
        replace(drop_retry_numbers(each), source="killed") for each in examples
    ]
    both = select_attempts(["whole", "killed", f"whole/{EXAMPLES_FILE}", "keep.above=-1"], Path("all.parquet"))
    assert both["attempts"] == 17 and both["kept"] == len(read_examples(Path("all.parquet"))) == 5
    together = read_examples(Path("all.parquet"))
    assert len({each.episode for each in together}) == len(together), "runs call their attempts alike"
    with pytest.raises(UsageError, match="whole is named twice"):
        select_attempts(["whole", "whole"], Path("all.parquet"))
