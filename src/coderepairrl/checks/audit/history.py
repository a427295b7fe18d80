"""Search for the repair in a sandbox's git repository, where policies look for it.

All objects of its store, alternates included, should be reachable from HEAD and the tags of its ancestors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox

_GIT = "export GIT_NO_REPLACE_OBJECTS=1; g() { git -c 'safe.directory=*' \"$@\"; }; "
# Lists objects of the store that are not reached from HEAD and tags of its ancestors: awk keeps the ids before the line
# "." (reached), and prints lines after it (all) with other ids. Exit code 3: no repository or no commit; 4: programs
# are missing.
_LIST_UNREACHABLE = (
    _GIT
    + """
[ -e .git ] || exit 3
command -v git >/dev/null && command -v awk >/dev/null || exit 4
g rev-parse --verify --quiet 'HEAD^{commit}' >/dev/null || exit 3
tags() { g for-each-ref --merged=HEAD --format='%(objectname)' refs/tags; }
{ tags; { echo HEAD; tags; } | g rev-list --objects --stdin || echo failed
  echo .; g cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' || echo failed
} | awk '$0 == "failed" { exit 5 } rest { if (!($1 in own)) print; next } $0 == "." { rest = 1; next } { own[$1] = 1 }'
"""
)
_LIST_NAMES = _GIT + "g for-each-ref --no-merged=HEAD --format='%(refname:short)'; g reflog --all --format=%gd"
# Counts lines that contain a text. Exit code 2: git failed, which a pipe would hide.
_COUNT_LINES = (
    _GIT
    + """
exec 3>&1
ended=$({ { g cat-file --batch; echo $? >&4; } | grep -a -c -F -e "$1" >&3; } 4>&1)
[ "$ended" = 0 ] || { echo "git cat-file: exit code $ended"; exit 2; }
"""
)
_TIMEOUT_SECONDS = 600.0
_MOST_BYTES = 256 << 20
_MOST_NAMES = 3
_SHORTEST = 12  # Least characters of a line: other texts hardly have one this long by chance.


@dataclass(frozen=True, slots=True)
class History:
    """Unreachable objects; `repair` says which one has the repair, or is empty."""

    repair: str
    commits: int
    """Number of unreachable commits."""
    objects: int
    """Number of all unreachable objects."""
    names: tuple[str, ...] = ()
    """References and reflog entries that lead there."""


async def find_unreachable(sandbox: Sandbox) -> dict[str, str]:
    """Kinds (``commit``, ``blob``, ...) of unreachable objects, by id. Raises `SandboxFault`."""
    listing = await sandbox.exec(["sh", "-c", _LIST_UNREACHABLE], timeout=_TIMEOUT_SECONDS, max_bytes=_MOST_BYTES)
    if listing.exit_code == 3 and not listing.timed_out:
        return {}
    if not listing.ok or listing.truncated:
        how = "it has no git or no awk" if listing.exit_code == 4 else listing.output[-200:].decode("utf-8", "replace")
        raise SandboxFault(f"the objects of the repository cannot be listed: {how or 'out of time'}")
    rows = (line.split() for line in listing.output.decode("ascii", "replace").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


async def search_history(
    sandbox: Sandbox, objects: Mapping[str, str], before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]
) -> History:
    """Search `objects` (`find_unreachable`) for the change from `before` to `after`, contents by path.

    Looks for repaired files and for the longest added line. Raises `SandboxFault`.
    """
    commits = sum(kind == "commit" for kind in objects.values())
    if not objects:
        return History("", 0, 0)
    listing = await sandbox.exec(["sh", "-c", _LIST_NAMES], timeout=_TIMEOUT_SECONDS)
    names = tuple(listing.output.decode("utf-8", "replace").splitlines()[:_MOST_NAMES]) if listing.ok else ()
    return History(await _find_repair(sandbox, objects, before, after), commits, len(objects), names)


async def _find_repair(
    sandbox: Sandbox, objects: Mapping[str, str], before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]
) -> str:
    for path, content in after.items():
        if content is None:
            continue
        hashed = await sandbox.exec(["git", "hash-object", "--no-filters", "--stdin"], stdin=content)
        if hashed.ok and hashed.output.decode("ascii", "replace").strip() in objects:
            return f"{path} as the reference leaves it"
    line = _find_longest_added_line(before, after)
    blobs = "".join(f"{name}\n" for name, kind in objects.items() if kind == "blob").encode()
    if not line or not blobs:
        return ""
    count = await sandbox.exec(["sh", "-c", _COUNT_LINES, "sh", line], stdin=blobs, timeout=_TIMEOUT_SECONDS)
    if not count.ok:
        raise SandboxFault(f"the objects of the repository cannot be read: {count.output[-200:]!r}")
    return f"a line of the reference: {line}" if count.output.strip() != b"0" else ""


def _find_longest_added_line(before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]) -> str:
    old, new = (
        {line.strip().decode("utf-8", "replace") for content in side.values() for line in (content or b"").splitlines()}
        for side in (before, after)
    )
    return max((line for line in sorted(new - old) if len(line) >= _SHORTEST), key=len, default="")
