"""`swe_rl`: SWE-RL's reward for single-turn repairs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from cydifflib import SequenceMatcher

from coderepairrl import grading
from coderepairrl.errors import TaskError
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.text import parse_reference, read_last_reply, read_sandbox_file, reward_faults
from coderepairrl.types import Episode, Score, Task

_TAGS = ("<think>", "</think>", "<solution>", "</solution>")
_BLOCK_HEAD = re.compile(r"\n### (.*)\n<<<<<<< SEARCH\n")
_DIVIDER, _BLOCK_END = "\n=======\n", "\n>>>>>>> REPLACE\n```"
# value of an unusable reply
_FORMAT_VALUE = -1.0
# characters that edits may add to a file; each block replaces every match, and comparing 1 MiB takes minutes
_MOST_ADDED_CHARS = 1 << 16

Edits = dict[str, list[tuple[str, str]]]


class _UnusableReply(Exception):
    """The reply lacks the format, or its blocks do not apply."""


class SweRL(Reward):
    """Similarity of the change that the reply's search/replace blocks make, in {-1} and [0, 1].

    The reply is a ``<think>`` and a ``<solution>`` with fenced blocks that begin with ``### PATH``. Each must change
    text of the file at the task's commit, from the start of a line; else the value is -1. Otherwise it is the mean,
    over files that the reply or the oracle changes, of the difflib ratio (without autojunk) of the two unified diffs
    without headers; 0 for a file that only one changes.

    Source: Wei et al. 2025, "SWE-RL", and its published code. Known weaknesses: context lines earn, as in
    `patch_similarity`; a block replaces every match of its text; any well-formed junk beats -1.
    """

    name = "swe_rl"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the last reply. Raises `TaskError` for an unusable reference, `RewardFault`."""
        oracle = {name for file in parse_reference(task) for name in (file.old, file.new) if name}
        try:
            edits = _parse_edits(read_last_reply(episode))
            with reward_faults("files", task):
                async with sandbox.open(task) as fresh:
                    old = {path: await _read_text(fresh, path) for path in sorted(oracle | edits.keys())}
                    repaired = {path: _apply_edits(old[path], blocks) for path, blocks in edits.items()}
                    if refused := await grading.apply_patch(fresh, task.reference):
                        raise TaskError(
                            f"task {task.id}: reference: {refused}", fix="make it against the task's commit"
                        )
                    repaired_by_oracle = {path: await _read_text(fresh, path) for path in sorted(oracle)}
        except _UnusableReply as problem:
            return Score(self.name, _FORMAT_VALUE, note=str(problem))
        patch_diffs, oracle_diffs = _make_diffs(old, repaired), _make_diffs(old, repaired_by_oracle)
        paths = patch_diffs.keys() | oracle_diffs.keys()
        ratios = [
            float(SequenceMatcher(None, patch_diffs[path], oracle_diffs[path], autojunk=False).ratio())
            for path in sorted(patch_diffs.keys() & oracle_diffs.keys())  # a sum depends on its order
        ]
        return Score(self.name, sum(ratios) / len(paths) if paths else 0.0)


def _parse_edits(reply: str) -> Edits:
    for tag in _TAGS:
        if reply.count(tag) != 1:
            raise _UnusableReply(f"{tag} occurs {reply.count(tag)} times, not once")
    if not reply.partition("<think>")[2].partition("</think>")[0].strip():
        raise _UnusableReply("the thought is empty")
    edits: Edits = {}
    for path, search, replace in _parse_blocks(reply.partition("<solution>")[2].partition("</solution>")[0].strip()):
        edits.setdefault(path, []).append((search, replace))
    if not edits:
        raise _UnusableReply("no search/replace block")
    return edits


def _parse_blocks(text: str) -> Iterator[tuple[str, str, str]]:
    r"""Path, searched text and replacement of each fenced block, in linear time.

    >>> list(_parse_blocks("```\n### a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n```"))
    [('a.py', 'x', 'y')]
    """
    at = 0
    while head := _BLOCK_HEAD.search(text, at):
        line_start = max(at, text.rfind("\n", at, head.start()) + 1)
        fence = text.find("```", line_start, head.start())  # opened in the line before the path's
        at = head.end() - 1
        if fence < 0:
            continue
        divider = text.find(_DIVIDER, head.end())
        end = text.find(_BLOCK_END, divider + len(_DIVIDER)) if divider >= 0 else -1
        if end < 0:  # then no later block has an end either
            return
        yield head[1], text[head.end() : divider], text[divider + len(_DIVIDER) : end]
        at = end + len(_BLOCK_END)


def _apply_edits(content: str, edits: list[tuple[str, str]]) -> str:
    r"""Apply `edits`, each from the start of a line.

    >>> _apply_edits("a = 1\nb = a\n", [("b = a", "b = 2")])
    'a = 1\nb = 2\n'
    """
    text = "\n" + content
    for search, replace in edits:
        if search == replace:
            raise _UnusableReply("a block replaces a text by the same text")
        if "\n" + search not in text:
            raise _UnusableReply(f"a block searches for text that is not there: {search[:80]!r}")
        if text.count("\n" + search) * (len(replace) - len(search)) > len(content) + _MOST_ADDED_CHARS - len(text):
            raise _UnusableReply("the blocks make a file too large")
        text = text.replace("\n" + search, "\n" + replace)
    return text[1:]


async def _read_text(sandbox: Sandbox, path: str) -> str:
    return (await read_sandbox_file(sandbox, path)).decode("utf-8", "surrogateescape")


def _make_diffs(old: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    hunks = {}
    for path, content in new.items():
        lines = list(difflib.unified_diff(old[path].splitlines(), content.splitlines(), lineterm=""))
        if lines:
            hunks[path] = "\n".join(lines[2:])
    return hunks
