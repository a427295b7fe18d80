"""Nano's two tools, and `nano4`'s `view_file`, on a dictionary of files: the simulation for the warm start.

Only the commands ``cat``, ``ls`` and ``grep -n`` are simulated. Texts and the search and replace are Nano's own, so the
real agent answers the same (a test compares them, character by character).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from coderepairrl.agents.patching import Ambiguous, NoMatch, replace_once
from coderepairrl.agents.texts import fill_template
from workshop.tiny.prompt import TEXTS


class Workspace:
    """A small repository that answers as Nano would."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Run a tool call; returns the text of its result."""
        if name == "shell":
            cmd = arguments.get("cmd")
            return self.shell(cmd) if isinstance(cmd, str) else fill_template(TEXTS.missing, missing="cmd")
        if name == "apply_patch":
            keys = ("file_path", "old_content", "new_content")
            values = [arguments.get(key) for key in keys]
            if missing := [key for key, value in zip(keys, values, strict=True) if value is None]:
                return fill_template(TEXTS.missing, missing=", ".join(missing))
            path, old, new = map(str, values)
            return self.apply_patch(path, old, new)
        return TEXTS.unknown_tool

    def shell(self, cmd: str) -> str:
        """Run one simple command; any other command is not found."""
        try:
            words = shlex.split(cmd)
        except ValueError:
            return fill_template(TEXTS.failed, code=2)
        match words:
            case ["ls"]:
                return "\n".join(sorted(self.files))
            case ["cat", path]:
                if path not in self.files:
                    return f"{fill_template(TEXTS.failed, code=1)}\ncat: {path}: No such file or directory"
                return self.files[path].strip("\n").rstrip()
            case ["grep", "-n", text, path]:
                lines = self.files.get(path, "").splitlines()
                matches = [f"{number}:{line}" for number, line in enumerate(lines, 1) if text in line]
                return "\n".join(matches) or TEXTS.no_match
        return fill_template(TEXTS.failed, code=127)

    def view_file(self, path: str) -> str:
        """Show a whole file, as `nano4` does."""
        return self.files[path].rstrip("\n") if path in self.files else TEXTS.no_file

    def apply_patch(self, path: str, old: str, new: str) -> str:
        """Replace the only occurrence of `old`."""
        if old == new:
            return TEXTS.identical
        if path not in self.files:
            if old:
                return fill_template(TEXTS.no_file, path=path)
            self.files[path] = new
            return TEXTS.created
        if not old:
            return TEXTS.empty_old
        try:
            self.files[path] = replace_once(self.files[path].encode(), old, new).decode()
        except NoMatch:
            return TEXTS.absent
        except Ambiguous as error:
            return fill_template(TEXTS.ambiguous, count=error.count)
        return TEXTS.patched
