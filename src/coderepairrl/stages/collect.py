"""Collection of attempts worth learning from: made by a policy, or selected from runs and files that exist."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.config.schema import Keep
from coderepairrl.errors import UsageError, as_called
from coderepairrl.printable import counted
from coderepairrl.runs import logged_episodes, write_atomic
from coderepairrl.runs.examples import NAME, Example, write_examples
from coderepairrl.stages.conversations import open_conversations
from coderepairrl.stages.evaluation import Evaluation, attempt_all
from coderepairrl.stages.results import cost_as_text
from coderepairrl.stages.select import format_selection, select
from coderepairrl.stats.measures import Prices, Spent, spent

_AT_ONCE = 1024  # Attempts with conversations in memory.


async def collect(
    planned: Sequence[Evaluation], *, jobs: int = 1, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Make the attempts of all `planned`, `jobs` at a time; return what is kept of them, and the cost.

    Raises as `attempt_all` and `keep_attempts`.
    """
    await attempt_all(planned, jobs=jobs, say=say)
    first = planned[0]
    home = first.folder.path.parent if len(planned) > 1 else first.folder.path
    cost, money = Spent(), list[float]()
    for each in planned:
        cost_of_run = spent(logged_episodes(each.folder.records()))
        cost = cost.plus(cost_of_run)
        if prices := each.folder.about().get("prices"):
            money.append(cost_of_run.money(Prices(*prices)))
    paid = {"money": sum(money)} if money else {}
    kept_examples = keep_attempts([each.folder.path for each in planned], first.plan.config.keep, home / NAME)
    return {"run": str(home), **kept_examples, "cost": {**cost._asdict(), **paid}}


def select_attempts(words: Sequence[str], output: Path | None) -> dict[str, Any]:
    """Write the attempts that the filters ``keep.NAME=VALUE`` among `words` keep to `output`, a file or folder.

    The other `words` are runs and files of examples. A single run supplies the other filters, and gets new examples if
    there is no `output`. Raises as `keep_attempts`, `ConfigError` for an unknown setting, and `UsageError` for others.
    """
    sources, filters = [Path(each) for each in words if "=" not in each], [each for each in words if "=" in each]
    if not sources:
        raise UsageError("no run is named", fix="crrl collect --select RUN... [keep.NAME=VALUE]...")
    if wrong := next((each for each in filters if not each.startswith(("keep.", "keep="))), ""):
        raise UsageError(f"{wrong!r} is no filter", fix="write keep.above=0.5, for example")
    one = sources[0] if len(sources) == 1 and (sources[0] / "run.json").is_file() else None
    if output is None and one is None:
        raise UsageError("no file for the examples is named", fix="-o FILE.parquet, or -o FOLDER")
    base = configs.load_config(one) if one else configs.validate({"run": {"name": "selection"}}, "crrl collect")
    target = output or sources[0]
    wanted = configs.override(base, filters).keep
    return keep_attempts(sources, wanted, target if target.suffix == ".parquet" else target / NAME)


def keep_attempts(sources: Sequence[Path], wanted: Keep, target: Path) -> dict[str, Any]:
    """Write examples of attempts that pass `wanted` to `target`; return the account, also in ``.json``.

    Equal sources give equal files. Raises `UsageError` for bad sources, a filter that leaves no attempt, and
    incompatible conversations.
    """
    if twice := [path for path in sources if [each.resolve() for each in sources].count(path.resolve()) > 1]:
        raise UsageError(f"{twice[0]} is named twice", fix="name it once")
    account = target.with_suffix(".json")
    if account.exists() and not target.exists():
        raise UsageError(f"{account} exists already", fix="name another file with -o")
    opened = [open_conversations(path) for path in sources]
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
                    yield example if len(opened) == 1 else _numbered_example(number, example)

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


def _numbered_example(number: int, example: Example) -> Example:
    # Sources may share ids of attempts.
    return replace(example, id=f"{number}:{example.id}", episode=f"{number}:{example.episode}")


def collected_as_text(found: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = format_selection(found)
    rows = [f"{found[how]} {meaning}" for how, meaning in _HOW.items() if found[how]]
    lines += ["", f"examples: {found['examples']}, {counted(found['rows'], 'row')} ({', '.join(rows)})"]
    if cost := found.get("cost"):
        lines.append(cost_as_text(cost))
        runs = " ".join(map(shlex.quote, found["sources"]))
        where = "" if len(found["sources"]) == 1 else f" -o {shlex.quote(found['run'])}"
        lines.append(
            f"next: {as_called(f'crrl collect --select {runs} keep.best=1{where}')}  selects again, without attempts"
        )
    learns = as_called(f"crrl sft FILE data.paths={shlex.quote(found['examples'])}")
    return "\n".join([*lines, f"next: {learns}  fine-tunes on them, by the settings of FILE, such as sft-tiny"])


_HOW = {"exact": "with the tokens that were sampled", "rendered": "to be rendered by the template of who learns"}
