"""Every reward of the thesis, its draft and its relatives, against values worked out by hand from the formulas."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.config import load_config
from coderepairrl.errors import ConfigError, RewardFault, TaskError
from coderepairrl.plan.terms import check_names
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards import PRESETS, SHIPPED, make_patched_episode, make_reward, make_rewards
from coderepairrl.rewards.hybrid import HybridReward
from coderepairrl.rewards.swe_rl import _parse_blocks
from coderepairrl.rewards.thesis import (
    _PERFECT_BLOCK,
    _TOLERANT_BLOCK,
    _has_in_order,
    extract_fenced_text,
    read_blocks,
    score_block_format,
)
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import (
    Checks,
    Command,
    Ending,
    Episode,
    Origin,
    Score,
    Task,
    TokenSpan,
    ToolCall,
    Turn,
)
from rewards.folder import Local, Repository

SOURCE = b'''"""Sums."""

TOTAL = 0


class Sums:
    def add(self, a, b):
        return a - b

    def mul(self, a, b):
        return a * b


def last():
    return TOTAL
'''
FIXED = SOURCE.replace(b"a - b", b"a + b")
CHECK = Checks(
    (Command(("python3", "check.py")),), {"check.py": "from sums import Sums\nassert Sums().add(2, 3) == 5\n"}
)


@pytest.fixture
def task(repository: Repository) -> Task:
    return repository.task({"sums.py": SOURCE, "a.txt": "one\ntwo\n"}, {"sums.py": FIXED}, CHECK)


def swapped(repository: Repository, old: str, new: str) -> bytes:
    """The patch that makes `new` of the text `old`."""
    return repository.edit({"sums.py": SOURCE.replace(old.encode(), new.encode())})


async def value(name: str, task: Task, episode: Episode | bytes, backend: SandboxBackend) -> Score:
    [(reward, _)] = make_rewards(name)
    return await reward(task, episode if isinstance(episode, Episode) else make_patched_episode(task, episode), backend)


def make_replies(task: Task, *replies: str, thought: str = "", calls: Sequence[ToolCall] = ()) -> Episode:
    """An episode whose model said `replies`."""
    turns = []
    for at, reply in enumerate(replies):
        message = {"role": "assistant", "content": reply} | ({"reasoning_content": thought} if thought else {})
        span = TokenSpan((1,) * 500, Origin.POLICY, (-0.1,) * 500)
        turns.append(Turn(at, None, TokenSpan((1,), Origin.GIVEN), span, messages=(message,), started=0.0, ended=30.0))
    return Episode("e", task.id, "train", 0, "g", 0, Ending.DONE, turns=tuple(turns), tool_calls=tuple(calls))


async def test_rewards_for_the_right_files_and_functions(task: Task, repository: Repository, backend: Local) -> None:
    patches = {
        "reference": task.reference,
        "other function": swapped(repository, "a * b", "a / b"),
        "header": swapped(repository, "TOTAL = 0", "TOTAL = 1"),
        "inserted": swapped(repository, "        return a - b\n", "        return a - b\n        pass\n"),
        "wide": repository.edit({"sums.py": FIXED, "a.txt": "three\n", "b.txt": "x\n"}),
        "same function": swapped(repository, "a - b", "None"),
        "elsewhere": swapped(repository, "return TOTAL", "return None"),
        "other file": repository.edit({"a.txt": "x\n"}),
        "nothing": b"",
        "no diff": b"I fixed it\n",
    }
    for name, expected in {
        "file_match": {"reference": 1.0, "other function": 1.0, "wide": 1 / 3},
        "function_match": {"reference": 1.0, "inserted": 1.0, "other function": 0.0, "header": 0.0, "wide": 1 / 3},
        # one of two changed lines is the same in the same function
        "draft_similarity": {"reference": 1.0, "same function": 0.5, "elsewhere": 0.1, "other file": 0.0},
        "nano_similarity": {"wide": 1.0},  # the known weakness
    }.items():
        for which, earned in (expected | {"nothing": 0.0, "no diff": 0.0}).items():
            found = await value(name, task, patches[which], backend)
            assert found.value == pytest.approx(earned), (name, which)
    for name in ("file_match", "nano_similarity"):
        assert make_rewards(name)[0][0].compare(b"", b"") == 1.0


async def test_patches_of_tests_are_compared_with_the_tests(task: Task, repository: Repository, backend: Local) -> None:
    tests = repository.edit({"check.py": CHECK.restore["check.py"].encode()})
    assert (await value("test_patch_similarity", task, tests, backend)).value > 0.8  # blob hashes may be abbreviated
    assert (await value("test_patch_similarity", task, task.reference, backend)).value == 0.0
    with pytest.raises(TaskError, match="names no test files"):
        await value("test_patch_similarity", replace(task, checks=Checks()), tests, backend)


GOOD = "<think>\nhm\n</think>\n<answer>\nCWE-79\n</answer>"


FORMATS = {
    GOOD: (1.0, 1.0, 1.0),
    GOOD + "x" * 100: (0.9, 0.0, 1.0),
    f"abc{GOOD}": (0.997, 0.0, 1.0),
    GOOD.replace("CWE-79", "two\nlines"): (1.0, 0.0, 0.0),
    "<answer>CWE-79": (0.0, 0.0, 1.0),
    "<answer>CWE-20</answer>": (0.0, 0.0, 0.0),
    "CWE-79": (0.0, 0.0, 0.0),
    GOOD + "x" * 2000: (0.0, 0.0, 1.0),
}
"""What a reply earns by its format, strictly, and by its label."""


async def test_formats_and_labels(task: Task, backend: Local) -> None:
    detection = replace(task, answer="CWE-79")
    names = ("reasoning_format", "reasoning_format_strict", "classification")
    for reply, earned in FORMATS.items():
        found = [(await value(name, detection, make_replies(task, "first", reply), backend)).value for name in names]
        assert found == pytest.approx(earned), reply
    episode = make_replies(task, "<answer>\nCWE-79\n</answer>", thought="hm")  # which is parsed, and put back
    assert (await value("reasoning_format_strict", task, episode, backend)).value == 1.0
    assert (await value("reasoning_format", task, b"", backend)) == Score("reasoning_format", 0.0, note="no reply")
    with pytest.raises(TaskError, match="no label"):
        await value("classification", task, episode, backend)


def block(search: str, new: str) -> str:
    return f"<<<<<<< SEARCH\n{search}\n=======\n{new}\n>>>>>>> REPLACE"


def test_blocks_are_read() -> None:
    text = block("a\n\n  b", "") + "\n\n" + block("c", "=======\nd").replace("<<<<<<<", "<<<")
    assert read_blocks(text) == [(("a", "", "  b"), ("",)), (("c",), ("=======", "d"))]
    assert read_blocks("<<<<<<< SEARCH\na\n=======\n") == []
    for text, expected in {
        "": 0.0,
        "garbage": 0.0,
        block("a", "b"): 1.0,
        block("a\n\nb", "c"): 1.0,
        "<<<<<<< SEARCH\na\n=======\nb\n": 0.45,  # no REPLACE .4, "text" behind SEARCH .05, its end cut short .1
        block("a", "b").replace("<<<<<<<", "<<<"): 0.75,
        block("a", "b") + "\n\n" + block("c", "d"): 0.8,
    }.items():
        assert score_block_format(text) == pytest.approx(expected), text


OLD_PERFECT = re.compile(r"<<<<<<< SEARCH\n.*?\n=======\n.*?\n>>>>>>> REPLACE", re.DOTALL)
OLD_PRIMARY = re.compile(r"<<<+\s*SEARCH\s*>*\n.*?\n=+\n.*?\n>>>+\s*REPLACE\s*<*", re.DOTALL)
OLD_FENCE = re.compile(r"```.*?\n(.*?)```", re.DOTALL)
OLD_BLOCK = re.compile(
    r"```.*?\n### (?P<path>.*)\n<<<<<<< SEARCH\n(?P<search>(?s:.*?))"
    r"\n=======\n(?P<replace>(?s:.*?))\n>>>>>>> REPLACE\n```"
)
PIECES = (
    *("```", "\n", "### a", " ", "x", "<", ">>>", "======="),
    *("<<<<<<< SEARCH", "<<< SEARCH", "SEARCH", ">>>>>>> REPLACE"),
)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_readers_in_linear_time_read_what_plain_patterns_do(text: str) -> None:
    assert _has_in_order(text, _PERFECT_BLOCK) == bool(OLD_PERFECT.search(text))
    assert _has_in_order(text, _TOLERANT_BLOCK) == bool(OLD_PRIMARY.search(text))
    found = OLD_FENCE.search(text)
    assert extract_fenced_text(text) == (found[1] if found else text)
    assert list(_parse_blocks(text)) == [match.group("path", "search", "replace") for match in OLD_BLOCK.finditer(text)]


FLOODS = ("```\n### a\n<<<<<<< SEARCH\nx\n=======\n", "<<<<<<< SEARCH\n", "\n=======\n", "<< SEARCH ")


@pytest.mark.parametrize("flood", FLOODS)
async def test_no_reply_keeps_a_reward_busy(task: Task, backend: Local, flood: str) -> None:
    """Twenty thousand repetitions: what tries every way takes hours, and would hold up all episodes."""
    text = flood * 20_000
    began = time.process_time()
    for body in (text, f"<<< SEARCH{text}x", f"<<<<<<< SEARCH\n{text}REPLACE"):
        score_block_format(body)
        for name in ("swe_rl", "search_replace_format", "search_replace_similarity"):
            reply = f"<think>hm</think>\n<solution>\n{body}\n</solution>\n<answer>\n{body}\n</answer>"
            await value(name, task, make_replies(task, reply), backend)
    assert time.process_time() - began < 5


async def test_edits_that_multiply_a_file_or_make_one_that_cannot_be_are_refused(task: Task, backend: Local) -> None:
    """Each block replaces every line's beginning by two: thirty of them would fill the memory."""
    blocks = "\n".join(f"```\n### sums.py\n{block('', chr(10))}\n```" for _ in range(40))
    reply = f"<think>hm</think>\n<solution>\n{blocks}\n</solution>"
    score = await value("swe_rl", task, make_replies(task, reply), backend)
    assert score.value == -1.0 and "too large" in score.note
    for path in ("a\0b", "x" * 300, "n/" * 2100):
        assert (await value("swe_rl", task, make_replies(task, solution(path, "x", "y")), backend)).value == -1.0


