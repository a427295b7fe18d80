"""A configuration becomes a plan once, with the tasks that it names, and all that is wrong is reported together."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.config import Config, load_config, shipped_configs
from coderepairrl.errors import (
    CombinedError,
    ConfigError,
    ExitCode,
    PrerequisiteError,
    TaskError,
    UsageError,
    combine_errors,
    exit_on_error,
)
from coderepairrl.plan import plan_run, resolve_evaluation
from coderepairrl.plan.tasks import draw_task_sample
from coderepairrl.stages import command
from coderepairrl.tasks import make_source
from coderepairrl.tasks.select import VerifiedTask, write_quarantine
from coderepairrl.types import Task

CONFIG = """
[run]
name = "planned"
steps = 0
[model]
path = "{model}"
[tasks]
source = "handmade"
verify = true
[reward]
patch_lines = 1.0
[eval]
before = false
after = false
split = "train"
[rollout]
tokens = 4096
turn_tokens = 64
"""


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path, miniature: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model=miniature))
    return path


def test_all_that_is_wrong_is_reported_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("model.path=Qwen/Qwen3-14B", "tasks={source='jsonl', options={path='absent.jsonl'}}", "reward=patch_line"),
        *("agent=nanoo", "engine.options.slotz=1", "train.mismatch_correction=token"),
    ]
    with pytest.raises(CombinedError) as refused:
        plan_run(load_config(file, wrong))
    problems = refused.value.problems
    assert refused.value.exit_code is ExitCode.USAGE
    named = ("nothing to correct", "Qwen3-14B", "patch_line", "nanoo", "slotz", "absent.jsonl")
    assert [sum(name in str(each) for each in problems) for name in named] == [1] * len(named)
    assert len(problems) == len(named), "what depends on a part that failed is not reported again"
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise refused.value
    assert ended.value.code == ExitCode.USAGE
    printed = capsys.readouterr().err
    assert printed.count("error: ") == len(named)
    assert "fix: did you mean 'patch_lines'?" in printed and "hf download Qwen/Qwen3-14B" in printed
    assert not (file.parent / "runs").exists()


def test_tasks_that_no_reward_follows_from_are_looked_into_too(file: Path) -> None:
    image = f"image:toy@sha256:{'0' * 64}"
    row = {"id": "toy/0", "prompt": "p", "language": "python", "workspace": image}
    Path("tasks.jsonl").write_text(json.dumps(row) + "\n")
    tasks = "tasks={source='jsonl', options={path='tasks.jsonl'}}"
    with pytest.raises(CombinedError, match=r"no one measure of all\n(.*\n)*.*task toy/0: "):
        plan_run(load_config(file, [tasks, "reward={}", "eval.split=test", "sandbox=unsafe-local"]))


def test_a_reward_that_runs_checks_pays_for_tasks_with_checks_and_measures_some(file: Path) -> None:
    row = {"id": "toy/0", "prompt": "p", "language": "python", "workspace": f"dir:{file.parent}"}
    Path("tasks.jsonl").write_text(json.dumps(row) + "\n")
    unchecked = "{source='jsonl', options={path='tasks.jsonl'}}"
    both = f"tasks={{sources=[{{source='handmade'}}, {unchecked}]}}"
    plan_run(load_config(file, [both, "reward={patch_lines=1, tests=0}"]))
    with pytest.raises(ConfigError, match="task toy/0 has no checks, which the reward tests runs"):
        plan_run(load_config(file, [both, "reward=tests"]))
    with pytest.raises(ConfigError, match="no task has checks, which tests runs"):
        plan_run(load_config(file, [f"tasks={unchecked}", "reward={patch_lines=1, tests=0}"]))


def test_one_mistake_stays_the_error_that_it_is(file: Path) -> None:
    with pytest.raises(UsageError, match=r"Qwen3-14B"):
        plan_run(load_config(file, ["model.path=Qwen/Qwen3-14B"]))
    with pytest.raises(ConfigError, match="patch_line"):
        plan_run(load_config(file, ["reward=patch_line", "eval.reward=patch_line"]))


def test_mistakes_come_before_what_the_machine_lacks() -> None:
    lacking, wrong = PrerequisiteError("no sandbox", fix="install one"), ConfigError("no reward", fix="name one")
    assert combine_errors([lacking]) is lacking
    both = combine_errors([lacking, wrong])
    assert isinstance(both, CombinedError) and both.problems == (wrong, lacking)
    assert both.exit_code is ExitCode.USAGE
    nested = combine_errors([both, TaskError("no task")])
    assert isinstance(nested, CombinedError) and [str(each) for each in nested.problems] == [
        *("no reward", "no task", "no sandbox")
    ]


@pytest.mark.parametrize(
    ("name", "why", "fix"),
    [("unsafe-local", "'image:toy-0@.*it has no images", "sandbox=bwrap"), ("bwrap", "not prepared", "tasks prepare")],
)
def test_images_that_cannot_be_opened_are_refused_before_the_run_folder(
    file: Path, name: str, why: str, fix: str, isolating: None
) -> None:
    """At most a few tasks are named; the others are counted."""
    digest = "0" * 64
    lines = [
        {"id": f"toy/{at}", "prompt": "p", "language": "python", "workspace": f"image:toy-{at}@sha256:{digest}"}
        for at in range(5)
    ]
    Path("tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config: Config = load_config(file, ["tasks={source='jsonl', options={path='tasks.jsonl'}}", f"sandbox={name}"])
    with pytest.raises(CombinedError, match=rf"task toy/0: .*{why}") as refused:
        asyncio.run(command.run_training(config, quiet=True))
    assert [type(each) for each in refused.value.problems] == [TaskError] * 4
    assert "2 more workspaces" in str(refused.value) and fix in refused.value.fix
    assert not Path("runs").exists()


def test_one_source_has_one_kind(file: Path) -> None:
    with pytest.raises(ConfigError, match="'handmade' has two kinds"):
        load_config(_several(file, "{source='handmade'}, {source='handmade', kind='b'}"))


def test_every_source_that_cannot_be_read_is_named_once(file: Path) -> None:
    absent = ", ".join(f"{{source='jsonl', options={{path='{name}.jsonl'}}}}" for name in ("one", "two"))
    with pytest.raises(CombinedError) as refused:
        plan_run(load_config(_several(file, absent)))
    assert [sum(f"{name}.jsonl" in str(each) for each in refused.value.problems) for name in ("one", "two")] == [1, 1]


def _several(file: Path, sources: str) -> Path:
    here = file.with_name("several.toml")
    here.write_text(file.read_text().replace('source = "handmade"', f"sources = [{sources}]"))
    return here


def test_a_task_is_evaluated_once(file: Path) -> None:
    """Two held-out tasks of one id would be taken for attempts at the same one."""
    row = {"prompt": "?", "language": "c", "answer": "x", "kind": "label"}
    for name in "ab":
        rows = {"id": name, **row}, {"id": "same", "split": "test", **row}
        Path(f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    both = ", ".join(f"{{source='jsonl', options={{path='{name}.jsonl'}}}}" for name in "ab")
    label = "[kinds.label]\nagent = { name = 'direct', options = { system = '' } }\nreward = 'classification'\n"
    mixed = _several(file, both)
    mixed.write_text(mixed.read_text() + label)
    with pytest.raises((TaskError, CombinedError), match="there are 2 tasks same"):
        plan_run(load_config(mixed, ["eval.split=test"]))


def test_a_dry_run_shows_what_is_known_and_all_that_is_wrong(file: Path) -> None:
    shown, problem = command.dry_run(load_config(file, ["reward=patch_line", "tasks.split=nix"]))
    assert shown["needs"]["parameters"] > 0 and "steps" not in shown
    assert isinstance(problem, CombinedError) and len(problem.problems) == 2
    _, problem = command.dry_run(load_config(file, ["engine=tyni", "tasks.split=nix"]))
    assert isinstance(problem, CombinedError) and len({*map(str, problem.problems)}) == len(problem.problems) == 2
    _, problem = command.dry_run(load_config(file, ["kinds.a.calls=2", "kinds.b.calls=2"]))
    assert str(problem) == "kinds.a: no task is of this kind\nkinds.b: no task is of this kind"
    assert problem is not None and "known: none." in problem.fix
    shown, problem = command.dry_run(load_config(file))
    assert problem is None and shown["steps"] == 0


WRONG = """
run.name = "wrong"
model.path = "nowhere"
agent = "nanoo"
sandbox = "bwrapp"
engine = "tyni"
tasks = { source = "jsonl", options = { path = "absent.jsonl" } }
reward = "patch_line"
"""
OF_ALL = ["nowhere", "tyni"]
OF_AGENTS = [*OF_ALL, "nanoo", "bwrapp"]
OF_TASKS = [*OF_AGENTS, "absent.jsonl", "patch_line"]


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.txt").touch()
    (tmp_path / "empty.md").touch()
    return path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "wrong.toml"], OF_TASKS),
        (["fix", ".", "--issue", "empty.md", "--policy", "wrong.toml"], [*OF_AGENTS, "repository", "empty.md"]),
        (["serve", "wrong.toml", "--log", "taken"], [*OF_ALL, "taken"]),
        (["serve", "nowhere", "engine=tyni", "train.lr=1"], [*OF_ALL, "train.lr"]),
        (
            ["fix", ".", "--issue", "empty.md", "--policy", "http://me:key@127.0.0.1:9/v1", "engine.options.attempt=0"],
            ["secret", "'attempt'", "repository"],
        ),
    ],
    ids=lambda each: " ".join(each[:3]) if each[0].isalpha() else "",
)
def test_a_command_reports_all_mistakes_at_once(wrong: Path, arguments: list[str], named: list[str]) -> None:
    before = sorted(wrong.parent.rglob("*"))
    done = subprocess.run([sys.executable, "-m", "coderepairrl.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == ExitCode.USAGE and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [sum(name in line for line in errors) >= 1 for name in named] == [True] * len(named), done.stderr
    assert len(errors) >= len(named) >= 3
    assert sorted(wrong.parent.rglob("*")) == before, "nothing was opened"


def test_an_evaluation_reports_all_mistakes_at_once(wrong: Path) -> None:
    with pytest.raises(CombinedError) as refused:
        resolve_evaluation("wrong.toml")
    assert [sum(name in str(each) for each in refused.value.problems) for name in OF_TASKS] == [1] * len(OF_TASKS)


OTHER_TASKS = ("tasks.source=handmade", 'eval.options={split="test"}')
KEPT = "quarantine.jsonl"


def test_full_trains_only_on_verified_tasks() -> None:
    options = f'tasks.options={{split="train", select={{quarantine="{KEPT}"}}}}'
    with pytest.raises(TaskError) as raised:  # nothing was verified
        plan_run(load_config("full", [*OTHER_TASKS, options]))
    assert KEPT in str(raised.value) and "tasks verify SOURCE --quarantine" in raised.value.fix
    tasks = list(make_source("handmade", split="train"))
    assert (
        write_quarantine(
            [VerifiedTask(tasks[0], None, "flaky"), *(VerifiedTask(task, task, "") for task in tasks[1:])], Path(KEPT)
        )
        == 1
    )
    plan = plan_run(load_config("full", [*OTHER_TASKS, options]))
    assert {task.id for task in plan.train_tasks} == {task.id for task in tasks[1:]}
    assert plan.config.tasks.verify


def test_full_pays_for_tests_alone_and_simplified_executes_nothing() -> None:
    def executes(preset: str) -> list[bool]:
        plan = plan_run(load_config(preset, OTHER_TASKS))
        return [reward.runs_checks for reward, weight in plan.kinds[""].rewards["train"] if weight]

    assert executes("full") == [True]
    assert executes("simplified") == [False]


def test_full_and_simplified_differ_only_in_what_pays() -> None:
    full, simplified = (load_config(name).model_dump(mode="json") for name in ("full", "simplified"))
    assert full["eval"] == simplified["eval"] and full["eval"]["reward"]["tests"] > 0
    assert {key for key in full if full[key] != simplified[key]} == {"run", "tasks", "reward"}
    # what the preset asks for is what its first lines say how to make
    said = shipped_configs()["full"].read_text("utf-8")
    assert f"--quarantine {full['tasks']['options']['select']['quarantine']}" in said


TASKS = [Task(f"{repository}/{at}", "Fix it.", "python", "dir:/x", b"") for repository in "ab" for at in range(50)]


def ids(tasks: tuple[Task, ...]) -> list[str]:
    return [task.id for task in tasks]


def test_a_sample_is_a_function_of_seed_and_ids() -> None:
    drawn = draw_task_sample(TASKS, 20, 0)
    assert len(set(ids(drawn))) == 20
    assert draw_task_sample(TASKS[::-1], 20, 0) == drawn, "the order of the source does not matter"
    assert draw_task_sample(TASKS, 30, 0)[:20] == drawn, "more tasks are these and others"
    assert set(ids(draw_task_sample(TASKS, 20, 1))) != set(ids(drawn))


@pytest.mark.parametrize("n", [0, 100, 101])
def test_all_tasks_are_taken_in_order_unless_fewer_are_asked_for(n: int) -> None:
    assert draw_task_sample(TASKS, n, 0) == tuple(TASKS)


def test_each_task_is_drawn_equally_often() -> None:
    """The first of a source as the last: 400 draws of 10 from 100 have 40 of each, with standard deviation 6."""
    counts = {task.id: 0 for task in TASKS}
    for seed in range(400):
        for name in ids(draw_task_sample(TASKS, 10, seed)):
            counts[name] += 1
    assert min(counts.values()) > 14 and max(counts.values()) < 66
    assert abs(sum(counts[task.id] for task in TASKS[:50]) - 2000) < 5 * 31


def test_all_evaluations_of_a_run_sample_the_same_tasks_by_its_seed() -> None:
    """Evaluations that decode differently are compared on the same tasks, which are not the source's first."""

    def held_out(seed: int, tasks: int) -> dict[str, list[str]]:
        found = plan_run(
            Config.model_validate(
                {
                    "run": {"name": "x", "seed": seed},
                    "tasks": {"source": "handmade"},
                    "agent": {"name": "direct"},
                    "eval": {"split": "train", "tasks": tasks, "also": {"greedy": {"temperature": 0}}},
                }
            )
        )
        return {name: ids(each) for name, each in found.eval_tasks.items()}

    everything = held_out(0, 0)["eval"]
    seeds = [held_out(seed, 2) for seed in range(6)]
    assert all(each["eval"] == each["greedy"] and set(each["eval"]) <= set(everything) for each in seeds)
    assert seeds[5] == held_out(5, 2)
    assert len({tuple(sorted(each["eval"])) for each in seeds}) > 1
