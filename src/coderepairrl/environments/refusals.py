"""Classification of failed builds: the index's fault, or the project's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.printable import printable

_SHOWN = 600
_AGAIN = "run it again: what was built is kept"
_OTHER = "UV_DEFAULT_INDEX names another index"
_OF_THE_INDEX = (
    (r"429 Too Many Requests", "the package index throttles us", f"wait, then {_AGAIN}"),
    (
        r"lack of valid authentication credentials|40[13] (Unauthorized|Forbidden)|407 Proxy",
        "the package index asks for another login",
        "set UV_DEFAULT_INDEX=https://USER:PASSWORD@HOST/...: builds are not shown it",
    ),
    (
        r"invalid peer certificate|certificate (has expired|is not yet valid|verify failed)",
        "the package index is not trusted",
        "compare this machine's clock with another one (date); SSL_CERT_FILE names certificates of one's own",
    ),
    (
        r"dns error|502 Bad Gateway|Connection refused|Network is unreachable",
        "the package index cannot be reached from here",
        f"prepare on a machine with a network; {_OTHER}",
    ),
    (
        r"Request failed after|error decoding response|error reading a body|HTTP status server error|timed out",
        "the package index broke off",
        f"{_AGAIN}; {_OTHER}",
    ),
    (r"Failed to extract archive|Hash mismatch", "the package index gave a damaged file", f"{_AGAIN}; {_OTHER}"),
)
"""Signs in uv's output, meanings, and fixes. A project that prints them deceives itself alone."""
_OWN = "The build backend returned an error"
"""Text of uv when the project's own code failed."""
_GONE = re.compile(r"404 Not Found|not found in the package registry|there (is|are) no versions? of|were not found")


def explained(name: str, printed: str, refused: Sequence[str]) -> CodeRepairError:
    """Error for workspace `name`, from uv's output and `refused` hosts."""
    last = printable(printed[-_SHOWN:])
    is_project_error = _OWN in printed
    for sign, words, fix in _OF_THE_INDEX:
        if not is_project_error and re.search(sign, printed):
            return PrerequisiteError(f"{words}: {last}", fix=fix)
    if not is_project_error and "tunnel" in printed and not refused:
        return PrerequisiteError(f"the package index cannot be reached from here: {last}", fix=_OTHER)
    hosts = printable(", ".join(dict.fromkeys(refused))[:_SHOWN])
    hosts = f" (it wanted {hosts}, which a build may not reach)" if hosts else ""
    fix = "correct its specification, or use its image"
    if "No module named 'pkg_resources'" in printed:
        fix += "; setuptools<81 has pkg_resources: among the requirements of a project, it holds for its build, too"
    if _GONE.search(printed):
        fix += "; UV_FIND_LINKS=FOLDER adds wheels that the index does not have"
    return TaskError(f"no environment can be built for {name}{hosts}: {last}", fix=fix)
