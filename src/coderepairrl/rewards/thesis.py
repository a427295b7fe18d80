"""Rewards of the thesis, its draft and its code, for reproduction only.

Tagged answers, search/replace blocks, habits in a shell (which reward commands, not results: use weight 0), and
similarity to the reference.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from cydifflib import SequenceMatcher

from coderepairrl.agents.patching import parse_blocks
from coderepairrl.errors import TaskError
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.rewards.changes import count_common_ends, parse_python
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.rewards.text import (
    AnswerReward,
    TextReward,
    explain_unread_patch,
    parse_reference,
    read_sandbox_file,
    read_task_label,
    reward_faults,
)
from coderepairrl.types import Episode, Score, Task

_STRICT_REPLY = re.compile(r"<think>\n(?s:.+?)\n</think>\n<answer>\n[^\n]+\n</answer>\s*")


def extract_tagged_answer(text: str) -> str:
    """Text between ``<answer>`` and ``</answer>`` (or the end); else ``N/A``.

    >>> extract_tagged_answer("<think>hm</think><answer> CWE-79 </answer>"), extract_tagged_answer("CWE-79")
    ('CWE-79', 'N/A')
    """
    _, tag, rest = text.partition("<answer>")
    return rest.partition("</answer>")[0].strip() if tag else "N/A"


def extract_fenced_text(text: str) -> str:
    """First fenced block of `text`, else all of it."""
    line = text.find("\n", text.find("```") + 3) + 1 if "```" in text else 0
    end = text.find("```", line) if line else -1
    return text[line:end] if end >= 0 else text


class ReasoningFormat(AnswerReward):
    r"""Tags of a reasoned answer, in [0, 1].

    1/4 for each of ``<think>\n``, ``\n</think>\n``, ``\n<answer>\n`` and ``\n</answer>`` that occurs exactly once, less
    0.001 for each character before the first and after the last; at least 0.

    Source: the original's code. Known weaknesses: ignores order; empty thoughts and answers earn fully.
    """

    name = "reasoning_format"

    def judge(self, answer: str, task: Task) -> float:
        """Score the tags of `answer`."""
        value = 0.0
        for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"):
            value += 0.25 * (answer.count(tag) == 1)
        if answer.count("<think>\n") == 1:
            value -= 0.001 * answer.index("<think>\n")
        if answer.count("\n</answer>") == 1:
            value -= 0.001 * len(answer.partition("\n</answer>")[2])
        return max(value, 0.0)


class ReasoningFormatStrict(AnswerReward):
    """1 if the reply is a thought and a one-line answer, each tag on a separate line, else 0.

    Source: the original's code. Known weakness: for classification only.
    """

    name = "reasoning_format_strict"

    def judge(self, answer: str, task: Task) -> float:
        """Match the whole reply."""
        return float(_STRICT_REPLY.fullmatch(answer) is not None)


class Classification(AnswerReward):
    """1 if the tagged answer is the task's label (`Task.answer`, such as ``CWE-79``), else 0.

    Source: the original's code. Known weaknesses: another spelling scores 0; with few classes, guessing the commonest
    pays.
    """

    name = "classification"

    def judge(self, answer: str, task: Task) -> float:
        """Compare labels. Raises `TaskError` without a label."""
        return float(extract_tagged_answer(answer) == read_task_label(task).strip())


Block = tuple[tuple[str, ...], tuple[str, ...]]
"""Searched lines and their replacement."""

# Markers of a block: SEARCH, divider, REPLACE. Possessive, and searched one after the other: the policy writes the
# text, and a pattern that backtracks could take hours.
_PERFECT_BLOCK = tuple(map(re.compile, (r"<<<<<<< SEARCH\n", r"\n=======\n", r"\n>>>>>>> REPLACE")))
_TOLERANT_BLOCK = tuple(map(re.compile, (r"(?<!<)<{3,}+\s*+SEARCH\s*?>*+\n", r"\n=++\n", r"\n>{3,}+\s*+REPLACE")))
_SHORT_MARKERS = re.compile(r"(?<!<)<{2,}+\s*+SEARCH"), re.compile(r"(?<!>)>{2,}+\s*+REPLACE")
# patterns of deviations from the format (`SearchReplaceFormat`), each with what it costs
_DEVIATIONS = (
    (re.compile(r"SEARCH\s+[^\n]"), 0.05),
    (re.compile(r"REPLACE\s+[^\n]"), 0.05),
    (re.compile(r"<< SEARCH|>> REPLACE"), 0.1),
    (re.compile(r"=\s+\n"), 0.05),
    (re.compile(r"(?:SEARCH|REPLACE)[^\n]"), 0.1),
)


def read_blocks(text: str) -> list[Block]:
    r"""Complete blocks of `text` (`agents.patching.parse_blocks`), whatever their file.

    >>> read_blocks("<<<<<<< SEARCH\n  a\n\n  b\n=======\n  c\n>>>>>>> REPLACE")
    [(('  a', '', '  b'), ('  c',))]
    """
    return [(each.search, each.replace) for each in parse_blocks(text)]


class SearchReplaceFormat(AnswerReward):
    """Format of the answer's search/replace blocks, in [0, 1].

    For the first fenced block between ``<answer>`` tags: 1, less 0.4 without SEARCH, 0.4 without REPLACE, 0.2 without a
    divider; below 0.5 the rest is skipped. A single perfect block earns 1. Else less 0.1 for each marker of another
    length, 0.05 each for text behind SEARCH and REPLACE, 0.15 each if several SEARCHes or REPLACEs differ in number
    from dividers, 0.1 for markers cut short, 0.05 for blanks behind the divider, 0.3 for the wrong order, 0.1 for a
    marker that does not end its line, 0.2 if no block can be read and 0.1 if only a tolerant reader can; at least 0.

    Source: the original's code, with blank lines in blocks. Known weaknesses: several perfect blocks earn about 0.7;
    ignores content.
    """

    name = "search_replace_format"
    version = 2

    def judge(self, answer: str, task: Task) -> float:
        """Format of the tagged answer."""
        return score_block_format(extract_fenced_text(extract_tagged_answer(answer)))


def score_block_format(text: str) -> float:
    """`SearchReplaceFormat` of a text."""
    if not text:
        return 0.0
    searches, replaces, dividers = text.count("SEARCH"), text.count("REPLACE"), text.count("=======")
    value = 1.0 - 0.4 * (not searches) - 0.4 * (not replaces) - 0.2 * (not dividers and "DIVIDER" not in text)
    if value < 0.5:
        return max(value, 0.0)
    if searches == replaces == 1 and _has_in_order(text, _PERFECT_BLOCK):
        return 1.0
    value -= 0.1 * ("<<<<<<< SEARCH" not in text and bool(_SHORT_MARKERS[0].search(text)))
    value -= 0.1 * (">>>>>>> REPLACE" not in text and bool(_SHORT_MARKERS[1].search(text)))
    value -= 0.15 * (searches > 1 and searches != dividers) + 0.15 * (replaces > 1 and replaces != dividers)
    value -= sum(cost for pattern, cost in _DEVIATIONS if pattern.search(text))
    value -= 0.3 * (0 <= text.rfind("REPLACE") < text.find("SEARCH"))
    if searches and replaces:
        value -= 0.2 if not read_blocks(text) else 0.1 * (not _has_in_order(text, _TOLERANT_BLOCK))
    return min(max(value, 0.0), 1.0)


def _has_in_order(text: str, parts: Iterable[re.Pattern[str]]) -> bool:
    at = 0
    for part in parts:
        match = part.search(text, at)
        if match is None:
            return False
        at = match.end()
    return True


class SearchReplaceSimilarity(AnswerReward):
    """Similarity of the answer's blocks to the reference's, in [0, 1].

    Blocks are paired in order, missing ones empty. A pair scores the mean difflib ratio, over lines, of its search and
    replace parts; the reward is the mean over pairs. Each hunk of a reference diff is one block with context.

    Source: the original's code, with blank lines in blocks. Known weaknesses: order matters; context earns.
    """

    name = "search_replace_similarity"
    version = 2

    def judge(self, answer: str, task: Task) -> float:
        """Compare blocks. Raises `TaskError` for a reference without any."""
        reference = _read_reference_blocks(task)
        answered = read_blocks(extract_fenced_text(extract_tagged_answer(answer)))
        if not answered:
            return 0.0
        ratios = [
            float(SequenceMatcher(None, answered_block[side], reference_block[side]).ratio())
            for answered_block, reference_block in zip_longest(answered, reference, fillvalue=((), ()))
            for side in (0, 1)
        ]
        return sum(ratios) / len(ratios)


def _read_reference_blocks(task: Task) -> list[Block]:
    text = task.reference.decode("utf-8", "replace")
    reference = read_blocks(text)
    if not reference:
        hunks = [hunk for file in parse_reference(task) for hunk in file.hunks]
        reference = [(_decode_lines(hunk.side(b"-")), _decode_lines(hunk.side(b"+"))) for hunk in hunks]
    if not reference:
        raise TaskError(f"task {task.id}: the reference has no search/replace block and no hunk", fix="give it one")
    return reference


def _decode_lines(lines: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").removesuffix("\r") for line in lines)


_LS = re.compile(r"\bls\b")
_SEARCH = re.compile(r"\b(?:rg|grep|find)\b")
_SLICE = re.compile(r"\b(?:sed|head|tail)\b")
_PRECISE = re.compile(r"\b(?:sed\s+-n\s+'?\d+\s*,\s*\d+\s*p'?|(?:head|tail)\s+-n\s+\d+\b)")
_SCOPED = re.compile(r"(?:^|\s)-n\b|--type=\w+\b|/")
_PATH = re.compile(
    r"[\w./-]+\.(?:py|ts|js|java|go|rs|md|txt|json|yaml|yml|toml|ini)\b|\b(?:src|lib|tests?|docs)/[\w./-]+\b"
)
_ARGUMENTS = ("cmd", "command")


class _ShellCall(NamedTuple):
    command: str
    ok: bool
    output: str


def _list_shell_calls(episode: Episode) -> list[_ShellCall]:
    calls = []
    for call, output in zip(episode.tool_calls, _list_outputs(episode), strict=True):
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            continue  # a malformed call ran nothing
        named = [arguments[key] for key in _ARGUMENTS if key in arguments] if isinstance(arguments, dict) else []
        if named and isinstance(named[0], str) and named[0].strip():
            calls.append(_ShellCall(named[0].strip(), call.ok, output))
    return calls


def _list_outputs(episode: Episode) -> list[str]:
    """Output of each tool call, or "".

    Ids are unique within a turn only: some models repeat them.
    """
    ids: defaultdict[tuple[int, str, str], deque[str]] = defaultdict(deque)
    printed: dict[tuple[int | None, str], str] = {}
    for turn in episode.turns:
        calling_turn = turn.base
        for message in turn.messages[:-1]:
            if message.get("role") == "assistant":
                calling_turn = None  # the client rewrote the history
            elif message.get("role") == "tool":
                printed.setdefault((calling_turn, str(message.get("tool_call_id"))), str(message.get("content") or ""))
        for call_in_reply in turn.messages[-1].get("tool_calls", ()) if turn.messages else ():
            function = call_in_reply["function"]
            ids[turn.index, function["name"], function["arguments"]].append(call_in_reply["id"])
    outputs = []
    for call in episode.tool_calls:
        equal_ids = ids[call.turn, call.name, call.arguments]  # equal calls of a reply run in their order
        call_id = equal_ids.popleft() if equal_ids else ""
        outputs.append(printed.get((call.turn, call_id), printed.get((None, call_id), "")))
    return outputs


class TerminalHabits(Reward):
    """Debugging habits in a shell, in [0, 1].

    0.3 for a successful ``ls`` among the first two commands, 0.4 for rg, grep or find among the first ten, and 0.3
    for sed, head or tail after the first two.

    Source: the original's code. Known weakness: pays for commands, not for results.
    """

    name = "terminal_habits"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        calls = _list_shell_calls(episode)
        return Score(
            self.name,
            0.3 * _has_succeeded(_LS, calls[:2])
            + 0.4 * _has_succeeded(_SEARCH, calls[:10])
            + 0.3 * _has_succeeded(_SLICE, calls[2:]),
        )


class ExplorationDepth(Reward):
    """Purposeful exploration with a shell, in [0, 1].

    0.25 for a chain: the first successful search of the first ten commands printed a path that a later sed, head or
    tail reads. Without a chain, 0.2 for a read of given lines, and 0.15 if such a search was scoped or printed a path.
    In both cases 0.2 times the share of successes among the first six commands, if there are six. Deductions, 0.2 at
    most: 0.07 for a repeated command, 0.07 for one that failed twice in a row, 0.1 for truncated output without a read
    of given lines.

    Source: the original's code. Known weakness: pays for looking, not for finding.
    """

    name = "exploration_depth"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        calls = _list_shell_calls(episode)
        first = calls[:10]
        at = next((at for at, call in enumerate(first) if call.ok and _SEARCH.search(call.command)), None)
        paths = set(_PATH.findall(first[at].output)) if at is not None else set()
        later = [call.command for call in calls[(at or 0) + 1 :] if call.ok and _SLICE.search(call.command)]
        chain = any(path in command for path in paths for command in later)
        precise = not chain and _has_succeeded(_PRECISE, calls)
        scoped = not chain and any(
            call.ok and _SEARCH.search(call.command) and (_SCOPED.search(call.command) or _PATH.search(call.output))
            for call in first
        )
        value = 0.25 * chain + 0.2 * precise + 0.15 * scoped
        if len(calls) >= 6:
            value += 0.2 * sum(call.ok for call in calls[:6]) / 6
        failed = any(a.command == b.command and not a.ok and not b.ok for a, b in pairwise(first))
        cut = not precise and any("truncated" in call.output.lower() for call in first)
        repeated = len({call.command for call in first}) < len(first)
        value -= min(0.07 * repeated + 0.07 * failed + 0.1 * cut, 0.2)
        return Score(self.name, min(max(value, 0.0), 1.0))


def _has_succeeded(pattern: re.Pattern[str], calls: Sequence[_ShellCall]) -> bool:
    return any(call.ok and pattern.search(call.command) for call in calls)


LARGEST_PAIRS = 400_000_000
"""Largest product of both texts' lengths (20,000 each); beyond, a single search may be slow."""
LARGEST_WORK = 20_000_000
"""Most steps of all searches, about a second; for adversarial texts they grow with the cube of the length."""
_FILE_LINE = "diff --git"
_FILE_NAME = re.compile(r"diff --git a/(.*) b/")