async def test_block_similarity(task: Task, backend: Local) -> None:
    judged = replace(task, reference=block("a\n\nb", "c").encode())

    async def similar(text: str, of: Task = judged) -> float:
        reply = f"<think>\nx\n</think>\n<answer>\n```\n{text}\n```\n</answer>"
        return (await value("search_replace_similarity", of, make_replies(task, reply), backend)).value

    assert await similar(block("a\n\nb", "c")) == 1.0
    assert await similar("garbage") == await similar("") == 0.0
    assert await similar(block("a\n\nb", "x")) == 0.5
    assert await similar(block("a\n\nb", "c") + "\n" + block("more", "lines")) == 0.5
    lines = task.reference.decode().splitlines()
    hunk = "\n".join(line[1:] for line in lines if line[:1] in " -" and not line.startswith("---"))
    assert await similar(block(hunk, hunk.replace("a - b", "a + b")), task) == 1.0
    with pytest.raises(TaskError, match="reference"):
        await similar(block("a", "b"), replace(task, reference=b"garbage"))


def solution(path: str, search: str, new: str) -> str:
    return f"<think>hm</think>\n<solution>\n```python\n### {path}\n{block(search, new)}\n```\n</solution>"


async def test_swe_rl(task: Task, backend: Local) -> None:
    old, good = "        return a - b", "        return a + b"

    async def reward(reply: str) -> Score:
        return await value("swe_rl", task, make_replies(task, reply), backend)

    assert await reward(solution("sums.py", old, good)) == Score("swe_rl", 1.0)
    near = (await reward(solution("sums.py", old, "        return b - a"))).value
    hunks = ["\n".join(task.reference.decode().splitlines()[4:])]
    hunks.append(hunks[0].replace("a + b", "b - a"))
    assert near == pytest.approx(difflib.SequenceMatcher(None, *reversed(hunks), autojunk=False).ratio(), abs=0.05)
    assert (await reward(solution("a.txt", "one", "1"))).value == 0.0
    for reply, why in [
        (solution("sums.py", old, old), "by the same text"),
        (solution("sums.py", "return a - b", good), "not there"),  # not from the start of a line
        (solution("none.py", "x", "y"), "not there"),
        (solution("sums.py", old, good).replace("hm", " "), "thought is empty"),
        (solution("sums.py", old, good) + "<think>", "<think> occurs 2 times"),
        ("<think>x</think><solution>none</solution>", "no search/replace block"),
        ("", "<think> occurs 0 times"),
    ]:
        found = await reward(reply)
        assert found.value == -1.0
        assert why in found.note


