"""Proposed repairs: whether they apply, pass tests, and win."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coderepairrl.agents.texts import FULL
from coderepairrl.agents.tools import Tools
from coderepairrl.errors import AgentFault
from coderepairrl.protocols import Sandbox

_LARGEST_SOURCE = 100_000
"""Bytes of a Python file that is asked whether it parses, in the process of all episodes."""
_COPY_SECONDS = 300.0
# without -p: there are sandboxes in which no mode can be changed; executable files are so from the beginning
_KEEP = 'find . -mindepth 1 -maxdepth 1 ! -name .git -exec cp -dR -t "$0" {} +'
_PUT_BACK = 'find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} + && cp -dR "$0"/. .'
_COMMENTS = ("#", "//")


@dataclass(frozen=True, slots=True)
class Proposal:
    """New file contents by path."""

    files: Mapping[str, bytes]

    @property
    def key(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """Key that ignores blanks, empty lines and comment lines.

        >>> Proposal({"a.py": b"# add\\nx = 1\\n"}).key == Proposal({"a.py": b"x  = 1\\n\\n"}).key
        True
        """
        return frozenset((path, tuple(_code(data))) for path, data in self.files.items())

    async def write(self, sandbox: Sandbox) -> bool:
        """Write all files; returns False if any failed. Raises `SandboxFault`."""
        try:
            for path, data in self.files.items():
                await sandbox.write(path, data)
        except OSError:  # the workspace is full, or a link leads out of it
            return False
        return True


def _code(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").expandtabs().splitlines()
    indented = ((len(line) - len(line.lstrip()), " ".join(line.split())) for line in lines)
    return [f"{depth}:{text}" for depth, text in indented if text and not text.startswith(_COMMENTS)]


@dataclass(slots=True)
class _Draft:
    sandbox: Sandbox
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def workdir(self) -> str:
        return self.sandbox.workdir

    async def read(self, path: str) -> bytes:
        return self.files[path] if path in self.files else await self.sandbox.read(path)

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        self.files[path] = data


async def draft(sandbox: Sandbox, edits: Sequence[Mapping[str, str]]) -> Proposal | None:
    """Apply `edits` (`direct.edits`) in memory.

    Returns None if one does not apply, nothing changes, or a Python file stops parsing. Raises `SandboxFault`.
    """
    drawn = _Draft(sandbox)
    tools = Tools(drawn, FULL, output_chars=0)  # type: ignore[arg-type]  # which only reads and writes files here
    for edit in edits:
        if not (await tools.apply_patch(edit, lines=True)).ok:
            return None
    before = {path: await _before(sandbox, path) for path in drawn.files}
    changed = {path: data for path, data in drawn.files.items() if data != before[path]}
    broken = (p for p, data in changed.items() if not _parses(p, data) and _parses(p, before[p] or b""))
    return Proposal(changed) if changed and next(broken, None) is None else None


async def _before(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path)
    except OSError:
        return None


def _parses(path: str, data: bytes) -> bool:
    if not path.endswith((".py", ".pyi")) or len(data) > _LARGEST_SOURCE:
        return True
    with warnings.catch_warnings():  # of invalid escapes
        warnings.simplefilter("ignore")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


async def passing(sandbox: Sandbox, proposal: Proposal, command: str, seconds: float) -> bool:
    """Whether `command` exits with 0 with `proposal` applied; then restore the workspace, except ``.git``.

    Raises `SandboxFault`, and `AgentFault` if the workspace cannot be copied.
    """
    result = await sandbox.exec(["mktemp", "-d"])
    copy = result.output.decode(errors="replace").strip()
    await _shell(sandbox, _KEEP, copy)
    try:
        if not await proposal.write(sandbox):
            return False
        return (await sandbox.exec(["bash", "-c", command], timeout=seconds)).ok
    finally:
        await _shell(sandbox, _PUT_BACK, copy)
        await sandbox.exec(["rm", "-rf", copy], timeout=_COPY_SECONDS)


async def _shell(sandbox: Sandbox, script: str, copy: str) -> None:
    done = await sandbox.exec(["sh", "-c", script, copy], timeout=_COPY_SECONDS)
    if not done.ok:
        raise AgentFault(f"the workspace cannot be copied: {done.output[-300:].decode(errors='replace').strip()}")


def elect(proposals: Sequence[Proposal]) -> Proposal | None:
    """Return the most common proposal; the first wins ties.

    >>> one, other = Proposal({"a.py": b"x = 1\\n"}), Proposal({"a.py": b"x = 2\\n"})
    >>> elect([one, other, other]) == other, elect([one, other]) == one, elect([])
    (True, True, None)
    """
    votes = Counter(each.key for each in proposals)
    return max(proposals, key=lambda each: votes[each.key], default=None)