class PatchSimilarity(TextReward):
    """Similarity of whole per-file diff texts, in [0, 1].

        R = sum over files f of both patches of SM(g_f, a_f) / max(|F_a|, |F_g|)

    g is the oracle, a the patch, SM the ratio 2M/T of `difflib.SequenceMatcher(None, g_f, a_f)` over characters, with
    autojunk. A file's text is everything from its ``diff --git a/X b/X`` line to the next, stripped; X names it, and
    the last of several counts.

    Source: the thesis and its code; equal to its published values on real predictions (tests). Known weaknesses:
    headers and context dominate, so a blank line next to the right hunk scores 0.52 to 0.60; blob hashes keep a perfect
    repair below 1.0; a patch without ``diff --git`` lines scores 0.
    """

    name = "patch_similarity"
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Never raises."""
        oracle_files, patch_files = split_file_texts(oracle), split_file_texts(patch)
        if not oracle_files or not patch_files:
            return 0.0
        return _sum_ratios(oracle_files, patch_files) / max(len(oracle_files), len(patch_files))


def _sum_ratios(oracle: dict[str, str], patch: dict[str, str]) -> float:
    return sum(compute_ratio(oracle[name], patch[name]) for name in oracle if name in patch)


def compute_ratio(a: Sequence[Hashable], b: Sequence[Hashable], *, autojunk: bool = True) -> float:
    """``difflib.SequenceMatcher(None, a, b, autojunk).ratio()``, by cydifflib.

    Beyond `LARGEST_PAIRS` only common ends count, else the matches within `LARGEST_WORK` steps.

    >>> compute_ratio("abcd", "bcde")
    0.75
    """
    if not a and not b:
        return 1.0
    if len(a) * len(b) <= LARGEST_PAIRS:
        return 2.0 * _count_matching(a, b, autojunk) / (len(a) + len(b))
    return 2.0 * sum(count_common_ends(a, b)) / (len(a) + len(b))


def _count_matching(a: Sequence[Hashable], b: Sequence[Hashable], autojunk: bool) -> int:
    """Elements in difflib's matching blocks, up to `LARGEST_WORK` steps."""
    matcher = SequenceMatcher(None, a, b, autojunk)
    steps = [0, *accumulate(1 + len(matcher.b2j.get(element, ())) for element in a)]
    remaining, matched = LARGEST_WORK, 0
    parts = [(0, len(a), 0, len(b))]  # ranges of `a` and `b` that are still to be matched
    while parts:
        a_low, a_high, b_low, b_high = parts.pop()
        remaining -= steps[a_high] - steps[a_low]
        if remaining < 0:
            break
        a_at, b_at, size = matcher.find_longest_match(a_low, a_high, b_low, b_high)
        matched += size
        if size and a_low < a_at and b_low < b_at:
            parts.append((a_low, a_at, b_low, b_at))
        if size and a_at + size < a_high and b_at + size < b_high:
            parts.append((a_at + size, a_high, b_at + size, b_high))
    return matched


