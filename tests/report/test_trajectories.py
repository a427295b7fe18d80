"""Exported episodes, read by other packages, agree with the log and hold no secrets."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import RunError, UsageError
from coderepairrl.report.trajectories import ExportSource, make_episode_row, write_atif
from coderepairrl.runs import RunFolder
from coderepairrl.runs.codec import text_to_bytes
from coderepairrl.stages import export
from coderepairrl.types import Ending, Episode, Fork, Origin, Score, TokenSpan, Turn, VersionRange, sequence
from needs import need

KEY = "sk-live0123456789abcdefghij"
USER = {"role": "user", "content": "It is broken \U0001f41b"}


def make_call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def make_reply(text: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def make_answer(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call_{number}"}


def make_turn(index: int, base: int | None, *messages: dict[str, Any], **more: Any) -> Turn:
    ids = tuple(range(100 * index, 100 * index + 5))
    logprobs = tuple(-0.1 - index - place / 7 for place in range(3))
    return Turn(
        index,
        base,
        TokenSpan(ids, Origin.GIVEN),
        TokenSpan(ids[:3], Origin.POLICY, logprobs),
        versions=(VersionRange(7, 0, 3),),
        messages=messages,
        tools=("shell",),
        started=1_700_000_000.0 + index,
        ended=1_700_000_000.5 + index,
        **more,
    )


def make_forked_episode() -> Episode:
    """An episode whose client rewrites the history after the second reply, and asks for a title."""
    turns = (
        make_turn(0, None, USER, make_reply("Let me see", make_call("shell", '{"cmd": "ls"}'), reasoning_content="hm")),
        make_turn(1, 0, make_answer("a.py"), make_reply("", make_call("shell", "no JSON", 1))),
        make_turn(2, None, {"role": "user", "content": "a title, please"}, make_reply("Broken")),
        make_turn(3, None, make_answer("a.py [shortened]"), make_reply("done"), fork=Fork(0, tokens=8, messages=2)),
    )
    scores = (Score("tests", 1.0, 1.0, passed=True), Score("patch_edits", 0.25, 0.0, "near"))
    return Episode(
        *("train-1", "toy/1", "train", 1, "g", 0, Ending.DONE, "submitted"),
        turns=turns, side=(2,), patch=b"diff --git a/x b/x\n\xff", scores=scores, kind="java",
    )  # fmt: skip


def make_secret_episode() -> Episode:
    login = "git clone https://me:hunter2@git.example.org/x"
    read = make_turn(0, None, USER, make_reply("\ud83d", make_call("shell", json.dumps({"cmd": login}))))
    remote = {"url": "http://10.0.0.7:8000", "model": "gpt-x"}
    turns = (read, make_turn(1, 0, make_answer(f"OPENAI_API_KEY={KEY}"), make_reply("done"), remote=remote))
    return Episode("train-2", "toy/2", "train", 1, "g", 1, Ending.DONE, turns=turns, patch=f"+{KEY}\n".encode())


def make_void_episode() -> Episode:
    fault = f"EngineFault: {KEY}"
    return Episode("train-3", "toy/3", "train", 1, "g", 2, Ending.VOID, "engine", fault, printed=KEY)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = Config.model_validate(
        {"run": {"name": "mine"}, "model": {"path": "/home/me/models/small"}, "kinds": {"java": {"agent": "direct"}}}
    )
    folder = RunFolder(tmp_path / "mine")
    folder.create(to_toml(config), {"name": "mine", "config": config.model_dump(mode="json")})
    log = folder.writer()
    for episode in (make_forked_episode(), make_secret_episode(), make_void_episode()):
        log.append("episode", id=episode.id)
        for each in episode.turns:
            log.turn(episode.id, each)
        log.append("verdict", verdict=replace(episode, turns=()))
    log.append("episode", id="train-4")
    log.turn("train-4", make_turn(0, None, USER, make_reply("still at work")))
    log.close()
    return folder.path


def load_parquet(path: Path, cache: Path) -> list[dict[str, Any]]:
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))
    return list(rows)


def load_trajectories(folder: Path) -> dict[str, Any]:
    need(importlib.util.find_spec("atif"), "needs atif (the extra dev)")
    from atif import Trajectory

    return {path.stem: Trajectory.model_validate_json(path.read_text()) for path in folder.iterdir()}


def test_a_table_of_chats_is_read_by_datasets(run: Path, tmp_path: Path) -> None:
    assert export.export_episodes(run, tmp_path / "new" / "mine.parquet", "parquet") == 3
    first, other, last = load_parquet(tmp_path / "new" / "mine.parquet", tmp_path / "cache")
    assert (first["task"], first["reward"], first["resolved"], first["step"]) == ("toy/1", 1.0, True, 1)
    assert first["patch"].startswith("base64:") and first["policy_versions"] == [7]
    assert [(each["role"], each["content"]) for each in first["messages"]] == [
        ("user", USER["content"]),
        ("assistant", "Let me see"),
        ("tool", "a.py [shortened]"),
        ("assistant", "done"),
    ]
    assert first["messages"][1]["tool_calls"] == [make_call("shell", '{"cmd": "ls"}')]
    assert first["messages"][1]["reasoning_content"] == "hm" and first["messages"][2]["tool_call_id"] == "call_0"
    rewritten, title = first["other_conversations"]
    assert (rewritten["side"], title["side"]) == (False, True)
    assert [each["content"] for each in title["messages"]] == ["a title, please", "Broken"]
    assert rewritten["messages"][-1]["tool_calls"][0]["function"]["arguments"] == "no JSON"
    assert other["messages"][1]["content"] == "?"  # half a character
    assert (last["ending"], last["reward"], last["messages"]) == ("void", None, [])


def test_trajectories_have_the_ids_of_every_reply(run: Path, tmp_path: Path) -> None:
    assert export.export_episodes(run, tmp_path / "atif", "atif") == 3
    found = load_trajectories(tmp_path / "atif")
    main, episode = found["train-1"], make_forked_episode()
    assert (main.agent.name, main.agent.model_name, main.extra["reward"]) == ("direct", "small", 1.0)
    rewritten, title = main.subagent_trajectories
    assert [step.message for step in main.steps] == [USER["content"], "Let me see", "done"]
    assert main.steps[1].observation.results[0].content == "a.py [shortened]"
    assert main.steps[1].tool_calls[0].arguments == {"cmd": "ls"}
    assert rewritten.steps[2].tool_calls[0].arguments == {"text": "no JSON"}
    sampled = {0: main.steps[1], 3: main.steps[2], 1: rewritten.steps[2], 2: title.steps[1]}
    for index, step in sampled.items():
        metrics, own = step.metrics, episode.turns[index]
        assert (*metrics.prompt_token_ids, *metrics.completion_token_ids) == sequence(episode.turns, index)
        assert tuple(metrics.completion_token_ids) == own.output.ids and tuple(metrics.logprobs) == own.output.logprobs
        assert not step.is_copied_context
    assert rewritten.steps[1].is_copied_context  # the first reply is in both: it is to be learned from once
    assert (
        found["train-3"].agent.name == "nano"
        and found["train-3"].steps == []
        and found["train-3"].extra["reward"] is None
    )


def test_no_secret_is_exported(run: Path, tmp_path: Path) -> None:
    export.export_episodes(run, tmp_path / "x.parquet", "parquet")
    export.export_episodes(run, tmp_path / "atif", "atif")
    written = json.dumps(load_parquet(tmp_path / "x.parquet", tmp_path / "cache"))
    written += "".join(path.read_text() for path in (tmp_path / "atif").iterdir())
    assert "10.0.0.7" not in written and "/home/me" not in written
    assert KEY not in written and "hunter2" not in written and "git.example.org/x" in written
    clean, leaky = (load_trajectories(tmp_path / "atif")[name] for name in ("train-1", "train-2"))
    assert clean.notes is None and "Secrets were taken out" in leaky.notes
    assert leaky.steps[2].model_name == "gpt-x"
    assert leaky.steps[1].metrics.completion_token_ids is None  # they say the same as the text


def test_no_half_written_export_is_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the middle, or kill -9; existing files stay."""
    (tmp_path / "there.parquet").write_text("mine")
    for form in ("parquet", "atif"):
        with pytest.raises(UsageError, match="already exists"):
            export.export_episodes(run, tmp_path / "there.parquet", form)  # type: ignore[arg-type]
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    (run / "log.jsonl").write_bytes(b"".join([*lines[:-2], b"{broken\n", *lines[-2:]]))
    monkeypatch.setattr("coderepairrl.runs.storage._ROWS_PER_WRITE", 1)
    for form in ("parquet", "atif"):
        with pytest.raises(RunError, match=f"log.jsonl:{len(lines) - 1} is damaged"):
            export.export_episodes(run, tmp_path / "new", form)  # type: ignore[arg-type]
        assert not (tmp_path / "new").exists()
    code = (
        "import sys, time; from pathlib import Path; from coderepairrl.report import trajectories as t\n"
        "from coderepairrl.types import Ending, Episode\n"
        "def made():\n"
        "    for number in range(10**9):\n"
        "        yield Episode(f'e{number}', 't', 'train', 1, 'g', 0, Ending.DONE)\n"
        "        if number == 300: print(flush=True); time.sleep(1000)\n"
        "if sys.argv[1] == 'parquet': t.write_parquet('run', made(), Path('killed-parquet'))\n"
        "else: t.write_atif(t.ExportSource('run', {'': 'nano'}, '1', 'model'), made(), Path('killed-atif'))\n"
    )
    for form in ("parquet", "atif"):
        with subprocess.Popen(
            [sys.executable, "-c", code, form], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "\n"
            child.send_signal(signal.SIGKILL)
        assert not (tmp_path / f"killed-{form}").exists()


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1e999, "b": -1e999}', '{"a":' * 990 + "1" + "}" * 990, '{"a": "sk-\\u006cive0123456789abcdefghij"}'],
)
def test_no_arguments_of_a_policy_break_the_file_or_carry_a_secret_into_it(arguments: str, tmp_path: Path) -> None:
    turns = (make_turn(0, None, USER, make_reply("", {**make_call("shell", arguments), "id": "\ud800"})),)
    patch = f"+{KEY}\n".encode() + b"\xff"
    episode = Episode("train-1", "toy/1", "train", 1, "g", 0, Ending.DONE, turns=turns, patch=patch)
    write_atif(ExportSource("r", {"": "nano"}, "1", "m"), [episode], tmp_path / "atif")
    text = (tmp_path / "atif/train-1.json").read_text()

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    [step] = [each for each in json.loads(text, parse_constant=refused)["steps"] if each["source"] == "agent"]
    exported = make_episode_row("r", episode)
    row = exported["messages"][-1]["tool_calls"][0]
    assert text_to_bytes(exported["patch"]) == b"+***\n\xff"
    assert KEY not in text + str(step["tool_calls"]) + row["function"]["arguments"]
    if "sk-" in arguments:
        assert json.loads(row["function"]["arguments"]) == {"a": "***"}
    assert ("sk-" in arguments) == ("completion_token_ids" not in step["metrics"])
    str(row).encode()