async def test_build_pays_where_every_changed_file_parses(task: Task, repository: Repository, backend: Local) -> None:
    broken = swapped(repository, "return a - b", "return a +")
    data = repository.edit({"a.json": "{", "a.txt": "free text {\n"})
    loud = repository.edit({"sums.py": "raise SystemExit('not run')\n"})
    for patch, expected in [(task.reference, 1.0), (broken, 0.0), (data, 0.0), (loud, 1.0), (b"", 0.0), (b"no\n", 0.0)]:
        found = await value("build", task, patch, backend)
        assert found.value == expected
        assert bool(found.note) == (expected == 0.0)


async def test_large_patches_and_slow_parsers_are_scored(
    task: Task, backend: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coderepairrl.rewards.hybrid._SECONDS", 0.0)
    assert (await value("build", task, task.reference, backend)).note == "the changed files are not parsed within 0 s"
    monkeypatch.setattr("coderepairrl.rewards.text.LARGEST_PATCH", 10)
    for name in ("build", "function_match", "patch_lines"):
        assert await value(name, task, task.reference, backend) == Score(name, 0.0, note="a patch of 0 MiB")


async def test_a_missing_checker_is_a_fault(task: Task, repository: Repository) -> None:
    """But for that of a language which the task has not: an agent could cause a fault by adding such a file."""
    with pytest.raises(RewardFault, match="there is no python3") as caught:
        await value("build", task, task.reference, ScriptedBackend({}, {"git": b""}))
    assert "install python3" in caught.value.fix
    added = repository.edit({"sums.py": FIXED, "x.php": "<?php echo 1;\n"})
    assert (await value("build", task, added, ScriptedBackend({}, {"git": b"", "python3": b""}))).value == 1.0


async def test_hybrid_tests_whole_groups(task: Task, repository: Repository, backend: Local) -> None:
    other = swapped(repository, "a - b", "sum((a, b))")
    hybrid = HybridReward()
    groups = [replace(make_patched_episode(task, other), group=f"g{n}", attempt=n % 3) for n in range(400)]
    tested = [hybrid.is_tested(episode) for episode in groups]
    assert 60 < sum(tested) < 140
    assert [hybrid.is_tested(replace(episode, attempt=9)) for episode in groups] == tested
    similar = (await value("patch_edits", task, other, backend)).value
    drawn, left = groups[tested.index(True)], groups[tested.index(False)]
    assert (await hybrid(task, left, backend)).value == similar < 0.5
    assert not backend.opened
    assert (await hybrid(task, drawn, backend)).value == (similar + 1) / 2
    assert len(backend.opened) == 1


async def test_a_failing_call_is_repeated_while_nothing_new_succeeds(task: Task, backend: Local) -> None:
    for calls, count in {
        "": 0,
        "a- a-": 1,
        "a- b- a- b- a-": 3,
        "cat+ a- cat+ a- cat+ a-": 2,  # what has been read before is no progress
        "test- edit+ test-": 0,
        "test- edit+ test- edit+ test-": 1,  # the same edit twice changes nothing new
        "a+ a+ a+": 0,
    }.items():
        made = [ToolCall(0, "shell", word[:-1], word[-1] == "+") for word in calls.split()]
        assert (await value("repeats", task, make_replies(task, calls=made), backend)).value == -count, calls


async def test_length_and_time_are_costs(task: Task, backend: Local) -> None:
    episode = make_replies(task, "one", "two", calls=[ToolCall(0, "shell", "{}", True, seconds=60.0)])
    assert [(await value(name, task, episode, backend)).value for name in ("length", "time")] == [-1.0, -2.0]


def shell(*commands: str) -> list[ToolCall]:
    """Calls of a shell; a command that begins with ! failed."""
    return [ToolCall(0, "shell", json.dumps({"cmd": c.lstrip("!")}), not c.startswith("!")) for c in commands]


def make_tool_episode(task: Task, *turns: Sequence[ToolCall], printed: Sequence[Sequence[tuple[str, str]]]) -> Episode:
    """An episode of replies with tool calls, and what came back for each of them: (id, output).

    The ids are ``call_POSITION``: no two of a reply are the same, and those of two replies are.
    """
    made, calls = [], list[ToolCall]()
    results: Sequence[tuple[str, str]] = ()
    for at, (asked, coming) in enumerate(zip((*turns, ()), (*printed, ()), strict=True)):
        tool_calls = [
            {"id": f"call_{n}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for n, call in enumerate(asked)
        ]
        reply = {"role": "assistant", "content": "", **({"tool_calls": tool_calls} if tool_calls else {})}
        heard = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
        span = TokenSpan((1,), Origin.POLICY, (-0.1,))
        made.append(Turn(at, at - 1 if at else None, TokenSpan((1,), Origin.GIVEN), span, messages=(*heard, reply)))
        calls += [replace(call, turn=at) for call in asked if call.seconds >= 0]
        results = coming
    return Episode("e", task.id, "train", 0, "g", 0, Ending.DONE, turns=tuple(made), tool_calls=tuple(calls))


def never_ran(call: ToolCall) -> ToolCall:
    """One that was refused: it has an answer, and is not in the report."""
    return replace(call, seconds=-1.0)


async def test_commands_are_scored_as_habits_and_exploration(task: Task, backend: Local) -> None:
    for commands, printed, *expected in (
        ([], [], 0.0, 0.0),
        (["ls", "grep -n x .", "head a.py"], ["", "src/a.py:1", ""], 1.0, 0.15),
        (["rg x", "sed -n 1,5p src/a.py"], ["src/a.py"], 0.4, 0.25),
        (["!ls", "!ls"], [], 0.0, 0.0),
        (["ls", "ls"], ["", "... truncated"], 0.3, 0.0),
        (["find . -name x", "cat", "sed -n '1,5p' a"], [], 0.7, 0.2),
        (["a", "b", "c", "!d", "e", "!f"], [], 0.0, 0.2 * 4 / 6),
    ):
        episode = make_tool_episode(
            task, shell(*commands), printed=[[(f"call_{at}", text) for at, text in enumerate(printed)]]
        )
        names = ("terminal_habits", "exploration_depth")
        assert [(await value(name, task, episode, backend)).value for name in names] == pytest.approx(expected), (
            commands
        )


SEARCH, READ, OTHER = shell("grep -n x .", "sed -n 1,5p src/a.py", "cat b")
FOUND, NOTHING = "src/a.py:1", "b is empty"
CHAINED, UNCHAINED = 0.25, 0.2 + 0.15
"""Depth where the search printed the path that is read later, and where it printed another text."""


async def test_outputs_belong_to_the_calls_whose_ids_they_name(task: Task, backend: Local) -> None:
    """Not to those at the same place: agents answer out of order, refuse calls, and end before an answer."""
    for name, (turns, printed, depth) in {
        "second first": ([[SEARCH, OTHER], [READ]], [[("call_1", NOTHING), ("call_0", FOUND)], []], CHAINED),
        "also second first": ([[OTHER, SEARCH], [READ]], [[("call_1", FOUND), ("call_0", NOTHING)], []], CHAINED),
        "of another": ([[OTHER, SEARCH], [READ]], [[("call_0", FOUND), ("call_1", NOTHING)], []], UNCHAINED),
        "first missing": ([[OTHER, SEARCH], [READ]], [[("call_1", FOUND)], []], CHAINED),
        "own missing": ([[SEARCH, OTHER], [READ]], [[("call_1", FOUND)], []], UNCHAINED),
        "refused": ([[never_ran(OTHER), SEARCH], [READ]], [[("call_0", NOTHING), ("call_1", FOUND)], []], CHAINED),
        "id twice": ([[SEARCH], [OTHER], [READ]], [[("call_0", FOUND)], [("call_0", NOTHING)], []], CHAINED),
        "id twice, other": ([[OTHER], [SEARCH], [READ]], [[("call_0", FOUND)], [("call_0", NOTHING)], []], UNCHAINED),
    }.items():
        episode = make_tool_episode(task, *turns, printed=printed)
        assert (await value("exploration_depth", task, episode, backend)).value == pytest.approx(depth), name


def test_names_for_several_rewards() -> None:
    """The original's weights; a preset is named like a reward, alone or with others."""
    repair = {"reasoning_format": 0.1, "reasoning_format_strict": 0.2, "search_replace_format": 0.3}
    repair["search_replace_similarity"] = 0.4
    assert {reward.name: weight for reward, weight in make_rewards("thesis_repair")} == repair
    half = make_rewards({"thesis_detection": 0.5, "tests": 0.5})
    weights = {"reasoning_format": 0.05, "reasoning_format_strict": 0.1, "classification": 0.35, "tests": 0.5}
    assert {reward.name: weight for reward, weight in half} == weights
    assert not set(PRESETS) & set(SHIPPED)
    with pytest.raises(ConfigError, match="two rewards share a name"):
        make_rewards({"thesis_detection": 0.5, "thesis_repair": 0.5})
    with pytest.raises(ConfigError, match="is several rewards"):
        make_reward("thesis_repair")
    check_names(load_config("hello", ["reward=thesis_repair", "kinds.label.reward=thesis_detection"]))