def split_file_texts(patch: bytes) -> dict[str, str]:
    r"""File texts by name; text before the first ``diff --git`` is named "".

    >>> split_file_texts(b"diff --git a/x b/x\n+1\ndiff --git a/y b/y\n+2\n")["x"]
    'diff --git a/x b/x\n+1'
    """
    texts = {}
    before, *parts = ("\n" + patch.decode("utf-8", "surrogateescape")).split("\n" + _FILE_LINE)
    for part in (before, *(_FILE_LINE + part for part in parts)):
        if text := part.strip():
            name = _FILE_NAME.search(text.partition("\n")[0].splitlines()[0])
            texts[name[1] if name else ""] = text
    return texts


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
        oracle_paths, patch_paths = ({file.path for file in parse_patch(text)} for text in (oracle, patch))
        if not oracle_paths:
            return float(not patch_paths)
        return len(oracle_paths & patch_paths) / max(len(oracle_paths), len(patch_paths))


class NanoSimilarity(TextReward):
    """Similarity of Nano's benchmark, in [0, 1].

    Like `patch_similarity`, but divided by the oracle's files only, and 1 if both are empty.

    Source: Nano's benchmark. Known weakness: touching many files costs nothing.
    """

    name = "nano_similarity"
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Never raises."""
        oracle_files, patch_files = split_file_texts(oracle), split_file_texts(patch)
        if not oracle_files:
            return float(not patch_files)
        return _sum_ratios(oracle_files, patch_files) / len(oracle_files)


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
        oracle_files, patch_files = parse_patch(oracle), parse_patch(patch)
        if not oracle_files or not patch_files:
            return 0.0
        line_ratio = compute_ratio(
            _collect_changed_lines(oracle_files), _collect_changed_lines(patch_files), autojunk=False
        )
        shared = {file.path for file in oracle_files} & {file.path for file in patch_files}
        functions = _list_headings(oracle_files) & _list_headings(patch_files)
        return max(line_ratio, 0.1 * bool(shared) + 0.1 * bool(functions))


def _collect_changed_lines(patch: Sequence[FilePatch]) -> list[tuple[str, bytes, bytes]]:
    lines = []
    for file in sorted(patch, key=lambda file: file.path):
        for block in sorted(file.blocks, key=lambda block: block.at):
            for sign, side in ((b"-", block.removed), (b"+", block.added)):
                lines += [(file.path, sign, line) for line in side]
    return lines


def _list_headings(patch: Sequence[FilePatch]) -> set[Place]:
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
        if problem := explain_unread_patch(episode.patch):
            return Score(self.name, 0.0, note=problem)
        reference = parse_reference(task)
        try:
            patch_files = await asyncio.to_thread(parse_patch, episode.patch)
        except MalformedPatch as malformed:
            return Score(self.name, 0.0, note=str(malformed))
        shared = {file.path for file in reference} & {file.path for file in patch_files}
        sources: dict[str, ast.Module] = {}
        if python_paths := sorted(path for path in shared if path.endswith(".py")):
            with reward_faults("functions", task):
                async with sandbox.open(task) as fresh:
                    for path in python_paths:
                        if tree := parse_python(await read_sandbox_file(fresh, path)):
                            sources[path] = tree  # files without a tree are read by hunk headings
        reference_places, patch_places = await asyncio.to_thread(
            lambda: [set(_list_places(patch, sources)) for patch in (reference, patch_files)]
        )
        most = max(len(reference_places), len(patch_places))
        return Score(self.name, len(reference_places & patch_places) / most if most else 0.0)


def _list_places(patch: Sequence[FilePatch], sources: dict[str, ast.Module]) -> Iterator[Place]:
    for file in patch:
        tree = sources.get(file.path)
        if tree is None:
            yield from ((file.path, hunk.heading.decode("utf-8", "replace")) for hunk in file.hunks)
            continue
        for block in file.blocks:
            removed = range(block.at + 1, block.at + len(block.removed) + 1)
            for line in removed or (block.at,):  # inserted lines belong to the line above
                yield file.path, find_enclosing(tree, line)


def find_enclosing(tree: ast.AST, line: int) -> str:
    """Qualified name of the innermost function or class that contains `line`."""
    for node in ast.iter_child_nodes(tree):
        first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=getattr(node, "lineno", 0))
        if first <= line <= (getattr(node, "end_lineno", 0) or 0):
            inner = find_enclosing(node, line)
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
        with reward_faults("test files", task):
            async with sandbox.open(task) as fresh:
                for path, content in task.checks.restore.items():
                    await fresh.write(path, content.encode("utf-8", "surrogateescape"))
                tests = await fresh.diff()
        return Score(self.name, PatchSimilarity().compare(tests, episode.patch))
