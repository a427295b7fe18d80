"""Rewards that run checks for a sample of attempts, or only parse the changed files."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import PurePosixPath

from coderepairrl import grading
from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.parse import MalformedPatch, parse_patch
from coderepairrl.rewards.tests import TestsReward, has_program, is_group_drawn
from coderepairrl.rewards.text import explain_unread_patch, reward_faults
from coderepairrl.types import Episode, Score, Task

_PYTHON = "import sys; compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec')"
_TOML = "import sys, tomllib; tomllib.load(open(sys.argv[1], 'rb'))"
CHECKERS: dict[str, tuple[str, ...]] = {
    ".py": ("python3", "-I", "-c", _PYTHON),
    ".json": ("python3", "-I", "-m", "json.tool"),
    ".toml": ("python3", "-I", "-c", _TOML),
    **dict.fromkeys((".js", ".mjs", ".cjs"), ("node", "--check")),
    ".rb": ("ruby", "-c"),
    ".php": ("php", "-l"),
    ".go": ("gofmt", "-e"),
    ".sh": ("bash", "-n"),
}
"""Commands that parse a file without running it, by its suffix; the file's name is appended."""
# time limit for parsing all changed files
_SECONDS = 120.0


class HybridReward(Reward):
    """`patch_edits` for every attempt, and the task's checks for some, in [0, 1].

    A hash of its name draws one group of attempts in four, scored by the mean of `patch_edits` and `tests`. Another
    budget: ``class Half(HybridReward): name, share = "half", 0.5``.

    Source: the thesis's hybrid verifier (future work). Known weakness: tested and untested groups are not comparable.
    """

    name = "hybrid"
    runs_checks = takes_verified = True
    repairs = True
    version = PatchEdits.version
    share = 0.25
    """Share of groups tested."""

    def __init__(self) -> None:
        self._similar, self._tests = PatchEdits(), TestsReward()

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        similar = await self._similar(task, episode, sandbox)
        if not self.is_tested(episode):
            return replace(similar, name=self.name)
        tested = await self._tests(task, episode, sandbox)
        value = (similar.value + tested.value) / 2
        return replace(tested, name=self.name, value=value, note=tested.note or "tested", nearest=similar.nearest)

    def is_tested(self, episode: Episode) -> bool:
        """Whether the episode's group is drawn."""
        # whole groups, since attempts are compared within their group
        return is_group_drawn(episode.group, self.share)


class BuildReward(Reward):
    """1 if the patch applies and every changed file parses, else 0.

    Files are parsed in a fresh sandbox (`CHECKERS`). Those without a parser there only have to apply, unless
    the reference changes such files.

    Source: the thesis's build validation. Known weaknesses: no linking or type checks; any harmless edit earns 1.
    """

    name = "build"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the patch. Raises `RewardFault` if the sandbox fails."""
        if problem := explain_unread_patch(episode.patch):
            return Score(self.name, 0.0, note=problem)
        try:
            files = await asyncio.to_thread(parse_patch, episode.patch)
        except MalformedPatch as malformed:
            return Score(self.name, 0.0, note=str(malformed))
        paths = [file.new for file in files if file.new and not file.binary]
        with reward_faults("build", task):
            async with sandbox.open(task) as fresh:
                problem = await grading.apply_patch(fresh, episode.patch)
                problem = problem or await _find_syntax_error(fresh, paths, _list_reference_suffixes(task))
        return Score(self.name, 0.0 if problem else 1.0, note=problem)


def _list_reference_suffixes(task: Task) -> set[str]:
    try:
        return {PurePosixPath(file.path).suffix for file in parse_patch(task.reference)}
    except MalformedPatch:
        return set()


async def _find_syntax_error(sandbox: Sandbox, paths: list[str], needed_suffixes: set[str]) -> str:
    """Syntax error of the first file that does not parse, or "".

    Skips files without a parser in the sandbox; raises `SandboxFault` if their suffix is in `needed_suffixes`.
    """
    end = time.monotonic() + _SECONDS
    for path in paths:
        suffix = PurePosixPath(path).suffix
        checker = CHECKERS.get(suffix)
        if checker is None:
            continue
        result = await sandbox.exec([*checker, f"./{path}"], timeout=max(end - time.monotonic(), 0.0))
        if result.timed_out:
            return f"the changed files are not parsed within {_SECONDS:g} s"
        if result.exit_code in grading.CANNOT_RUN_CODES and not await has_program(sandbox, checker[0]):
            if suffix not in needed_suffixes:
                continue
            raise SandboxFault(f"there is no {checker[0]} to check {path}", fix=f"install {checker[0]} in the sandbox")
        if not result.ok:
            last = result.output.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return f"{path} cannot be parsed: {last[:200]}"
    return ""
