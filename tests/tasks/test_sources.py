"""Task sources: handmade and JSONL tasks, selections from any source, and the overlap of two sources."""

from __future__ import annotations

import compileall
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import rewards
from coderepairrl.checks.task_source import examine_task_source
from coderepairrl.errors import ConfigError, TaskError, UsageError
from coderepairrl.tasks import HandmadeSource, JsonlSource, ScriptedSource, handmade, make_source, select, write_jsonl
from coderepairrl.tasks.catalog import resolve_source
from coderepairrl.tasks.overlap import find_overlap, format_overlap
from coderepairrl.tasks.select import SelectedSource, Selection, is_held_out
from coderepairrl.types import Checks, Command, Task
from rewards.folder import Local

HANDMADE = {task.id: task for task in HandmadeSource()}


def test_compiled_modules_of_an_installation_are_not_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(handmade._FOLDER / "till", tmp_path / "till")
    assert compileall.compile_dir(tmp_path, quiet=1)
    monkeypatch.setattr(handmade, "_FOLDER", tmp_path)
    assert [task.checks for task in HandmadeSource()] == [HANDMADE["handmade/till"].checks]


# -- handmade


@pytest.mark.parametrize("task", HANDMADE.values(), ids=list(HANDMADE))
async def test_a_handmade_reference_repairs_a_bug_that_the_repository_does_not_notice(task: Task) -> None:
    backend = Local()
    checks = await examine_task_source(ScriptedSource([task]), backend)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == 7
    judges = rewards.make_rewards({"patch_lines": 1.0, "tests": 1.0})
    repaired = await rewards.score_episode(judges, task, rewards.make_patched_episode(task, task.reference), backend)
    assert [score.value for score in repaired] == [1.0, 1.0]
    # The tests in the repository pass on the bug, and the issue does not quote the repair.
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

    async def list_failures(source: ScriptedSource) -> set[str]:
        return {check.name for check in await examine_task_source(source, Local()) if not check.ok}

    assert await list_failures(ScriptedSource([])) == {"there are tasks"}
    assert await list_failures(ScriptedSource([good, good])) == {"ids are unique"}
    passing = replace(good, checks=Checks((Command(("true",)),)))
    assert await list_failures(ScriptedSource([passing])) == {"handmade/pager: the checks fail on the bug"}
    failing = replace(good, checks=Checks((Command(("false",)),)))
    assert await list_failures(ScriptedSource([failing])) == {"handmade/pager: the checks pass on the reference"}
    stale = replace(good, reference=good.reference.replace(b"self.size + 1", b"self.size + 2"))
    assert await list_failures(ScriptedSource([stale])) == {"handmade/pager: the reference applies"}
    assert await list_failures(ScriptedSource([replace(good, reference=b"")])) == {
        "handmade/pager: has a prompt, and a reference or an answer"
    }

    class Fickle(ScriptedSource):
        def __iter__(self) -> Any:
            self.tasks = (replace(good, id=f"{len(self.tasks)}"), *self.tasks)
            return iter(self.tasks)

    assert await list_failures(Fickle([good])) == {"asking twice gives the same tasks"}


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
def test_written_tasks_are_read_back(tmp_path: Path, tasks: list[Task]) -> None:
    path = tmp_path / "tasks.jsonl"
    write_jsonl(tasks, path)
    assert list(JsonlSource(path)) == tasks


def test_a_command_of_no_words_is_refused(tmp_path: Path) -> None:
    task = Task("a", "p", "python", f"dir:{tmp_path}", b"", Checks((Command(()),)))
    with pytest.raises(TaskError, match="task 'a': checks.commands.0.argv: .* at least 1 item"):
        write_jsonl([task], tmp_path / "tasks.jsonl")


def test_folders_below_the_file_are_written_relative(tmp_path: Path) -> None:
    (tmp_path / "repos" / "a").mkdir(parents=True)
    task = Task("a", "p", "python", f"dir:{tmp_path}/repos/a", b"")
    write_jsonl([task], tmp_path / "tasks.jsonl")
    assert json.loads((tmp_path / "tasks.jsonl").read_text())["workspace"] == "dir:repos/a"
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    tmp_path.rename(moved)
    assert [task.workspace for task in JsonlSource(moved / "tasks.jsonl")] == [f"dir:{moved}/repos/a"]
    moved.rename(tmp_path)


