from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.errors import RunError, UsageError
from coderepairrl.runs import RunFolder, Tail, codec, logged_episodes, open_run
from coderepairrl.runs.log import strip_checksum
from coderepairrl.runs.storage import replace_folder
from coderepairrl.types import (
    Checks,
    Command,
    Ending,
    Episode,
    Origin,
    Sampling,
    Score,
    Task,
    TokenSpan,
    ToolCall,
    Turn,
    VersionRange,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run without records."""
    folder = RunFolder(tmp_path / "run")
    folder.create("", {})
    return folder


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.binary(max_size=40), st.lists(floats, min_size=1, max_size=5), st.text(max_size=20))
def test_codec_is_exact(patch: bytes, logprobs: list[float], text: str) -> None:
    output = TokenSpan(tuple(range(len(logprobs))), Origin.POLICY, tuple(logprobs))
    turn = Turn(
        index=0,
        base=None,
        given=TokenSpan((1, 2), Origin.GIVEN),
        output=output,
        versions=(VersionRange(3, 0, len(logprobs)),),
        sampling=Sampling(stop=(text,)),
        messages=({"role": "user", "content": text},),
    )
    call = ToolCall(0, "shell", text, ok=False)
    episode = Episode("e", "t", "train", 1, "g", 0, Ending.LIMIT, "calls", turns=(turn,), tool_calls=(call,))
    episode = replace(episode, patch=patch, scores=(Score("tests", 1.0, 0.5, text),), timings={"total": 1.5})
    assert codec.restore(Episode, json.loads(json.dumps(codec.dump(episode)))) == episode
    task = Task("t", text, "python", "dir:/x", patch, Checks((Command(("true",)),), {"a": text}), difficulty=0.5)
    assert codec.restore(Task, json.loads(json.dumps(codec.dump(task)))) == task


def test_codec_refuses_unknown_fields_and_other_shapes() -> None:
    """A TypeError is damage that readers name; any other is a traceback."""
    with pytest.raises(ValueError, match="no field 'colour'"):
        codec.restore(Score, {"name": "x", "value": 1.0, "colour": "red"})
    for data in ([], "text", 5):
        with pytest.raises(TypeError, match="Episode must be an object"):
            codec.restore(Episode, data)


def test_a_log_survives_a_torn_line(run: RunFolder) -> None:
    with closing(run.writer()) as log:
        log.append("one", value=1)
    with run.log.open("ab") as file:
        file.write(b'{"type": "two", "va')
    assert [record["type"] for record in run.records()] == ["one"]
    with closing(run.writer()) as log:
        log.append("three")
    assert [record["type"] for record in run.records()] == ["one", "three"]


def test_a_changed_record_is_refused_and_one_without_a_checksum_is_of_an_older_version(run: RunFolder) -> None:
    with closing(run.writer()) as log:
        log.append("step", step=1, reward=0.25, note=',"sum":"0000000a"}')
    run.add_tasks([Task("a", "x", "c", "dir:/x", b"")])
    [record] = run.records()
    assert record["reward"] == 0.25 and "sum" not in record
    for path, read, before, after in (
        (run.log, lambda: run.writer().close(), b"0.25", b"0.75"),
        (run.log, lambda: list(run.records()), b"0.25", b"0.75"),
        (run.log, lambda: list(Tail(run.log).records("step")), b"0.25", b"0.75"),
        (run.log, lambda: list(run.records()), b',"sum":', b', "sum":'),
        (run.path / "tasks.jsonl", run.tasks, b"dir:/x", b"dir:/y"),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole.replace(before, after))
        with pytest.raises(RunError, match=rf"{path.name}:1 .*checksum"):
            read()
        path.write_bytes(strip_checksum(whole.rstrip()) + b"\n")
        read()
        path.write_bytes(whole)


def test_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    # A file size limit fails the write half way, as a full disk does.
    code = """
import resource, signal, sys
from pathlib import Path
from coderepairrl.errors import RunError
from coderepairrl.runs import Log, RunFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
run = RunFolder(Path(sys.argv[1]))
log = Log(run.log)
for append in (lambda row: log.append("line", **row), run.add_metrics):
    try:
        for number in range(100):
            append({"number": number, "filler": "x" * 100})
    except RunError as error:
        print(number, error, error.fix)
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    run = RunFolder(tmp_path)
    for line, rows in zip(result.stdout.splitlines(), (run.records(), run.metrics()), strict=True):
        assert "--resume" in line
        assert [row["number"] for row in rows] == list(range(int(line.split()[0])))


def test_tasks_are_kept_as_they_were_and_as_they_are(run: RunFolder) -> None:
    """A task that is added again is kept once, a changed one in both versions."""
    assert run.tasks() == {}
    checks = Checks((Command(("true",)),), {"f": "\udcff"})
    first = Task("a", "x\u2028", "c", "dir:/x", b"\xff", checks, created="2024-02-29")
    label = Task("b", "which?", "c", "", b"", kind="label", answer="CWE-79", repository="o/r")
    run.add_tasks([first])
    run.add_tasks([first, label])
    assert run.tasks() == {"a": first, "b": label}
    changed = replace(first, prompt="y")
    run.add_tasks([changed])
    assert run.tasks()["a"] == changed
    assert len((run.path / "tasks.jsonl").read_text().splitlines()) == 3
    run.create("", {})  # nothing was logged: that start has failed
    assert run.tasks() == {}


def test_a_torn_task_is_written_again_and_any_other_damage_is_named(run: RunFolder) -> None:
    first, second = Task("a", "x", "c", "dir:/x", b""), Task("b", "y", "c", "dir:/x", b"")
    run.add_tasks([first, second])
    path = run.path / "tasks.jsonl"
    whole = path.read_bytes()
    for end in (len(whole) - 1, len(whole) - 9, len(whole.splitlines(keepends=True)[0]) + 1):
        path.write_bytes(whole[:end])
        assert run.tasks() == {"a": first}, "as in the log, a torn line is left out"
        run.add_tasks([first, second])
        assert path.read_bytes() == whole
    for damage in (b"{}", b"null", b"5", b"[1]", b"\xff", b"", b"nonsense", b"[" * 9999, whole.split(b"\n")[0][:-5]):
        path.write_bytes(damage + b"\n" + whole)
        for read in (run.tasks, lambda: run.add_tasks([second])):
            with pytest.raises(RunError, match=r"tasks\.jsonl:1 is not a task") as refused:
                read()
            assert "from a copy" in refused.value.fix
        assert path.read_bytes() == damage + b"\n" + whole, "nothing is lost that a user might restore"


def test_run_json_has_the_versions_that_numbers_depend_on(tmp_path: Path) -> None:
    """Packages of the learner, and of the engine, which may run in another Python; a missing one is "absent"."""
    plain, served = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "served")
    plain.create("", {"name": "plain"})
    served.create("", {"name": "served"}, {"vllm": "0.32.0"})
    here, there = (json.loads((run.path / "run.json").read_text())["versions"] for run in (plain, served))
    assert {"torch", "transformers", "safetensors", "peft", "accelerate", "deepspeed", "bitsandbytes"} <= set(here)
    assert here["vllm"] == "absent" and there == here | {"vllm": "0.32.0"}
    for package in ("torch", "peft", "accelerate", "safetensors"):
        assert here[package] == metadata.version(package)


