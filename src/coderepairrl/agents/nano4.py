"""`nano4`: Nano with four tools: bash, str_replace, view_file and write_file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coderepairrl.agents.nano import Nano
from coderepairrl.agents.texts import COMPACT, FULL, SYSTEM, Wording, fill_template
from coderepairrl.agents.tools import Result, Tools

# Nano's system prompt, with another list of tools and other names in the rest.
_HEAD, _, _REST = SYSTEM.partition("You have two tools:")
_REST = _REST.partition("Work in four phases:")[2]
_TOOLS = """\
You have four tools:
- bash(command): run a command and read what it prints.
- view_file(path, start, end): read a file, or some of its lines.
- str_replace(path, old_str, new_str): replace one passage of one file.
- write_file(path, content): create a file, or replace all of it.

Work in four phases:"""
_WORDS = {"shell": "bash", "apply_patch": "str_replace", "old_content": "old_str", "patch": "edit"}


def _reword(text: str) -> str:
    return re.sub(r"\b(shell|apply_patch|old_content|patch)\b", lambda match: _WORDS[match[1]], text)


NANO4 = Wording(
    system=_HEAD
    + _TOOLS
    + _reword(_REST).replace("- An empty old_str creates a new file.", "- New files are for write_file."),
    compact_system="Repair the bug. Find it with bash and view_file, change it with str_replace, then say done.",
    full=replace(
        FULL,
        unknown_tool="error: there is no tool {name}; the tools are bash, view_file, str_replace and write_file",
        no_file="error: {path} does not exist; write_file would create it",
        nudge=_reword(FULL.nudge),
        absent=_reword(FULL.absent),
        ambiguous="error: old_str occurs {count} times in {path}; give more of the surrounding text",
        identical=_reword(FULL.identical),
        empty_old="error: old_str is empty; write_file replaces all of {path}",
        patched="changed {path}",
    ),
    compact=replace(COMPACT, empty_old="error: old_str is empty"),
    descriptions={
        "bash": "Run a command with bash in the root of the repository. Returns what it prints, both streams together.",
        "view_file": "Read a file, or its lines from start to end (counted from 1, both included).",
        "str_replace": (
            "Replace one passage of one file. old_str must occur exactly once in the file, character by character; "
            "when the call fails, read the file again."
        ),
        "write_file": "Create a file, or replace all of it.",
    },
    parameters={
        "bash": {"command": "The command line."},
        "view_file": {
            "path": "Path of the file, relative to the root of the repository.",
            "start": "Optional: the first line to show.",
            "end": "Optional: the last line to show.",
        },
        "str_replace": {
            "path": "Path of the file, relative to the root of the repository.",
            "old_str": "The text to replace, exactly as it stands in the file.",
            "new_str": "The text to put in its place.",
        },
        "write_file": {
            "path": "Path of the file, relative to the root of the repository.",
            "content": "All that the file shall hold.",
        },
    },
    optional=frozenset({"start", "end"}),
    integers=frozenset({"start", "end"}),
)
"""Texts of `nano4`; texts that name no tool are Nano's."""


class FourTools(Tools):
    """The four tools; `bash` and `str_replace` are Nano's under other names."""

    async def run(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Result | None:
        """See `Tools.run`."""
        if name == "bash":
            problem = self._check_arguments(name, command=arguments.get("command"))
            return problem or await self.shell({"cmd": arguments["command"]}, timeout)
        if name == "view_file":
            return await self.view(arguments)
        if name == "write_file":
            return await self.write_whole_file(arguments)
        return await self.replace(arguments) if name == "str_replace" else None

    def command_line(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `Tools.command_line`."""
        return str(arguments.get("command", "")) if name == "bash" else ""

    async def replace(self, arguments: Mapping[str, Any]) -> Result:
        """Patch a file like `Tools.apply_patch`, but never create one."""
        path, old, new = (arguments.get(name) for name in ("path", "old_str", "new_str"))
        if problem := self._check_arguments("str_replace", path=path, old_str=old, new_str=new):
            return problem
        if not old:
            return self._fail(self._texts.empty_old, path=path)
        return await self.apply_patch({"file_path": path, "old_content": old, "new_content": new})

    async def view(self, arguments: Mapping[str, Any]) -> Result:
        """Show a file or a range of its lines."""
        path, start, end = arguments.get("path"), arguments.get("start"), arguments.get("end")
        if problem := self._check_arguments("view_file", path=path):
            return problem
        for name, value in (("start", start), ("end", end)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                tool = self._names.get("view_file", "view_file")
                return self._fail(self._texts.not_text, name=tool, argument=name, problem="not a line number")
        path = self._relative_to_root(str(path))
        try:
            data = await self._read_text_file(path)
        except OSError as error:
            return self._fail_on_file(path, error)
        if data is None:
            return self._fail(self._texts.no_file, path=path)
        lines = data.decode("utf-8", "replace").split("\n")
        return Result("\n".join(lines[(start or 1) - 1 : end]).rstrip("\n") or self._texts.silent, True)

    async def write_whole_file(self, arguments: Mapping[str, Any]) -> Result:
        """Write a whole file."""
        path, content = arguments.get("path"), arguments.get("content")
        if problem := self._check_arguments("write_file", path=path, content=content):
            return problem
        path = self._relative_to_root(str(path))
        try:
            before = await self._read(path)
            await self._sandbox.write(path, str(content).encode())
        except OSError as error:
            return self._fail_on_file(path, error)
        self._record_edit(path, before, str(content).encode())
        return Result(fill_template(self._texts.created if before is None else self._texts.patched, path=path), True)


class Nano4(Nano):
    """Nano with four tools. Takes `NanoOptions` by name."""

    name = "nano4"
    wording = NANO4
    toolbox = FourTools
