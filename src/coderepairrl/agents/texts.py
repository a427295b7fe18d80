"""All texts that Nano sends: system prompt, tools, warnings, errors. Also parses agents' options, which replace them.

`FULL` is for instruction-tuned models of billions of parameters, `COMPACT` for a tiny policy with a context of about
1,024 tokens. Placeholders are literal ``{name}``, so other braces need no escaping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from coderepairrl.errors import ConfigError
from coderepairrl.registry import check_options

SYSTEM = """\
You are an autonomous software engineer who works through a terminal. The repository in your working directory has a \
defect, which the user describes. You know nothing else about the repository. Your mission: find the cause and repair \
it in the files, with the smallest change that is right.

You have two tools:
- shell(cmd): run a command and read what it prints.
- apply_patch(file_path, old_content, new_content, context): replace one passage of one file.

Work in four phases:
1. Discover: find the files and names that the issue is about.
2. Analyse: read the code around them until you can explain the defect.
3. Plan: decide on the smallest change that repairs it.
4. Execute: make that change, one patch at a time.

Principles:
- Every call has a purpose. Say in one sentence what you want to learn or change, then make the call.
- Prefer concise commands. Outputs are cut after {output_chars} characters and commands after {shell_seconds} seconds.
- Change only what the repair needs.

Hints for shell:
- Look for identifiers with grep -rn NAME DIR (or rg NAME), limited to a folder or a file type.
- Read a range of lines with sed -n '40,80p' FILE, or a match with its surroundings with grep -n -C 5.
- List single folders with ls. Each command starts in the root of the repository.

Hints for apply_patch:
- Make each patch one complete, self-contained change.
- old_content must occur exactly once in the file, copied character by character, indentation included.
- An empty old_content creates a new file.

You cannot ask questions, and nobody will answer: learn from what the tools print. Your calls, tokens and time are \
limited, so watch the warnings and spend the rest on the repair. Go on until the repair stands in the files; then \
reply with a short summary and no tool call, which submits it."""

COMPACT_SYSTEM = "Repair the bug. Find it with shell, change it with apply_patch, then say done."


@dataclass(frozen=True, slots=True)
class Texts:
    """Nano's answers. The fields are the keys of its option `messages`."""

    nudge: str = (
        "You made no tool call and the repository is unchanged. Do not stop here: use shell to investigate and "
        "apply_patch to repair the defect."
    )
    critical_tokens: str = "[warning] Almost no tokens are left. Apply your best repair now."
    low_tokens: str = "[warning] Few tokens are left. Repair the main defect only."
    few_calls: str = "[warning] {left} calls are left. Do the most important thing first."
    last_call: str = "[warning] 1 call is left. Use it to apply your best repair."
    refused: str = "not executed: the limit of {limit} is reached"

    truncated: str = "... output truncated"
    silent: str = "command succeeded"
    failed: str = "command failed with exit code {code}"
    no_match: str = "no match (exit code 1)"
    timed_out: str = "command timed out after {seconds} s"

    malformed: str = "error: the arguments are not a JSON object: {problem}"
    unknown_tool: str = "error: there is no tool {name}; the tools are shell and apply_patch"
    missing: str = "error: {name} needs {missing}"
    not_text: str = "error: {name} cannot take this {argument}: {problem}"

    patched: str = "patch applied to {path}"
    created: str = "created {path}"
    outside: str = "error: {path} is outside the repository"
    no_file: str = "error: {path} does not exist; an empty old_content would create it"
    unreadable: str = "error: {path}: {problem}"
    absent: str = "error: old_content does not occur in {path}; look up its exact text with grep -n"
    ambiguous: str = "error: old_content occurs {count} times in {path}; give more of the surrounding text, or context"
    context_absent: str = "error: context does not single out one of the {count} occurrences in {path}"
    identical: str = "error: old_content and new_content are the same"
    empty_old: str = "error: {path} exists and is not empty; old_content must say what to replace"


FULL = Texts()

COMPACT = replace(
    FULL,
    nudge="use a tool",
    critical_tokens="[patch now]",
    low_tokens="[few tokens]",
    few_calls="[{left} calls left]",
    last_call="[1 call left]",
    refused="limit",
    truncated="...",
    silent="ok",
    failed="exit {code}",
    no_match="no match",
    timed_out="timeout",
    malformed="error: bad JSON",
    unknown_tool="error: no such tool",
    missing="error: missing {missing}",
    not_text="error: bad {argument}",
    patched="ok",
    created="ok",
    outside="error: outside",
    no_file="error: no file",
    unreadable="error: unreadable",
    absent="error: not found",
    ambiguous="error: found {count} times",
    context_absent="error: found {count} times",
    identical="error: same",
    empty_old="error: file exists",
)