def format_line(folder: Path, **fields: Any) -> str:
    """A valid line with some fields changed; None leaves one out."""
    (folder / "repo").mkdir(exist_ok=True)
    record = {"id": "a", "prompt": "p", "language": "python", "workspace": "dir:repo", **fields}
    return json.dumps({key: value for key, value in record.items() if value is not None})


def test_short_forms_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fix.patch").write_bytes(b"diff \xff\r\n")
    judged_by_exit_code = {"argv": ["pytest", "-x"], "results": "", "test_timeout": 5}
    commands = [["python3", "-m", "pytest"], judged_by_exit_code, {"argv": ["make", "test"], "timeout": 2}]
    (tmp_path / "tasks.jsonl").write_text(
        format_line(tmp_path, reference="fix.patch", checks={"commands": commands})
        + "\n\n"
        + format_line(tmp_path, id="b", split="test", workspace="git:./repo@0123abc", difficulty=1)
        + "\n"
    )
    monkeypatch.chdir(tmp_path)
    first, second = JsonlSource("tasks.jsonl")
    assert first.reference == b"diff \xff\r\n"
    assert first.checks.commands == (
        Command(("python3", "-m", "pytest"), results="pytest"),
        Command(("pytest", "-x"), test_timeout=5.0),
        Command(("make", "test"), 2.0),
    )
    assert first.workspace == f"dir:{tmp_path}/repo"
    assert second.workspace == f"git:{tmp_path}/repo@0123abc"
    assert (second.split, second.difficulty) == ("test", 1.0)
    write_jsonl([first, second], "again.jsonl")
    assert list(JsonlSource("again.jsonl")) == [first, second]
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
        ({"reference": "a\0b"}, "reference: .*null byte", ""),
        ({"workspace": "dir:a\0b"}, "workspace: no NUL", ""),
        ({"workspace": "dir:~nobody-at-all/x"}, "workspace: .*home directory", ""),
        ({"checks": {"commands": [["a\0b"]]}}, "argv.0: no NUL", ""),
        *(
            ({"checks": {"commands": [["true"]], "restore": {name: ""}}}, "restore: ", "")
            for name in ("a\0b", "\ud800", ".")
        ),
        *(  # every patch would resolve such a task
            ({"checks": {"commands": [{"argv": ["true"], "results": rule}]}}, "no checks.fail_to_pass", "names")
            for rule in ("swebench:parse_log_pytest", "swe_smith:{}", "swe_bench_pro:")
        ),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path: Path, fields: dict[str, Any], problem: str, fix: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{format_line(tmp_path, id='first')}\n\n{format_line(tmp_path, **fields)}\n")
    with pytest.raises(TaskError, match=problem) as caught:
        JsonlSource(path).prepare()
    assert str(caught.value).startswith(f"{path}:3: ")
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", ":1: not read as JSON: Expecting property name"),
        (b"[]", ":1: a list, not an object"),
        (b'{"id": "a", "id": "b"}', ":1: not read as JSON: 'id' twice"),
        (b"\xff\n", ":1: byte 0 is not UTF-8"),
        (b"\n\n", "has no tasks"),
        (b"[" * 100_000, ":1: not read as JSON: nested too deep"),
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


LINES = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"


def make_task(number: int, **fields: Any) -> Task:
    reference = LINES.format("x.py").encode()
    made = Task(f"o__toy-{number}", f"issue {number}", "python", f"git:u@{number:040d}", reference, repository="o/toy")
    return replace(made, **{"created": f"2024-01-{number + 1:02d}", "difficulty": float(number), **fields})


TEN = [make_task(number) for number in range(10)]


def select_ids(selection: Selection, among: list[Task] = TEN) -> list[int]:
    return [int(each.id.rpartition("-")[2]) for each in selection.select_tasks(among)]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"after": "2024-01-03", "before": "2024-01-05"}, [2, 3]),
        ({"min_difficulty": 3.0, "max_difficulty": 4.0}, [3, 4]),
        ({"languages": ("python",), "n": 2}, [0, 1]),
        ({"without": ("o/toy",)}, []),
        ({"leave_out": ("o__toy-[0-7]", "nothing")}, [8, 9]),
        ({"repositories": ("o/toy",), "skip": 8}, [8, 9]),
        ({"max_prompt": 6}, []),
        ({"max_lines": 1}, []),
        ({"max_lines": 2, "max_files": 1, "max_hunks": 1}, list(range(10))),
    ],
)
def test_filters_and_counts(options: dict[str, Any], taken: list[int]) -> None:
    assert select_ids(Selection(**options)) == taken


