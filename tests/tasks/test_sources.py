"""Task sources: the handmade repositories really fail and really pass; JSONL says what is wrong and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import rewards
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.errors import TaskError
from coderepairrl.protocols import TaskSource
from coderepairrl.registry import protocol_members
from coderepairrl.tasks import HandmadeSource, JsonlSource, ScriptedSource, make_source, write_jsonl
from coderepairrl.types import Checks, Command, Task
from rewards.folder import Local

HANDMADE = {task.id: task for task in HandmadeSource()}


# -- names


def test_sources_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_jsonl(HANDMADE.values(), path)
    for made in (
        make_source("handmade"),
        make_source("jsonl", path=str(path)),
        make_source(f"{__name__}:Own", count=2),
    ):
        assert protocol_members(TaskSource) <= {*dir(made)}
        made.prepare()
        assert list(made)


class Own(ScriptedSource):
    """A user's own source."""

    def __init__(self, count: int) -> None:
        super().__init__([Task(f"own/{n}", "p", "text", "dir:/", b"") for n in range(count)])


# -- handmade


def test_handmade_covers_the_shapes() -> None:
    tasks = HANDMADE.values()
    assert len(tasks) >= 6
    assert {task.split for task in tasks} == {"train", "test"}
    assert {task.language for task in tasks} >= {"python", "shell", "json"}
    patches = [rewards.parse_patch(task.reference) for task in tasks]
    assert any(len(files) == 2 for files in patches)
    assert any(not file.old for files in patches for file in files)
    assert any(b"\r\n" in line for files in patches for file in files for block in file.blocks for line in block.added)
    with pytest.raises(TaskError, match="no task of split 'dev'"):
        HandmadeSource("dev").prepare()
    assert {task.id for task in HandmadeSource("test")} | {task.id for task in HandmadeSource("train")} == set(HANDMADE)


@pytest.mark.parametrize("task", HANDMADE.values(), ids=list(HANDMADE))
async def test_a_handmade_bug_is_one_and_its_reference_repairs_it(task: Task) -> None:
    backend = Local()
    checks = await examine_task_source(ScriptedSource([task]), backend)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == 7
    judges = rewards.make_rewards({"patch_lines": 1.0, "tests": 1.0})
    repaired = await rewards.score(judges, task, rewards.with_patch(task, task.reference), backend)
    assert [score.value for score in repaired] == [1.0, 1.0]
    # What the repository ships passes on the bug, and the issue does not quote the repair.
    async with backend.open(task) as fresh:
        for command in task.checks.commands:
            result = await fresh.exec(command.argv, timeout=command.timeout)
            assert result.ok, result.output
    added = [
        line.strip() for file in rewards.parse_patch(task.reference) for block in file.blocks for line in block.added
    ]
    assert not [line for line in added if len(line) > 12 and line.decode() in task.prompt]


# -- the exam


async def test_the_exam_catches_bad_tasks() -> None:
    good = HANDMADE["handmade/pager"]

    async def failures(*tasks: Task) -> set[str]:
        return {check.name for check in await examine_task_source(ScriptedSource(tasks), Local()) if not check.ok}

    assert await failures() == {"there are tasks"}
    assert await failures(good, good) == {"ids are unique"}
    passing = replace(good, checks=Checks((Command(("true",)),)))
    assert await failures(passing) == {"handmade/pager: the checks fail on the bug"}
    failing = replace(good, checks=Checks((Command(("false",)),)))
    assert await failures(failing) == {"handmade/pager: the checks pass on the reference"}
    stale = replace(good, reference=good.reference.replace(b"self.size + 1", b"self.size + 2"))
    assert await failures(stale) == {"handmade/pager: the reference applies"}
    assert await failures(replace(good, reference=b"")) == {
        "handmade/pager: has a prompt, and a reference or an answer"
    }

    class Fickle(ScriptedSource):
        def __iter__(self) -> Any:
            self.tasks = (replace(good, id=f"{len(self.tasks)}"), *self.tasks)
            return iter(self.tasks)

    failed = {check.name for check in await examine_task_source(Fickle([good]), Local()) if not check.ok}
    assert failed == {"asking twice gives the same tasks"}


# -- jsonl

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAME = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?", fullmatch=True)
TASKS = st.builds(
    Task,
    id=TEXT.filter(bool),
    prompt=TEXT.filter(bool),
    language=TEXT,
    workspace=st.sampled_from(["image:a/b@sha256:1", "git:https://x/y.git@0123abcdef"]),
    reference=st.binary(max_size=30) | st.sampled_from([b"base64:x\n", b"a\nb\r\n", b"one line", b"\xff\n"]),
    checks=st.builds(
        Checks,
        st.lists(
            st.builds(Command, st.lists(WORD, min_size=1, max_size=3).map(tuple), st.floats(0.1, 99)),
            min_size=1,
            max_size=2,
        ).map(tuple),
        st.dictionaries(NAME, TEXT | st.binary(max_size=9).map(lambda raw: raw.decode("utf-8", "surrogateescape"))),
    ),
    environment=TEXT,
    split=TEXT.filter(bool),
    licence=TEXT,
    difficulty=st.none() | st.floats(0, 1),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TASKS, min_size=1, max_size=4, unique_by=lambda task: task.id))
def test_what_is_written_is_read_back(tmp_path: Path, tasks: list[Task]) -> None:
    path = tmp_path / "tasks.jsonl"
    write_jsonl(tasks, path)
    assert list(JsonlSource(path)) == tasks


