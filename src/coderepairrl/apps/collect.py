"""``crrl collect`` and ``crrl select``: examples to learn from (docs/guides/collect.md)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.apps.evaluate import Evaluation, attempt, say_nothing
from coderepairrl.errors import UsageError, as_called
from coderepairrl.printable import counted
from coderepairrl.processes.signals import until_interrupted
from coderepairrl.runs import logged_episodes
from coderepairrl.runs.examples import NAME
from coderepairrl.stages.keep import keep
from coderepairrl.stages.select import table
from coderepairrl.stats.measures import Prices, Spent, spent


async def collect(
    planned: Sequence[Evaluation], *, resume: bool = False, jobs: int = 1, say: Callable[[str], None] = say_nothing
) -> dict[str, Any]:
    """Make the attempts of all `planned`, `jobs` at a time; returns what is kept of them, and the cost.

    Raises as `attempt` and `keep`, and `Interrupted`.
    """
    several = len(planned) > 1
    home = planned[0].folder.path.parent if several else planned[0].folder.path
    again = f"the same command with -o {home} --resume" if several else f"crrl collect {home} --resume"
    await until_interrupted(attempt(planned, resume=resume, collects=True, jobs=jobs, say=say), fix=again)
    cost, money = Spent(), 0.0
    for each in planned:
        cost_of_run = spent(logged_episodes(each.folder.records()))
        prices = each.folder.about().get("prices")
        cost, money = cost.plus(cost_of_run), money + (cost_of_run.money(Prices(*prices)) if prices else 0.0)
    paid = {"money": money} if any(each.folder.about().get("prices") for each in planned) else {}
    kept_examples = keep([each.folder.path for each in planned], planned[0].plan.config.keep, home / NAME)
    return {"run": str(home), **kept_examples, "cost": {**cost._asdict(), **paid}}


def select(sources: Sequence[Path], given: Sequence[str], output: Path | None) -> dict[str, Any]:
    """Write the attempts in `sources` that the filters ``keep.NAME=VALUE`` keep to `output`, a file or folder.

    A single run supplies the other filters, and gets new examples if there is no `output`. Raises as `keep`, and
    `ConfigError` for an unknown setting.
    """
    if wrong := next((each for each in given if not each.startswith(("keep.", "keep="))), ""):
        raise UsageError(f"{wrong!r} is no filter", fix="write keep.above=0.5, for example")
    one = sources[0] if len(sources) == 1 and (sources[0] / "run.json").is_file() else None
    if output is None and one is None:
        raise UsageError("no file for the examples is named", fix="-o FILE.parquet, or -o FOLDER")
    plain = configs.validate({"run": {"name": "selection"}}, "crrl select")
    chosen = configs.override(configs.load(one) if one else plain, given)
    target = output or sources[0]
    return keep(sources, chosen.keep, target if target.suffix == ".parquet" else target / NAME)


def as_text(found: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = table(found)
    rows = [f"{found[how]} {meaning}" for how, meaning in _HOW.items() if found[how]]
    lines += ["", f"examples: {found['examples']}, {counted(found['rows'], 'row')} ({', '.join(rows)})"]
    if cost := found.get("cost"):
        money = f", money {cost['money']:.4f}" if "money" in cost else ""
        lines.append(
            f"cost: {counted(cost['calls'], 'call')}, {counted(cost['prompt_tokens'], 'prompt token')},"
            f" {counted(cost['sampled_tokens'], 'sampled token')}, {cost['attempt_seconds']:,.1f} s of attempts{money}"
        )
        runs = " ".join(map(shlex.quote, found["sources"]))
        where = "" if len(found["sources"]) == 1 else f" -o {shlex.quote(found['run'])}"
        lines.append(f"next: {as_called(f'crrl select {runs} keep.best=1{where}')}  selects anew, without attempts")
    learns = as_called(f"crrl sft FILE data.paths={shlex.quote(found['examples'])}")
    return "\n".join([*lines, f"next: {learns}  fine-tunes on them, by the settings of FILE, such as sft-tiny"])


_HOW = {"exact": "with the tokens that were sampled", "rendered": "to be rendered by the template of who learns"}