def test_a_filter_leaves_out_tasks_without_the_filtered_property() -> None:
    bare = [replace(TEN[0], created="", difficulty=None, reference=b"")]
    for options in ({"after": "2000-01-01"}, {"max_difficulty": 9.0}, {"max_files": 5}, {"before": "2100-01-01"}):
        assert select_ids(Selection(**options), bare) == []
    assert select_ids(Selection(max_prompt=100), bare) == [0]


def test_files_and_hunks_of_the_reference_are_limited() -> None:
    two = replace(TEN[0], reference=(LINES.format("x.py") + LINES.format("y.py")).encode())
    apart = replace(TEN[1], reference=(LINES.format("x.py") + "@@ -9 +9 @@\n-a\n+b\n").encode())
    assert select_ids(Selection(max_files=1), [two, apart]) == [1]
    assert select_ids(Selection(max_hunks=1), [two, apart]) == []
    assert select_ids(Selection(max_hunks=2), [two, apart]) == [0, 1]


@given(seed=st.integers(0, 50), n=st.integers(0, 12), skip=st.integers(0, 12))
def test_a_seed_gives_one_order_and_its_parts_are_disjoint(seed: int, n: int, skip: int) -> None:
    whole, again, other = (select_ids(Selection(seed=each)) for each in (seed, seed, seed + 100))
    assert sorted(whole) == list(range(10)) and whole == again != other
    part = select_ids(Selection(seed=seed, skip=skip, n=n))
    assert part == whole[skip:][: n or None]


def test_the_holdout_is_that_of_the_original() -> None:
    """``int(md5(id), 16) / 16 ** 32 < ratio``, so that it depends on nothing but the id."""
    many = [replace(TEN[0], id=f"o__toy-{number}") for number in range(2000)]
    found = Selection(holdout=0.25, seed=3).select_tasks(many)
    for each in found:
        expected = int(hashlib.md5(each.id.encode()).hexdigest(), 16) / 16**32 < 0.25
        assert (each.split == "test") is expected is is_held_out(each.id, 0.25)
    assert 0.2 < sum(each.split == "test" for each in found) / len(found) < 0.3
    few = {each.id: each.split for each in Selection(holdout=0.25).select_tasks(many[:100])}
    assert all(few[each.id] == each.split for each in found if each.id in few)
    more = {each.id for each in Selection(holdout=0.5).select_tasks(many) if each.split == "test"}
    assert {each.id for each in found if each.split == "test"} < more


def test_any_source_takes_a_selection(tmp_path: Path) -> None:
    whole = list(make_source("handmade"))
    made = make_source("handmade", select={"n": 2, "seed": 1})
    assert isinstance(made, SelectedSource) and made.name == "handmade" and len(list(made)) == 2
    assert {each.id for each in made} < {each.id for each in whole}
    assert {each.split for each in make_source("mutants", split="test", n=3, select={"n": 2, "split": "held"})} == {
        "held"
    }
    own = f"{__name__}:TenTasks"
    assert [each.id for each in make_source(own, select={"skip": 8})] == ["o__toy-8", "o__toy-9"]


