"""Conditions of training and of evaluations: kept in the run folder, and compared before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl import config
from coderepairrl.environments.verify import digest_tree, read_fingerprint
from coderepairrl.plan import plan_run
from coderepairrl.plan.conditions import describe_conditions, list_differences, list_time_limit_warnings
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.sandbox.rootfs import image_record_path
from coderepairrl.tasks import write_jsonl
from coderepairrl.tasks.catalog import list_tasks
from coderepairrl.types import Task

SPECIFIED = 'python:{"workspace":"dir:/nowhere","python":"3.9"}'
PATCH = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
IMAGE = "image:registry.example/r/i@sha256:" + "7" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plain(tmp_path: Path) -> tuple[str, str]:
    """A workspace, and no environment."""
    (tmp_path / "a").mkdir()
    return f"dir:{tmp_path}/a", ""


def built(content: str) -> str:
    """An environment of one file, as a build leaves it; its digest."""
    folder = environment_folder(SPECIFIED)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.9.18\n")
    (folder / "lock").write_text(content)
    digest = digest_tree(folder)
    (folder / ENVIRONMENT_RECORD).write_text(json.dumps({"digest": digest, "uv": "0.9.1"}))
    return digest


def plan_of(tmp_path: Path, *overrides: str, **environments: tuple[str, str]) -> config.Config:
    """A run on a task of each split, which has that workspace and environment."""
    rows = [
        Task(split, "repair it", "python", workspace, PATCH, environment=of, split=split)
        for split, (workspace, of) in environments.items()
    ]
    write_jsonl(rows, tmp_path / "tasks.jsonl")
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "compared"\n[agent]\nname = "nano"\noptions = { system = "compact", tools = "compact" }\n'
    )
    return config.load_config(file, [f"tasks.options.path={tmp_path}/tasks.jsonl", *overrides])


def lines(chosen: config.Config) -> list[tuple[str, bool]]:
    found = describe_conditions(plan_run(chosen))
    return [(str(each), each.intended) for each in list_differences(found, found["train"], chosen)]


def test_tasks_that_allow_more_time_than_attempts_have_are_warned_of(
    tmp_path: Path, plain: tuple[str, str], isolating: None
) -> None:
    short, long = (plan_of(tmp_path, f"rollout.seconds={seconds}", train=plain, test=plain) for seconds in (60, 90))
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    lines = (json.dumps({**row, "limits": {"seconds": 90}}) + "\n" for row in rows)
    (tmp_path / "tasks.jsonl").write_text("".join(lines))
    [told] = list_time_limit_warnings(plan_run(short))
    assert told.endswith("attempts end after 60 s: rollout.seconds=90") and not list_time_limit_warnings(plan_run(long))


def test_equal_conditions_differ_in_nothing(tmp_path: Path, plain: tuple[str, str], isolating: None) -> None:
    chosen = plan_of(tmp_path, train=plain, test=plain)
    found = describe_conditions(plan_run(chosen))
    assert lines(chosen) == []
    assert found["train"] == found["eval"]
    assert found["train"]["environments"] == [
        {"kind": "sandbox", "name": "", "digest": "", "python": "", "uv": "", "tasks": 1}
    ]
    [agent], [sandbox] = found["train"]["agents"], found["train"]["sandboxes"]
    assert agent["name"] == "nano" and agent["version"].startswith("coderepairrl==") and agent["calls"] == 30
    assert sandbox["memory"] > 0


def test_intended_differences_are_listed_and_others_are_an_alarm(
    tmp_path: Path, plain: tuple[str, str], isolating: None
) -> None:
    said = plan_of(tmp_path, "eval.temperature=0.2", "eval.top_p=0.9", train=plain, test=plain)
    assert lines(said) == [
        ("evaluation eval has temperature 0.2, and training 1", True),
        ("evaluation eval has top_p 0.9, and training 1", True),
    ]
    forgotten = plan_of(tmp_path, "rollout.temperature=0.8", train=plain, test=plain)
    assert lines(forgotten) == [("evaluation eval has temperature 1, and training 0.8", False)]
    never = plan_of(
        tmp_path, "rollout.temperature=0.8", "eval.before=false", "eval.after=false", train=plain, test=plain
    )
    assert lines(never) == []
    also = plan_of(tmp_path, "eval.also={greedy={temperature=0}}", train=plain, test=plain)
    assert lines(also) == [("evaluation greedy has temperature 0, and training 1", True)]


def test_environments_of_another_kind_are_an_alarm(tmp_path: Path, plain: tuple[str, str], isolating: None) -> None:
    digest, made = built("six==1.16"), (plain[0], SPECIFIED)
    found = describe_conditions(plan_run(plan_of(tmp_path, "tasks.verify=false", train=plain, test=made)))
    name = environment_folder(SPECIFIED).name
    assert found["eval"]["environments"] == [
        {"kind": "python", "name": name, "digest": digest, "python": "3.9.18", "uv": "0.9.1", "tasks": 1}
    ]
    listed = list_tasks([Task("a", "", "python", plain[0], b"", environment=each) for each in ("", SPECIFIED)])
    assert [each["digest"] for each in listed] == ["", digest]
    [only] = list_differences(found, found["train"])
    assert str(only) == "evaluation eval has environments of kind python, and training sandbox"
    assert not only.intended


def test_the_same_environment_built_elsewhere_is_known_by_its_digest(
    tmp_path: Path, plain: tuple[str, str], isolating: None
) -> None:
    """The policy was trained on one machine, and is measured on another."""
    then, made = built("six==1.16"), (plain[0], SPECIFIED)
    there = describe_conditions(plan_run(plan_of(tmp_path, train=made)))["train"]
    now = built("six==1.17")
    here = describe_conditions(plan_run(plan_of(tmp_path, train=made, test=made)))
    [only] = list_differences(here, there)
    assert only.condition == f"environment {environment_folder(SPECIFIED).name}"
    assert (only.training, only.measured, only.intended) == (then, now, False)


def test_an_image_is_known_by_its_configuration() -> None:
    task = Task("a", "repair it", "python", IMAGE, b"")
    assert read_fingerprint(task) == ("image", IMAGE.removeprefix("image:"), "", "", "")
    record = image_record_path(IMAGE.removeprefix("image:"))
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"pinned": IMAGE.removeprefix("image:"), "id": "9" * 64}))
    assert read_fingerprint(task).digest == "9" * 64