def test_folders_below_the_file_are_written_relative(tmp_path: Path) -> None:
    (tmp_path / "repos" / "a").mkdir(parents=True)
    task = Task("a", "p", "python", f"dir:{tmp_path}/repos/a", b"")
    write_jsonl([task], tmp_path / "tasks.jsonl")
    assert json.loads((tmp_path / "tasks.jsonl").read_text())["workspace"] == "dir:repos/a"
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    tmp_path.rename(moved)
    assert [task.workspace for task in JsonlSource(moved / "tasks.jsonl")] == [f"dir:{moved}/repos/a"]
    moved.rename(tmp_path)


def line(folder: Path, **fields: Any) -> str:
    """A valid line with some fields changed; None leaves one out."""
    (folder / "repo").mkdir(exist_ok=True)
    record = {"id": "a", "prompt": "p", "language": "python", "workspace": "dir:repo", **fields}
    return json.dumps({key: value for key, value in record.items() if value is not None})


def test_the_short_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fix.patch").write_bytes(b"diff \xff\r\n")
    (tmp_path / "tasks.jsonl").write_text(
        line(tmp_path, reference="fix.patch", checks={"commands": [["true"], {"argv": ["false"], "timeout": 2}]})
        + "\n\n"
        + line(tmp_path, id="b", split="test", workspace="git:./repo@0123abc", difficulty=1)
        + "\n"
    )
    monkeypatch.chdir(tmp_path)
    first, second = JsonlSource("tasks.jsonl")
    assert first.reference == b"diff \xff\r\n"
    assert first.checks.commands == (Command(("true",)), Command(("false",), 2.0))
    assert first.workspace == f"dir:{tmp_path}/repo"
    assert second.workspace == f"git:{tmp_path}/repo@0123abc"
    assert (second.split, second.difficulty) == ("test", 1.0)
    assert [task.id for task in JsonlSource("tasks.jsonl", split="test")] == ["b"]
    with pytest.raises(TaskError, match="no task of split 'tset'") as caught:
        JsonlSource("tasks.jsonl", split="tset").prepare()
    assert "'test'" in caught.value.fix


@pytest.mark.parametrize(
    ("fields", "problem", "fix"),
    [
        ({"id": ""}, "id: ", "at least one character"),
        ({"prompt": 3}, "prompt: ", "JSON string"),
        ({"promt": "x"}, "unknown field 'promt'", "did you mean 'prompt'?"),
        ({"checks": {"command": []}}, "unknown field 'checks.command'", "did you mean 'commands'?"),
        ({"checks": {"commands": [[]]}}, "checks.commands.0.argv", ""),
        ({"checks": {"commands": [{"argv": ["a"], "timeout": 0}]}}, "checks.commands.0.timeout", "positive"),
        ({"checks": {"commands": [["a"]], "restore": {"../x": ""}}}, "'../x' is not a path", ""),
        ({"checks": {"restore": {"x": ""}}}, "restore without", "commands"),
        ({"checks": {"commands": [["a"]], "restore": {"x": "base64:?"}}}, "checks.restore.x: not base64", "base64"),
        ({"workspace": "repo"}, "workspace: write dir:PATH", ""),
        ({"workspace": "git:https://x/y@main"}, "workspace: write dir:PATH", ""),
        ({"workspace": "dir:nowhere"}, "workspace: .*nowhere is not a folder", "relative to"),
        ({"reference": "nowhere.patch"}, "reference: .*nowhere.patch: No such file", "a file that exists"),
        ({"reference": "base64:?"}, "reference: not base64", "base64"),
        ({"difficulty": float("nan")}, "difficulty: ", "finite"),
        ({"id": "first"}, "id: 'first' is already taken by line 1", "another id"),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path: Path, fields: dict[str, Any], problem: str, fix: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{line(tmp_path, id='first')}\n\n{line(tmp_path, **fields)}\n")
    with pytest.raises(TaskError, match=problem) as caught:
        JsonlSource(path).prepare()
    assert str(caught.value).startswith(f"{path}:3: ")
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", ":1: no JSON object, column 2"),
        (b"[]", ":1: a list, not an object"),
        (b'{"id": "a", "id": "b"}', ":1: 'id' twice"),
        (b"\xff\n", ":1: byte 0 is not UTF-8"),
        (b"\n\n", "has no tasks"),
        (b"[" * 100_000, ":1: JSON that cannot be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=problem) as caught:
        list(JsonlSource(path))
    assert caught.value.fix


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "missing.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TaskError, match=f"{path}: {problem}"):
            JsonlSource(path).prepare()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"reference": "a\0b"}, "reference: .*null byte"),
        ({"workspace": "dir:a\0b"}, "workspace: no NUL"),
        ({"workspace": "dir:~nobody-at-all/x"}, "workspace: .*home directory"),
        ({"checks": {"commands": [["a\0b"]]}}, "argv.0: no NUL"),
        *(
            ({"checks": {"commands": [["true"]], "restore": {name: ""}}}, "restore: ")
            for name in ("a\0b", "\ud800", ".")
        ),
    ],
)
def test_a_path_that_cannot_be_is_named(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "p", "language": "python", "workspace": "dir:.", **change}))
    with pytest.raises(TaskError, match=f"tasks.jsonl:1: .*{problem}"):
        list(JsonlSource(path))