_PLACEHOLDER = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")  # {{name}} belongs to another template language


def fill_template(text: str, **values: object) -> str:
    """Replace each ``{name}`` that `values` has; all other braces stay, even in values.

    >>> fill_template("{left} of {what}, {{left}}", left=3)
    '3 of {what}, {{left}}'
    >>> fill_template('{"limits": {"calls": {left}}}', left=3)
    '{"limits": {"calls": 3}}'
    """
    return _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), text)


def find_placeholders(text: str) -> list[str]:
    """Names of the placeholders in `text`.

    >>> find_placeholders('{"a": {"b": {tokens}}}, {{model}}')
    ['tokens']
    """
    return [match[1] for match in _PLACEHOLDER.finditer(text) if match[1]]


TOOL_DESCRIPTIONS: Mapping[str, str] = {
    "shell": "Run a command with bash in the root of the repository. Returns what it prints, both streams together.",
    "apply_patch": (
        "Replace one passage of one file. old_content must occur exactly once in the file, character by character; "
        "when the call fails, read the file again. An empty old_content creates a new file."
    ),
}

_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "shell": {"cmd": "The command line."},
    "apply_patch": {
        "file_path": "Path of the file, relative to the root of the repository.",
        "old_content": "The text to replace, exactly as it stands in the file.",
        "new_content": "The text to put in its place.",
        "context": "Optional: a longer passage that contains old_content, when old_content alone is not unique.",
    },
}


@dataclass(frozen=True, slots=True)
class Wording:
    """All texts of a Nano-like agent."""

    system: str
    compact_system: str
    full: Texts
    compact: Texts
    descriptions: Mapping[str, str]
    """Description by tool."""
    parameters: Mapping[str, Mapping[str, str]]
    """Descriptions of parameters by tool."""
    optional: frozenset[str] = frozenset()
    """Optional parameters, left out of compact tools."""
    integers: frozenset[str] = frozenset()
    """Parameters that are integers; others are strings."""

    def renamed(self, names: Mapping[str, str]) -> Wording:
        """Rename tools throughout prompts and answers."""
        if not names:
            return self
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")

        def reword(text: str) -> str:
            return pattern.sub(lambda match: names[match[1]], text)

        return replace(
            self,
            system=reword(self.system),
            compact_system=reword(self.compact_system),
            full=Texts(**{key: reword(text) for key, text in asdict(self.full).items()}),
            compact=Texts(**{key: reword(text) for key, text in asdict(self.compact).items()}),
            descriptions={names.get(tool, tool): text for tool, text in self.descriptions.items()},
            parameters={names.get(tool, tool): each for tool, each in self.parameters.items()},
        )


NANO = Wording(SYSTEM, COMPACT_SYSTEM, FULL, COMPACT, TOOL_DESCRIPTIONS, _PARAMETERS, frozenset({"context"}))


def build_tool_schemas(style: str, descriptions: Mapping[str, str], wording: Wording = NANO) -> list[dict[str, Any]]:
    """Tools in OpenAI's schema; `compact` omits descriptions and optional parameters.

    >>> [tool["function"]["name"] for tool in build_tool_schemas("compact", {})]
    ['shell', 'apply_patch']
    """
    compact = style == "compact"
    schemas = []
    for name, parameters in wording.parameters.items():
        described: dict[str, dict[str, str]] = {}
        for key, text in parameters.items():
            if not (compact and key in wording.optional):
                kind = "integer" if key in wording.integers else "string"
                described[key] = {"type": kind} if compact else {"type": kind, "description": text}
        function: dict[str, Any] = {"name": name}
        if text := descriptions.get(name, "" if compact else wording.descriptions[name]):
            function["description"] = text
        required = [key for key in described if key not in wording.optional]
        function["parameters"] = {"type": "object", "properties": described, "required": required}
        schemas.append({"type": "function", "function": function})
    return schemas


T = TypeVar("T")


def build_options(cls: type[T], agent: str, options: Mapping[str, Any]) -> T:
    """Build the dataclass `cls`, checking names and types.

    Raises `ConfigError` with the nearest option, or the location of an invalid value.
    """
    from pydantic import TypeAdapter, ValidationError

    check_options("agent", agent, cls, options)
    try:
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("agent", "options", *first["loc"])))
        raise ConfigError(f"{where}: {first['msg']}, not {first['input']!r}") from error
