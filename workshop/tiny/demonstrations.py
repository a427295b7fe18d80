"""Scripted, imperfect demonstrations: explore, read, patch, with the mistakes of somebody in a hurry.

The expert knows the bug, but it repairs only about `Habits.exact` of the exercises: it changes the right line wrongly,
edits another line, misquotes the text to replace, or gives up. A policy that imitates it knows the tools and repairs
little; learning to repair is left to reinforcement learning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from random import Random
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.tasks.mutants.corpus_tasks import Exercise
from coderepairrl.tasks.mutants.mutations import list_mutations
from coderepairrl.tokens import Codec, make_conversation_rows
from workshop.tiny import prompt
from workshop.tiny.workspace import Workspace

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of the expert's actions. `exact`, `slip`, `elsewhere`, `misquote` and `give_up` sum to 1."""

    look_around: float = 0.15
    """Lists the files first."""
    skip_reading: float = 0.10
    """Patches a quoted line without opening the file."""
    wrong_file: float = 0.05
    """Opens the checks or a file that is not there first."""
    exact: float = 0.60
    slip: float = 0.15
    """Changes the right line wrongly."""
    elsewhere: float = 0.10
    """Changes another line."""
    misquote: float = 0.07
    """Replaces text that is not there; every other time it then gives up."""
    give_up: float = 0.08
    """Submits without a change."""
    unchanged: float = 0.0
    """First replaces the broken line by itself; with this probability also a second time. The mistake
    is not trained on (`row`): a policy makes it anyway, and must learn how to continue after it."""
    resign: float = 0.5
    """Gives up after that."""


def habits(exact: float, unchanged: float = 0.0) -> Habits:
    """The expert's usual habits with `exact` as the share of exercises that it repairs; its other endings keep their
    proportions. With 1 it makes no mistakes on the way either. Raises `UsageError` for shares outside 0 to 1.

    >>> habits(0.8).slip, habits(0.6) == Habits(), habits(1.0).wrong_file
    (0.075, True, 0.0)
    """
    if not (0 <= exact <= 1 and 0 <= unchanged <= 1):
        raise UsageError("habits are shares from 0 to 1")
    usual = Habits()
    if exact == usual.exact:
        return replace(usual, unchanged=unchanged)
    rest = (1 - exact) / (1 - usual.exact)
    endings = {name: round(getattr(usual, name) * rest, 6) for name in ("slip", "elsewhere", "misquote", "give_up")}
    wrong_file = usual.wrong_file if exact < 1 else 0.0
    return replace(usual, exact=exact, wrong_file=wrong_file, unchanged=unchanged, **endings)


def demonstrate(
    exercise: Exercise, habits: Habits, rng: Random, tools: Sequence[Mapping[str, Any]] = prompt.TOOLS
) -> list[Message]:
    """Write a whole conversation, system prompt (always Nano's) to submission, with the `tools` of Nano or `nano4`.

    Raises `UsageError` for other tools.
    """
    workspace = Workspace(exercise.files)
    messages = prompt.opening(exercise.prompt)
    parameters = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}

    def call(names: Sequence[str], answer: Callable[..., str], *values: str) -> None:
        name = next((name for name in names if name in parameters), None)
        if name is None:
            raise UsageError(f"the expert needs one of the tools {', '.join(names)}")
        arguments = dict(zip(parameters[name], values, strict=True))
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": answer(*values)})

    def run(cmd: str) -> None:
        call(("shell", "bash"), workspace.shell, cmd)

    def read(path: str) -> None:
        if "view_file" in parameters:
            call(("view_file",), workspace.view_file, path)
        else:
            run(f"cat {path}")

    def patch(old: str, new: str) -> None:
        call(("apply_patch", "str_replace"), workspace.apply_patch, exercise.path, old, new)

    if rng.random() < habits.look_around:
        run("ls")
    if rng.random() < habits.wrong_file:
        read(rng.choice([next(iter(exercise.tests)), exercise.path.rpartition(".")[0]]))
    if not (exercise.quoted and rng.random() < habits.skip_reading):
        read(exercise.path)
    broken, fixed = exercise.broken_line, exercise.fixed_line
    ending = rng.random()
    if habits.unchanged and rng.random() < habits.unchanged:
        patch(broken, broken)
        if rng.random() < habits.unchanged:
            patch(broken, broken)
        ending = 1.0 if rng.random() < habits.resign else ending
    if ending < habits.exact:
        patch(broken, fixed)
    elif (ending := ending - habits.exact) < habits.slip:
        patch(broken, slipped(exercise, rng))
    elif (ending := ending - habits.slip) < habits.elsewhere:
        patch(*another_edit(exercise, rng))
    elif ending - habits.elsewhere < habits.misquote:
        patch(misquoted(broken, rng), fixed)
        if rng.random() < 0.5:
            patch(broken, fixed)
    messages.append({"role": "assistant", "content": prompt.DONE})
    return messages


def row(codec: Codec, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and a mask of those to train on: the tokens that the policy would sample.

    Calls that replaced a text by itself are not trained on.
    """
    ((ids, trained),) = make_conversation_rows(codec, messages, prompt.TOOLS)
    mask = list(trained)
    answers = [b for a, b in pairwise([*messages, {}]) if a["role"] == "assistant"]
    turns = [[*turn] for is_sampled, turn in groupby(range(len(ids)), lambda at: mask[at]) if is_sampled]
    for turn, answer in zip(turns, answers, strict=True):
        if answer.get("content") == prompt.TEXTS.identical:
            mask[turn[0] : turn[-1] + 1] = [False] * len(turn)
    return list(ids), mask


def slipped(exercise: Exercise, rng: Random) -> str:
    """The broken line changed in a way that does not repair it."""
    broken, fixed = exercise.broken_line, exercise.fixed_line
    return rng.choice([line for line in _edits(exercise, broken) if line != fixed] or [broken + " "])


def another_edit(exercise: Exercise, rng: Random) -> tuple[str, str]:
    """Another line, which occurs once, and a change of it."""
    source = exercise.files[exercise.path]
    broken = exercise.broken_line
    lines = [line.strip() for line in source.splitlines() if line[:1].isspace()]
    lines = [line for line in lines if line != broken and source.count(line) == 1 and _edits(exercise, line)]
    line = rng.choice(lines or [broken])
    return line, rng.choice(_edits(exercise, line) or [line + " "])


def _edits(exercise: Exercise, line: str) -> list[str]:
    """Results of all one-line mutations of `line` in the exercise's file."""
    source = exercise.files[exercise.path]
    number = next(n for n, text in enumerate(source.splitlines(), 1) if text.strip() == line)
    mutations = [m for m in list_mutations(source) if m.line == number]
    changed = [m.apply(source).splitlines()[number - 1].strip() for m in mutations]
    return [text for text in dict.fromkeys(changed) if text != line]


def misquoted(line: str, rng: Random) -> str:
    """`line` with a word missing or doubled."""
    words = line.split(" ")
    at = rng.randrange(len(words))
    return " ".join(words[:at] + words[at + 1 :] if len(words) > 1 and rng.random() < 0.5 else words[: at + 1] * 2)