def test_episodes_are_put_together_from_the_log(run: RunFolder) -> None:
    turn = Turn(0, None, TokenSpan((1,), Origin.GIVEN), TokenSpan((2,), Origin.POLICY, (-0.5,)))
    episode = Episode("e", "t", "train", 1, "g", 0, Ending.DONE, turns=(turn,))
    with closing(run.writer()) as log:
        log.append("turn", episode="e", turn=turn)
        log.append("turn", episode="interrupted", turn=turn)
        log.append("verdict", verdict=replace(episode, turns=()))
    assert list(logged_episodes(run.records())) == [episode]
    run.write_episodes("train-00001", [episode])
    assert list(run.episodes()) == [episode]


def test_only_run_folders_of_this_schema_are_opened(run: RunFolder) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        open_run(run.path.parent)
    about = run.path / "run.json"
    whole = about.read_text()
    for schema in (1, 99):
        about.write_text(whole.replace('"schema": 3', f'"schema": {schema}'))
        with pytest.raises(UsageError, match=f"has schema {schema}, this version reads 3"):
            open_run(run.path)


def test_a_start_that_failed_before_the_first_record_is_no_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create("first = 1", {})
    run.create("second = 2", {})
    assert run.config.read_text() == "second = 2"
    with closing(run.writer()) as log:
        with pytest.raises(UsageError, match="another process"):
            run.create("third = 3", {})
        log.append("start")
    with pytest.raises(UsageError, match="already holds a run"):
        run.create("third = 3", {})
    assert run.config.read_text() == "second = 2"


def test_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(UsageError, match="other files"):
        RunFolder(tmp_path).create("theirs", {})
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_a_line_that_another_process_is_writing_is_not_torn(run: RunFolder) -> None:
    with closing(run.writer()) as log:
        log.append("start")
        with run.log.open("ab") as half:
            half.write(b'{"type":"tu')
        with pytest.raises(UsageError, match="another process"):
            run.writer()
        assert run.log.read_bytes().endswith(b'{"type":"tu')


def test_a_file_that_a_killed_export_left_is_replaced_by_a_folder_of_its_name(tmp_path: Path) -> None:
    (tmp_path / ".export.partial").write_text("half")
    with replace_folder(tmp_path / "export") as temporary:
        (temporary / "a").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "a"]
