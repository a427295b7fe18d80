"""At any time, a `Follower` has yielded the records that a plain reading of the log yields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl.errors import RunError
from coderepairrl.runs import logged_episodes
from coderepairrl.runs.log import Follower, read_records
from report.runs import RunMaker


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RunMaker(tmp_path_factory.mktemp("runs") / "run").run(2, evaluations=(0, 2)).folder.log


def test_a_follower_reads_what_the_log_holds(log: Path) -> None:
    follower = Follower(log)
    records = list(follower.records())
    whole = list(read_records(log))
    assert [record["type"] for record in records] == [record["type"] for record in whole]
    assert [each for each in records if each["type"] != "turn"] == [each for each in whole if each["type"] != "turn"]
    for episode in logged_episodes(read_records(log)):
        assert follower.episode(episode.id) == episode
        turns = [each for each in records if each["type"] == "turn" and each["episode"] == episode.id]
        assert sum(each["sampled"] for each in turns) == episode.sampled
    assert list(follower.records()) == []


@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_a_log_that_grows_is_read_once_and_whole(log: Path, tmp_path: Path, size: int) -> None:
    data = log.read_bytes()[: 3000 if size == 1 else None]
    growing = tmp_path / "log.jsonl"
    follower = Follower(growing)
    assert list(follower.records()) == [], "a run that has not begun has no log"
    records = []
    with growing.open("ab") as file:
        for at in range(0, len(data), size):
            file.write(data[at : at + size])
            file.flush()
            records += list(follower.records())
    assert records == list(Follower(growing).records()) and not follower.notice


def test_other_spacing_and_a_second_try_are_read(log: Path, tmp_path: Path) -> None:
    spaced = tmp_path / "log.jsonl"
    spaced.write_text("".join(json.dumps(record) + "\n" for record in [*read_records(log), *read_records(log)]))
    follower, once = Follower(spaced), Follower(log)
    assert list(follower.records()) == [*once.records(), *Follower(log).records()]
    for episode in logged_episodes(read_records(log)):
        assert follower.episode(episode.id) == episode, "only the last try of a repeated episode"


def test_turns_are_there_before_the_verdict(log: Path, tmp_path: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if line.startswith(b'{"type":"verdict"'))
    half = tmp_path / "log.jsonl"
    half.write_bytes(b"".join(lines[:end]))
    follower = Follower(half)
    name = [record["episode"] for record in follower.records() if record["type"] == "turn"][-1]
    assert follower.episode(name) is None and follower.verdict(name) is None
    assert [turn.index for turn in follower.turns(name)] == list(range(len(follower.turns(name)))) != []


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b"{}\n", b'{"type":"verdict"}\n', b'{"type":"turn","turn":3}\n'])
def test_reading_ends_at_damage_with_a_notice(log: Path, tmp_path: Path, line: bytes) -> None:
    head = log.read_bytes().splitlines(keepends=True)[:5]
    broken = tmp_path / "log.jsonl"
    broken.write_bytes(b"".join([*head, line, *head]))
    follower = Follower(broken)
    assert len(list(follower.records())) == 5
    assert "damaged at line 6" in follower.notice
    assert list(follower.records()) == []


def test_a_changed_turn_is_reported(log: Path, tmp_path: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    number = next(at for at, line in enumerate(lines, 1) if line.startswith(b'{"type":"turn"'))
    edited = tmp_path / "log.jsonl"
    changed = lines[number - 1].replace(b'"ids":[', b'"ids":[7,', 1)
    edited.write_bytes(b"".join([*lines[: number - 1], changed, *lines[number:]]))
    follower = Follower(edited)
    assert len(list(follower.records())) == number - 1
    assert f"line {number}" in follower.notice and "checksum" in follower.notice


def test_a_replaced_log_is_a_run_error(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "log.jsonl"
    copy.write_bytes(log.read_bytes())
    follower = Follower(copy)
    name = next(record["episode"] for record in follower.records() if record["type"] == "turn")
    copy.write_bytes(b"short\n")
    with pytest.raises(RunError, match="has changed"):
        follower.turns(name)


def test_text_is_found_whatever_its_case_and_signs(log: Path, tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "run")
    maker.start()
    first = maker.attempt("g", 0, "train", 1, "t")
    about = {"phase": "train", "step": 1, "group": "g", "attempt": 0, "ending": "done"}
    verdict = {"id": first.id, "task_id": "t", **about, "printed": 'Größe "x"\nKeyError'}
    maker.record("verdict", verdict=verdict)
    maker.attempt("h", 0, "train", 1, "t")
    maker.log.close()
    follower = Follower(maker.folder.log)
    list(follower.records())
    assert follower.search('"X"\nkeyerror') == [first.id] == follower.search("größe")
    assert follower.search("nowhere") == []
