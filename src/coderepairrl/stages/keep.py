"""Select attempts from run folders and files into one file of examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl.config.sections.evaluation import Keep
from coderepairrl.errors import UsageError
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.runs.folder import write_atomic
from coderepairrl.stages.conversations import source
from coderepairrl.stages.select import select

_AT_ONCE = 1024  # Attempts with conversations in memory.


def keep(sources: Sequence[Path], wanted: Keep, target: Path) -> dict[str, Any]:
    """Write examples of attempts that pass `wanted` to `target`; return the account, also in ``.json``.

    Equal sources give equal files. Raises `UsageError` for bad sources, a filter that leaves no attempt, and
    incompatible conversations.
    """
    if twice := [path for path in sources if [each.resolve() for each in sources].count(path.resolve()) > 1]:
        raise UsageError(f"{twice[0]} is there twice", fix="name it once")
    account = target.with_suffix(".json")
    if account.exists() and not target.exists():
        raise UsageError(f"{account} is there, and would be written over", fix="name another file with -o")
    opened = [source(path) for path in sources]
    selection = select([each for number, one in enumerate(opened) for each in one.candidates(number)], wanted)
    exact = rendered = 0

    def examples() -> Iterator[Example]:
        nonlocal exact, rendered
        for number, one in enumerate(opened):
            wanted = sorted(each.episode for each in selection.kept if each.source == number)
            for at in range(0, len(wanted), _AT_ONCE):  # logs have them in the order in which they ended
                some = one.examples(set(wanted[at : at + _AT_ONCE]).__contains__)
                for example in sorted(some, key=lambda each: each.id):
                    exact, rendered = exact + example.exact, rendered + (not example.exact)
                    yield example if len(opened) == 1 else _of(number, example)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        written = write_examples(target, examples())
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error}", fix="name another file with -o") from error
    result = {
        "examples": str(target),
        "rows": written,
        "exact": exact,
        "rendered": rendered,
        "sources": list(map(str, sources)),
        **selection.as_json(),
        "keep": wanted.model_dump(mode="json"),
    }
    write_atomic(account, json.dumps(result, indent=2) + "\n")
    return result


def _of(number: int, example: Example) -> Example:
    # Sources may share ids of attempts.
    return replace(example, id=f"{number}:{example.id}", episode=f"{number}:{example.episode}")