class TenTasks(ScriptedSource):
    """A user's source."""

    def __init__(self) -> None:
        super().__init__(TEN)


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ({"langauges": ["python"]}, "did you mean 'languages'"),
        ({"n": "ten"}, "select"),
        ({"n": -1}, "0 or more"),
        ({"after": "soon"}, "YYYY-MM-DD"),
        ({"holdout": 2.0}, "from 0 to 1"),
        ({"holdout": 0.5, "split": "x"}, "leave one out"),
        ("all", "select.n=100"),
    ],
)
def test_an_impossible_selection_is_refused(select: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_source("handmade", select=select)
    assert says in f"{caught.value} {caught.value.fix}"


def test_a_selection_or_a_split_without_tasks_is_an_error() -> None:
    with pytest.raises(TaskError, match="leaves none of the 8 tasks of handmade"):
        make_source("handmade", select={"languages": ["cobol"]}).prepare()
    with pytest.raises(TaskError, match="no task of split 'dev'"):
        make_source("handmade", split="dev").prepare()


# -- overlap

ISSUE = "When the parser meets an empty line it stops without reading what comes after the line, see above"


def test_overlap_by_id_issue_commit_and_patch_is_found() -> None:
    first = [
        make_task(0),
        make_task(1, prompt=ISSUE + " and below."),
        make_task(
            2, reference=(LINES.format("x.py") + "@@ -9,2 +9,2 @@\n-def f():\n-    pass\n+def g():\n+    f\n").encode()
        ),
        make_task(3),
        make_task(4),
    ]
    second = [
        replace(make_task(0), workspace="git:v@" + "9" * 40, prompt="other words here", reference=b""),
        make_task(5, prompt=ISSUE + "!", reference=b"", created="2024-01-04"),
        replace(first[2], id="o__toy-6", prompt="no", workspace="dir:/x"),
        replace(make_task(3), id="o__toy-7", prompt="nothing alike at all", reference=b""),
    ]
    found = find_overlap(first, second)
    assert found.ids == ["o__toy-0"]
    assert found.issues == [("o__toy-1", "o__toy-5")]
    assert found.commits == [("o__toy-3", "o__toy-7")] and found.places == 1
    assert found.patches == [("o__toy-2", "o__toy-6")]
    assert not found.is_disjoint and found.counts == (5, 4)
    assert found.days == (("2024-01-01", "2024-01-05"), ("2024-01-01", "2024-01-04")) and found.later == 5
    assert "1 of the first have a near-duplicate issue" in format_overlap(found, ("a", "b"))
    assert find_overlap(first[4:], second[:1]).is_disjoint


def test_lite_and_verified_share_93_ids_and_98_commits(capsys: pytest.CaptureFixture[str]) -> None:
    from coderepairrl.cli import main
    from tasks.test_benchmarks import require_data_file

    lite, verified = (require_data_file(f"swebench/swebench_{name}.jsonl.gz") for name in ("lite", "verified"))
    words = ["tasks", "overlap", "swe_bench", "swe_bench", "--json", "a.name=lite"]
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["crrl", *words, f"a.path={lite}", f"b.path={verified}"])
        main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["ids"]), found["places"], len(found["commits"])) == (93, 98, 100)
    assert len(found["issues"]) == len(found["patches"]) == 93 and not found["clean"]


def test_a_quarantine_file_removes_unreliable_tests_from_a_sound_task(tmp_path: Path) -> None:
    checks = Checks((Command(("pytest",)),), {}, ("a", "b"), ("c", "d"))
    asked, other = replace(TEN[0], checks=checks), replace(TEN[1], checks=checks)
    held = replace(asked, checks=replace(checks, fail_to_pass=("a",), pass_to_pass=("d",)))
    file = tmp_path / "apart.jsonl"
    reason = "2 runs say the same: no (b; c\u2028\x85)"
    found = [select.VerifiedTask(asked, held, reason), select.VerifiedTask(other, other, "")]
    assert select.write_quarantine(found, file) == 1
    assert select.exclude_quarantined(file, [asked, other]) == [held, other]


def test_a_source_is_recognised_by_its_name_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "rows.json").write_text('[{"instance_id": "a", "repo": "b/c"}]')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "set/one").mkdir(parents=True)
    (tmp_path / "set/one/task.toml").write_text("")
    for name, source in (("own.jsonl", "jsonl"), ("rows.json", "swe_bench"), ("set", "harbor"), ("set/one", "harbor")):
        path = str(tmp_path / name)
        assert resolve_source(path, {"select": {"n": 1}}) == (source, {"path": path, "select": {"n": 1}})
    assert resolve_source("mutants", {"n": 2}) == ("mutants", {"n": 2})
    for name, said in (("absent.jsonl", "does not exist"), ("empty.jsonl", "has no tasks"), ("none", "no folder with")):
        with pytest.raises(UsageError, match=said):
            resolve_source(str(tmp_path / name), {})
    with pytest.raises(UsageError, match="another"):
        resolve_source(str(tmp_path / "own.jsonl"), {"path": "x"})
