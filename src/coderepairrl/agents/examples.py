"""Few-shot examples: repairs of other tasks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.agents import patching
from coderepairrl.agents.chat import Message
from coderepairrl.agents.fences import Format, fence_file, format_reply
from coderepairrl.agents.patching import Ambiguous, NoMatch, replace_once
from coderepairrl.agents.texts import fill_template
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.runs import codec

_COLUMNS = ("prompt", "path", "before", "after")


@dataclass(frozen=True, slots=True)
class Example:
    """An issue, and its file before and after the repair."""

    prompt: str
    path: str
    before: str
    after: str
    id: str = ""
    """Id of its task; attempts at that task do not see it."""


Examples = int | str | tuple[Example, ...]
"""An agent's option: a number to draw from the training tasks, a file, or the examples, which a run records."""


def resolve_examples(option: Examples, task_id: str | None = None) -> tuple[Example, ...]:
    """Resolve an `examples` option, without the repair of task `task_id`.

    Raises `ConfigError` for an invalid file, and for a number, which only a run with training tasks can draw.
    """
    if isinstance(option, str):
        option = read_examples_file(option)
    if isinstance(option, tuple):
        return tuple(each for each in option if each.id != task_id)
    if option:
        raise ConfigError(
            f"agent.options.examples={option} are drawn from training tasks, and there are none here",
            fix='name tasks.source, or a file: agent.options.examples="examples.jsonl" (docs/guides/agents.md)',
        )
    return ()


def read_examples_file(path: str) -> tuple[Example, ...]:
    """Read JSON lines of ``prompt``, ``path``, ``before``, ``after``, and optionally ``id``. Raises `ConfigError`."""
    where = Path(path).expanduser()
    line = '{"prompt": "...", "path": "a.py", "before": "...", "after": "..."}'
    try:
        rows = list(codec.parse_foreign_lines(where, codec.read_foreign_text(where), f"a line is {line}"))
    except (OSError, ValueError, UsageError) as error:
        raise ConfigError(f"agent.options.examples: {path} cannot be read: {error}", fix=f"a line is {line}") from error
    for number, row in rows:
        if missing := [name for name in _COLUMNS if not isinstance(row.get(name), str)]:
            raise ConfigError(f"agent.options.examples: {path}:{number} has no text {missing[0]!r}", fix=line)
    if not rows:
        raise ConfigError(f"agent.options.examples: {path} has no example", fix=f"a line is {line}")
    return tuple(Example(**{name: row[name] for name in (*_COLUMNS, "id") if name in row}) for _, row in rows)


def format_as_turns(
    examples: Sequence[Example], form: Format, *, code: bool = True, question: str = ""
) -> list[Message]:
    """Format examples as issues and replies in `form`.

    Raises `ConfigError` if the format cannot express a repair.
    """
    messages: list[Message] = []
    for each in examples:
        further = filter(None, (fence_file(each.path, each.before) if code else "", question))
        messages.append({"role": "user", "content": "\n\n".join([each.prompt, *further])})
        try:
            reply = format_reply(form, each.path, each.before.encode(), each.after.encode())
        except patching.Inexpressible as error:
            raise ConfigError(f"agent.options.examples: {error}", fix="leave it out, or another format") from None
        messages.append({"role": "assistant", "content": reply.rstrip()})
    return messages


def format_as_calls(examples: Sequence[Example], tools: Mapping[str, Sequence[str]], patched: str) -> list[Message]:
    """Format examples as tool calls that read the file, patch it, and report success.

    `tools` maps names, first the command tool's, then the patch tool's, to parameters; `patched` answers a patch.
    """
    messages: list[Message] = []

    def add_call(tool: str, values: Sequence[str], answer: str) -> None:
        arguments = json.dumps(dict(zip(tools[tool], values, strict=False)))
        id = f"call_{len(messages)}"
        call = {"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": id, "content": answer})

    shell, patch = tools
    for each in examples:
        messages.append({"role": "user", "content": each.prompt})
        add_call(shell, [f"cat {shlex.quote(each.path)}"], each.before.strip("\n"))
        for block in _find_patches(each):
            add_call(patch, [each.path, block.old, block.new], fill_template(patched, path=each.path))
        messages.append({"role": "assistant", "content": "The repair is in place."})
    return messages


def _find_patches(example: Example) -> list[patching.Block]:
    # find the shortest patches that the patch tool, which has no whole-line matching, applies as intended
    before, after = example.before.encode(), example.after.encode()
    for context_lines in (0, 1, 3):
        with suppress(patching.Inexpressible, NoMatch, Ambiguous):
            patches = patching.compute_blocks(example.path, before, after, context_lines)
            patched = before
            for block in patches:
                patched = replace_once(patched, block.old, block.new)
            if patched == after:
                return patches
    raise ConfigError(f"agent.options.examples: no patches repair {example.id or example.path}", fix="leave it out")
