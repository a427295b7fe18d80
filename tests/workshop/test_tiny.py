"""How the tiny policy is made: tokenizer, demonstrations, teacher, miniature kinds, student, and its bar."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import safetensors.torch
import torch
from aiohttp.test_utils import TestServer

from coderepairrl import agents, models
from coderepairrl.agents.nano import NanoOptions
from coderepairrl.agents.tools import Tools
from coderepairrl.errors import UsageError
from coderepairrl.runs.examples import Example, read_examples
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.stages import jobs, jobs_file
from coderepairrl.tasks.jsonl import JsonlSource
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, Mutant, load_mutants, make_exercise
from coderepairrl.tasks.patches import apply_to_text, list_changed_paths
from coderepairrl.tokens import Codec, load_codec
from coderepairrl.tokens.verify import verify_codec
from coderepairrl.types import Ending, Endpoint, Episode, Score, Task
from folder_sandbox import FolderSandbox
from workshop.tiny import bar, kinds, prompt, teacher, tokenizer, warmstart
from workshop.tiny.demonstrations import Habits, demonstrate, habits, row
from workshop.tiny.prune import prune
from workshop.tiny.workspace import Workspace

SHIPPED = models.find_model_folder("builtin:tiny")


@pytest.fixture(scope="session")
def pool() -> list[Mutant]:
    return list(load_mutants())


@pytest.fixture(scope="session")
def codec() -> Codec:
    return load_codec(SHIPPED)


def draw_exercises(pool: list[Mutant], count: int, seed: int = 0) -> list[Exercise]:
    rng = Random(seed)
    drawn = (make_exercise(rng.choice(pool), rng, rng.random() < 0.5) for _ in range(2 * count))
    return [e for e in drawn if e is not None][:count]


def test_the_shipped_tokenizer_is_the_one_that_the_code_makes(tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for path in tmp_path.iterdir():
        assert (SHIPPED / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_codec_is_exact_and_agrees_with_the_chat_template(codec: Codec) -> None:
    assert verify_codec(codec).forks == () and not codec.thinking
    assert codec.vocab_size < 450


def test_demonstrations_are_the_tokens_that_a_gateway_would_record(codec: Codec, pool: list[Mutant]) -> None:
    """Prompt rendered once, then recorded ids extended turn by turn: the same ids and the same mask."""
    for number, exercise in enumerate(draw_exercises(pool, 20)):
        messages = demonstrate(exercise, Habits(), Random(number))
        ids, trained = row(codec, messages)
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
        assert context == ids and mask == trained


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
    assert NanoOptions(**prompt.AGENT_OPTIONS).build_opening("issue") == prompt.opening("issue")


def first_examples(lesson: str, count: int) -> list[Example]:
    return list(islice(warmstart.examples(lesson, SHIPPED), count))


@pytest.mark.parametrize("lesson", warmstart.LESSONS)
def test_examples_are_of_training_tasks_and_reproducible(lesson: str) -> None:
    splits = {f"mutants/{mutant.key}-{kind}": mutant.split for mutant in load_mutants() for kind in "qu"}
    drawn = first_examples(lesson, 200)
    assert {splits[each.task_id] for each in drawn} == {"train"}
    assert len({each.id for each in drawn}) == 200 and drawn[:20] == first_examples(lesson, 20)
    quoted = sum(each.task_id.endswith("q") for each in drawn) / 200
    assert abs(quoted - warmstart.LESSONS[lesson].quoted) < 0.12


def test_the_mistake_of_replacing_a_line_by_itself_is_shown_and_not_learned() -> None:
    repeats = set[int]()
    for each in first_examples("recover", 200):
        mistakes = sum(message["content"] == prompt.TEXTS.identical for message in each.messages)
        turns = sum(message["role"] == "assistant" for message in each.messages)
        learned = sum(now and not before for before, now in pairwise(each.trained))
        assert learned == turns - mistakes
        repeats.add(mistakes)
    assert repeats == {0, 1, 2}


@pytest.fixture(scope="module")
def exercises() -> list[Exercise]:
    drawn = (make_exercise(m, Random(f"{m.key}/0"), quoted) for m in load_mutants() for quoted in (True, False))
    return [each for each in drawn if each is not None]


def converse(expert: teacher.Teacher, exercise: Exercise) -> tuple[list[dict[str, Any]], Workspace]:
    """Messages of an agent and the teacher, and the agent's workspace; calls are numbered as clients do."""
    workspace, messages = Workspace(exercise.files), prompt.opening(exercise.prompt)
    while True:
        reply = dict(expert.reply(messages, prompt.TOOLS))
        messages.append(reply)
        if not reply.get("tool_calls"):
            return messages, workspace
        for at, call in enumerate(reply["tool_calls"]):
            function = call["function"]
            answer = workspace.call(function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": f"call_{at}", "content": answer})


def test_without_mistakes_it_repairs_every_task_though_several_share_their_issue(exercises: Sequence[Exercise]) -> None:
    by_issue: dict[str, list[Exercise]] = {}
    for exercise in exercises:
        by_issue.setdefault(exercise.prompt, []).append(exercise)
    shared = [exercise for same in by_issue.values() if len(same) > 1 for exercise in same]
    assert len(shared) > 500
    expert = teacher.Teacher(habits(1.0))
    for exercise in [*shared, *exercises[::20]]:
        assert converse(expert, exercise)[1].files[exercise.path] == exercise.fixed


MOVES = {
    "nano": ["shell", "shell", "shell", "apply_patch"],
    "nano4": ["bash", "view_file", "view_file", "str_replace"],
}


@pytest.mark.parametrize("scaffold", MOVES)
async def test_the_real_agent_repairs_tasks_over_http(
    tmp_path: Path, exercises: Sequence[Exercise], scaffold: str
) -> None:
    expert = teacher.Teacher(replace(habits(1.0), look_around=1.0, wrong_file=1.0))
    async with TestServer(teacher.application(expert)) as server:
        for number, exercise in enumerate(exercises[:: len(exercises) // 4]):
            root = tmp_path / str(number)
            root.mkdir()
            sandbox = FolderSandbox(root, {path: text.encode() for path, text in exercise.files.items()})
            task = Task(exercise.mutant.key, exercise.prompt, "python", f"dir:{root}", b"")
            agent = agents.make_agent(scaffold, **prompt.AGENT_OPTIONS)
            report = await agent.run(task, sandbox, Endpoint(str(server.make_url("/v1")), "none", teacher.NAME))
            assert report.exit == "submitted"
            assert [call.name for call in report.tool_calls or ()] == MOVES[scaffold]
            assert (root / exercise.path).read_text() == exercise.fixed


def test_the_teacher_refuses_an_agent_without_tools_to_edit(exercises: Sequence[Exercise]) -> None:
    with pytest.raises(UsageError, match="apply_patch, str_replace"):
        teacher.Teacher(habits(1.0)).reply(prompt.opening(exercises[0].prompt), prompt.TOOLS[:1])


IMPLEMENT_PROMPT = re.compile(r"calc\.py: write (\w)\(a, b\): (.+)\.\n```\n# MASKED: \1 function \(lines 1-2\)\n```\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "DRAWS", {"detect": 6, "repair": 2, "tools": 1, "implement": 8})
        kinds.make(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(made: Path) -> dict[str, Task]:
    return {task.id: task for kind in kinds.KINDS for task in JsonlSource(made / f"{kind}.jsonl")}


@pytest.fixture(scope="module")
def examples(made: Path) -> list[Example]:
    return [each for kind in kinds.KINDS for each in read_examples(made / f"{kind}.parquet")]


def test_no_task_is_two_of_demonstrated_trained_on_and_held_out(
    tasks: dict[str, Task], examples: list[Example]
) -> None:
    splits = Counter((task.kind, task.split) for task in tasks.values())
    assert splits.keys() == {(kind, split) for kind in kinds.KINDS for split in ("train", "test")}
    assert min(splits.values()) >= 60
    assert {name.removesuffix("-q") for name in tasks}.isdisjoint(each.task_id for each in examples)
    for kind in kinds.KINDS:
        shown = {each.task_id for each in examples if each.kind == kind}
        assert len(shown) >= 80, kind


def test_the_reference_of_a_described_function_computes_what_is_described(tasks: dict[str, Task]) -> None:
    for task in (each for each in tasks.values() if each.kind == "implement"):
        name, described = IMPLEMENT_PROMPT.fullmatch(task.prompt).groups()  # type: ignore[union-attr]
        [path] = list_changed_paths(task.reference)
        before = read_local_files(task.workspace, [path])[path]
        assert before is not None
        [formula] = [each for each in kinds.FORMULAS if each.described == described]
        assert apply_to_text(before, task.reference) == f"{formula.function(name).source}\n".encode()


ROOT = Path(__file__).parents[2]


def test_pruning_keeps_the_largest_neurons_and_changes_nothing_else(tmp_path: Path) -> None:
    prune("builtin:tiny", tmp_path / "student", neurons=96)
    before, after = (safetensors.torch.load_file(at / "model.safetensors") for at in (SHIPPED, tmp_path / "student"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." not in name)
    for layer in range(3):
        gate, up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        size = before[gate].float().norm(dim=1) * before[up].float().norm(dim=1) * before[down].float().norm(dim=0)
        kept = sorted(size.argsort(descending=True)[:96].tolist())
        assert torch.equal(after[gate], before[gate][kept]) and torch.equal(after[up], before[up][kept])
        assert torch.equal(after[down], before[down][:, kept])
    changed = [
        path.name
        for path in SHIPPED.iterdir()
        if (tmp_path / "student" / path.name).is_file()
        and path.read_bytes() != (tmp_path / "student" / path.name).read_bytes()
    ]
    assert set(changed) <= {"config.json", "model.safetensors", "SHA256SUMS"}


def test_the_jobs_that_distil_make_it_and_can_begin_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = jobs_file.read_jobs_file(str(ROOT / "examples" / "jobs" / "distil.toml"))
    student = next(job for job in file.jobs if job.name == "student")
    subprocess.run(student.command_line(), check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert json.loads((student.folder / "config.json").read_text())["intermediate_size"] == 96
    by = {"made_by": jobs.collect_inputs(student, {}), "ended": True, "port": 0}
    student.record.write_text(json.dumps(by))
    planned, problem = jobs.plan_jobs(file)
    assert problem is None and [each.state.doing for each in planned] == ["is done", *["runs"] * 7]


def episodes(seed: int, fixed: float, step: int, *, tried: float = 0.8) -> list[Episode]:
    """Attempts at 256 tasks over 32 functions: the share `tried` has a patch, of which the share `fixed` is right."""
    rng = Random(f"{seed}/{step}")
    made = []
    for at in range(256):
        patched = rng.random() < tried
        right = float(patched and rng.random() < fixed)
        made.append(
            Episode(
                f"eval-{step:05d}-{at}",
                f"mutants/m.f{at % 32}/swap-{at:04x}-{'qu'[at % 2]}",
                "eval",
                step,
                str(at),
                0,
                Ending.DONE,
                patch=b"+x\n" if patched else b"",
                scores=(Score("patch_lines", right, 0.5), Score("tests", right, 0.5)),
            )
        )
    return made


def evaluate_seeds(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> dict[str, dict[str, bar.Episodes]]:
    seeds = {
        f"seed {seed}": {
            "sampled": (episodes(seed, 0.2, 0), episodes(seed, 0.2 + gain, 1)),
            "sampled, unquoted issues": (episodes(seed + 6, 0.1, 0), episodes(seed + 6, 0.1 + unquoted, 1)),
            "greedy": (episodes(seed + 9, 0.3, 0), episodes(seed + 9, 0.3 + greedy, 1)),
        }
        for seed in range(3)
    }
    return {**seeds, "pooled": bar.pooled(list(seeds.values()))}


def missed(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> set[str]:
    return {verdict.demand for verdict in bar.judge(evaluate_seeds(gain, greedy, unquoted)) if not verdict.met}


def test_a_large_gain_in_every_seed_meets_the_bar() -> None:
    assert missed(0.5) == set()


def test_no_gain_misses_every_demand_but_the_number_of_tasks() -> None:
    demands = {verdict.demand for verdict in bar.judge(evaluate_seeds(0.0))}
    assert missed(0.0, 0.0, 0.0) == demands - {"held-out tasks"}
