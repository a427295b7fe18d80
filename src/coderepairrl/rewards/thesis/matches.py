"""Rewards for touching the right files and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from coderepairrl.errors import RewardFault, SandboxFault, TaskError
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse
from coderepairrl.rewards.text import TextReward
from coderepairrl.rewards.thesis.similarity import PatchSimilarity, files, ratio
from coderepairrl.types import Episode, Score, Task

Place = tuple[str, str]
"""A file, and the qualified name of a function in it (empty: outside)."""


class FileMatch(TextReward):
    """Share of files in common, in [0, 1]: |F_a & F_g| / max(|F_a|, |F_g|).

    Source: the original's code. Known weakness: hacked in the thesis, since any edit of the right file earns 1. Use
    weight 0.
    """

    name = "file_match"

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Share of files; 1 if both patches are empty. Raises `MalformedPatch`."""
        oracle_paths, patch_paths = ({file.path for file in parse(text)} for text in (oracle, patch))
        return (
            len(oracle_paths & patch_paths) / max(len(oracle_paths), len(patch_paths))
            if oracle_paths
            else float(not patch_paths)
        )


class NanoSimilarity(TextReward):
    """Similarity of Nano's benchmark, in [0, 1].

    Like `patch_similarity`, but divided by the oracle's files only, and 1 if both are empty.

    Source: Nano's benchmark. Known weakness: touching many files costs nothing.
    """

    name = "nano_similarity"
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Never raises."""
        oracle_files, patch_files = files(oracle), files(patch)
        if not oracle_files:
            return float(not patch_files)
        return sum(ratio(oracle_files[name], patch_files[name]) for name in oracle_files if name in patch_files) / len(
            oracle_files
        )


class DraftSimilarity(TextReward):
    """Reward of the thesis's draft, in [0, 1].

    1 if both patches change the same lines; else the difflib ratio of the sequences of changed lines, or, where larger,
    0.1 for a right file and another 0.1 for a right function (by hunk headings).

    Source: equation 3.1 and section 3.5.3 of the draft. Known weakness: any edit of the right file earns 0.1.
    """

    name = "draft_similarity"
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Raises `MalformedPatch`."""
        oracle_files, patch_files = parse(oracle), parse(patch)
        if not oracle_files or not patch_files:
            return 0.0
        line_ratio = ratio(_changed(oracle_files), _changed(patch_files), autojunk=False)
        shared = {file.path for file in oracle_files} & {file.path for file in patch_files}
        functions = _headings(oracle_files) & _headings(patch_files)
        return max(line_ratio, 0.1 * bool(shared) + 0.1 * bool(functions))


def _changed(patch: Sequence[FilePatch]) -> list[tuple[str, bytes, bytes]]:
    lines = []
    for file in sorted(patch, key=lambda file: file.path):
        for block in sorted(file.blocks, key=lambda block: block.at):
            for sign, side in ((b"-", block.removed), (b"+", block.added)):
                lines += [(file.path, sign, line) for line in side]
    return lines


def _headings(patch: Sequence[FilePatch]) -> set[Place]:
    headings = {(file.path, hunk.heading.decode("utf-8", "replace")) for file in patch for hunk in file.hunks}
    return {(path, heading) for path, heading in headings if heading}


class FunctionMatch(Reward):
    """Share of functions in common, in [0, 1]: |P_a & P_g| / max(|P_a|, |P_g|) over (file, function).

    A changed place of a Python file belongs to the innermost function or class at the task's commit, read in a fresh
    sandbox; in other or unparsable files, to the hunk's heading.

    Source: the draft's section 3.5.3 ("correct files and functions"). Known weaknesses: any edit of the right function
    earns 1; a heading may name a function that ended above the hunk.
    """

    name = "function_match"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the patch. Raises `TaskError` for a malformed reference, `RewardFault`."""
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch")
        try:
            reference = parse(task.reference)
        except MalformedPatch as problem:
            raise TaskError(f"task {task.id}: reference: {problem}", fix=problem.fix) from problem
        try:
            patch_files = parse(episode.patch)
        except MalformedPatch as problem:
            return Score(self.name, 0.0, note=str(problem))
        shared = {file.path for file in reference} & {file.path for file in patch_files}
        try:
            sources = await self._sources(task, sandbox, sorted(path for path in shared if path.endswith(".py")))
        except SandboxFault as fault:
            raise RewardFault(f"functions of task {task.id}: {fault}", fix=fault.fix) from fault
        reference_places, ours = (set(_places(patch, sources)) for patch in (reference, patch_files))
        most = max(len(reference_places), len(ours))
        return Score(self.name, len(reference_places & ours) / most if most else 0.0)

    @staticmethod
    async def _sources(task: Task, backend: SandboxBackend, paths: Sequence[str]) -> dict[str, ast.Module]:
        trees: dict[str, ast.Module] = {}
        if not paths:
            return trees
        async with backend.open(task) as fresh:
            for path in paths:
                source = await _read(fresh, path)
                try:
                    trees[path] = ast.parse(source)
                except (SyntaxError, ValueError):
                    continue  # the headings of the hunks stand in, as for other languages
        return trees


async def _read(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await sandbox.read(path)
    except OSError:  # the oracle creates it, or no file can have that name
        return b""


def _places(patch: Sequence[FilePatch], sources: dict[str, ast.Module]) -> Iterator[Place]:
    for file in patch:
        tree = sources.get(file.path)
        if tree is None:
            yield from ((file.path, hunk.heading.decode("utf-8", "replace")) for hunk in file.hunks)
            continue
        for block in file.blocks:
            removed = range(block.at + 1, block.at + len(block.removed) + 1)
            for line in removed or (block.at,):  # what is inserted belongs to the line above
                yield file.path, enclosing(tree, line)


def enclosing(tree: ast.AST, line: int) -> str:
    """Qualified name of the innermost function or class that contains `line`."""
    for node in ast.iter_child_nodes(tree):
        first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=getattr(node, "lineno", 0))
        if first <= line <= (getattr(node, "end_lineno", 0) or 0):
            inner = enclosing(node, line)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return f"{node.name}.{inner}".rstrip(".")
            return inner
    return ""


class TestPatchSimilarity(Reward):
    """`patch_similarity` to the change of the tests (`Checks.restore`) instead of the oracle, in [0, 1].

    Source: the original's code. Known weakness: pays for tests, not for repairs.
    """

    __test__ = False  # pytest: not a test class
    name = "test_patch_similarity"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the patch. Raises `TaskError` without test files, `RewardFault`."""
        if not task.checks.restore:
            raise TaskError(f"task {task.id} names no test files", fix="give its checks the files to `restore`")
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch")
        try:
            async with sandbox.open(task) as fresh:
                for path, content in task.checks.restore.items():
                    await fresh.write(path, content.encode("utf-8", "surrogateescape"))
                tests = await fresh.diff()
        except SandboxFault as fault:
            raise RewardFault(f"test files of task {task.id}: {fault}", fix=fault.fix) from fault
        return Score(self.name, PatchSimilarity().compare(tests, episode.patch))
