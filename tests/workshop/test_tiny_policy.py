"""The tiny policy's tokenizer, demonstrations and simulation say exactly what the real agent and gateway would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest

from coderepairrl import models
from coderepairrl.agents.nano import NanoOptions
from coderepairrl.agents.tools import Tools
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, Mutant, exercise, mutants
from coderepairrl.tokens import Codec, load_codec
from coderepairrl.tokens.verify import verify_codec
from coderepairrl.types import Task
from workshop.tiny import prompt, tokenizer
from workshop.tiny.demonstrations import Habits, demonstrate, row
from workshop.tiny.workspace import Workspace

SHIPPED = models.model_folder("builtin:tiny")


@pytest.fixture(scope="session")
def pool() -> list[Mutant]:
    return list(mutants())


@cache
def shipped() -> Codec:
    return load_codec(SHIPPED)


@pytest.fixture(scope="session")
def codec() -> Codec:
    return shipped()


def exercises(pool: list[Mutant], count: int, seed: int = 0) -> list[Exercise]:
    rng = Random(seed)
    made = (exercise(rng.choice(pool), rng, rng.random() < 0.5) for _ in range(2 * count))
    return [e for e in made if e is not None][:count]


def test_the_shipped_tokenizer_is_the_one_that_the_code_makes(tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for path in tmp_path.iterdir():
        assert (SHIPPED / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_codec_is_exact_and_agrees_with_the_chat_template(codec: Codec) -> None:
    assert verify_codec(codec).forks == () and not codec.thinking
    assert codec.vocab_size < 450


def test_demonstrations_are_the_tokens_that_a_gateway_would_record(codec: Codec, pool: list[Mutant]) -> None:
    """Prompt rendered once, then recorded ids extended turn by turn: the same ids and the same mask."""
    for number, made in enumerate(exercises(pool, 20)):
        messages = demonstrate(made, Habits(), Random(number))
        ids, said = row(codec, messages)
        context = codec.render(messages[:2], prompt.TOOLS)
        mask = [False] * len(context)
        for at in range(2, len(messages), 2):
            end = next(i for i in range(len(context), len(ids)) if ids[i] in codec.stop_ids) + 1
            output = ids[len(context) : end]
            reply = codec.parse(output, context, prompt.TOOLS)
            given_call = messages[at].get("tool_calls")
            assert bool(reply.calls) == bool(given_call)
            if given_call:
                assert reply.calls[0].name == given_call[0]["function"]["name"]
            mask += [True] * len(output)
            if at + 1 < len(messages):
                added = codec.extend(context, output, messages[at + 1 : at + 2])
                assert added is not None
                context = [*context, *output, *added]
                mask += [False] * len(added)
            else:
                context = [*context, *output]
        assert context == ids and mask == said


def test_the_expert_is_as_imperfect_as_its_habits(pool: list[Mutant]) -> None:
    exact = 0
    made = exercises(pool, 400)
    for number, one in enumerate(made):
        workspace = Workspace(one.files)
        for message in demonstrate(one, Habits(), Random(number)):
            for call in message.get("tool_calls", ()):
                workspace.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        exact += workspace.files[one.path] == one.fixed
    assert 0.5 < exact / len(made) < 0.75


FILES: Mapping[str, str] = MappingProxyType(
    {"stats.py": "def mean(xs):\n    return sum(xs) / len(xs)\n", "test_stats.py": "from stats import mean\n"}
)
CALLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("shell", {"cmd": "ls"}),
    ("shell", {"cmd": "cat stats.py"}),
    ("shell", {"cmd": "cat stats"}),
    ("shell", {"cmd": "grep -n return stats.py"}),
    ("shell", {"cmd": "grep -n nothing stats.py"}),
    ("shell", {}),
    ("apply_patch", {"file_path": "stats.py", "old_content": "len(x)", "new_content": "1"}),
    ("apply_patch", {"file_path": "stats.py", "old_content": "xs", "new_content": "ys"}),
    ("apply_patch", {"file_path": "stats.py", "old_content": "sum", "new_content": "sum"}),
    ("apply_patch", {"file_path": "stat.py", "old_content": "sum", "new_content": "max"}),
    ("apply_patch", {"file_path": "stats.py", "old_content": "", "new_content": "max"}),
    ("apply_patch", {"file_path": "stats.py", "new_content": "max"}),
    ("apply_patch", {"file_path": "stats.py", "old_content": "sum(xs)", "new_content": "max(xs)"}),
    ("shell", {"cmd": "cat stats.py"}),
)


async def test_the_simulated_workspace_answers_as_nano_does(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    task = Task("t", "", "python", f"dir:{tmp_path}", b"")
    simulated = Workspace(FILES)
    async with UnsafeLocal().open(task) as sandbox:
        tools = Tools(sandbox, NanoOptions(**prompt.AGENT_OPTIONS).texts(), 2000)
        for name, arguments in CALLS:
            real = await (tools.shell(arguments, 5.0) if name == "shell" else tools.apply_patch(arguments))
            assert simulated.call(name, arguments) == real.text, (name, arguments)


def test_nano_opens_with_the_prompt_that_the_policy_knows() -> None:
    assert NanoOptions(**prompt.AGENT_OPTIONS).opening("issue") == prompt.opening("issue")
