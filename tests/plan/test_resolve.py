"""A configuration becomes a plan once: each part is looked up once, and all that is wrong is reported together."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import registry, stages
from coderepairrl.config import Config, load_config
from coderepairrl.errors import (
    ConfigError,
    ExitCode,
    PrerequisiteError,
    Several,
    TaskError,
    UsageError,
    combine_errors,
    exit_on_error,
)
from coderepairrl.plan import plan_run

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


@pytest.fixture
def file(tmp_path: Path, miniature: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model=miniature))
    return path


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often the registry was asked for each part, by kind and name; and for its types, as ``types``."""
    asked: Counter[tuple[str, str]] = Counter()
    resolves, types = registry.resolve_class, registry.check_types

    def counted(kind: str, name: str, shipped: Mapping[str, str]) -> Any:
        asked[kind, name] += 1
        return resolves(kind, name, shipped)

    def counted_types(kind: str, name: str, *rest: Any) -> None:
        asked["types", name] += 1
        types(kind, name, *rest)

    for module in [module for name, module in sys.modules.items() if name.startswith("coderepairrl")]:
        for name, real, ours in (("resolve_class", resolves, counted), ("check_types", types, counted_types)):
            if getattr(module, name, None) is real:
                monkeypatch.setattr(module, name, ours)
    return asked


def test_each_part_is_looked_up_once(file: Path, looked_up: Counter[tuple[str, str]], isolating: None) -> None:
    """A whole run without steps: verified, begun, opened, ended."""
    asyncio.run(stages.run_training(load_config(file), quiet=True))
    parts = {("task source", "handmade"), ("agent", "nano"), ("engine", "tiny"), ("reward", "patch_lines")}
    sandbox = {key for key in looked_up if key[0] == "sandbox"}
    assert len(sandbox) == 1
    assert looked_up.keys() >= parts
    assert set(looked_up.values()) == {1}, looked_up


def test_all_that_is_wrong_is_reported_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("model.path=Qwen/Qwen3-14B", "tasks={source='jsonl', options={path='absent.jsonl'}}", "reward=patch_line"),
        *("agent=nanoo", "engine.options.slotz=1", "train.mismatch_correction=token"),
    ]
    with pytest.raises(Several) as refused:
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
    with pytest.raises(Several, match=r"no one measure of all\n(.*\n)*.*task toy/0: "):
        plan_run(load_config(file, [tasks, "reward={}", "eval.split=test", "sandbox=unsafe-local"]))


def test_one_mistake_stays_the_error_that_it_is(file: Path) -> None:
    with pytest.raises(UsageError, match=r"Qwen3-14B"):
        plan_run(load_config(file, ["model.path=Qwen/Qwen3-14B"]))
    with pytest.raises(ConfigError, match="patch_line"):
        plan_run(load_config(file, ["reward=patch_line", "eval.reward=patch_line"]))


def test_mistakes_come_before_what_the_machine_lacks() -> None:
    lacking, wrong = PrerequisiteError("no sandbox", fix="install one"), ConfigError("no reward", fix="name one")
    assert combine_errors([lacking]) is lacking
    both = combine_errors([lacking, wrong])
    assert isinstance(both, Several) and both.problems == (wrong, lacking)
    assert both.exit_code is ExitCode.USAGE
    nested = combine_errors([both, TaskError("no task")])
    assert isinstance(nested, Several) and [str(each) for each in nested.problems] == [
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
    with pytest.raises(Several, match=rf"task toy/0: .*{why}") as refused:
        asyncio.run(stages.run_training(config, quiet=True))
    assert [type(each) for each in refused.value.problems] == [TaskError] * 4
    assert "2 more workspaces" in str(refused.value) and fix in refused.value.fix
    assert not Path("runs").exists()


def test_one_source_has_one_kind(file: Path) -> None:
    with pytest.raises(ConfigError, match="'handmade' has two kinds"):
        load_config(_several(file, "{source='handmade'}, {source='handmade', kind='b'}"))


def test_every_source_that_cannot_be_read_is_named_and_tried_once(file: Path, looked_up: Counter[Any]) -> None:
    absent = ", ".join(f"{{source='jsonl', options={{path='{name}.jsonl'}}}}" for name in ("one", "two"))
    with pytest.raises(Several) as refused:
        plan_run(load_config(_several(file, absent)))
    assert [sum(f"{name}.jsonl" in str(each) for each in refused.value.problems) for name in ("one", "two")] == [1, 1]
    assert looked_up["task source", "jsonl"] == 2, "for training and evaluation"


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
    with pytest.raises((TaskError, Several), match="there are 2 tasks same"):
        plan_run(load_config(mixed, ["eval.split=test"]))


def test_a_dry_run_shows_what_is_known_and_all_that_is_wrong(file: Path) -> None:
    shown, problem = stages.dry_run(load_config(file, ["reward=patch_line", "tasks.split=nix"]))
    assert shown["needs"]["parameters"] > 0 and "steps" not in shown
    assert isinstance(problem, Several) and len(problem.problems) == 2
    _, problem = stages.dry_run(load_config(file, ["engine=tyni", "tasks.split=nix"]))
    assert isinstance(problem, Several) and len({*map(str, problem.problems)}) == len(problem.problems) == 2
    shown, problem = stages.dry_run(load_config(file))
    assert problem is None and shown["steps"] == 0
