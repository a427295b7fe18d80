"""Collect attempts worth learning from: made by a policy, or selected from existing runs and files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.config.schema import Keep
from coderepairrl.errors import UsageError, replace_crrl
from coderepairrl.printable import format_count
from coderepairrl.runs import logged_episodes, write_json
from coderepairrl.runs.examples import NAME, Example, write_examples
from coderepairrl.stages.conversations import open_conversations
from coderepairrl.stages.evaluation import Evaluation, attempt_all
from coderepairrl.stages.results import format_cost
from coderepairrl.stages.select import format_selection, select_candidates
from coderepairrl.stats.measures import Cost, Prices, sum_costs

_CHUNK = 1024  # Attempts whose conversations are in memory at a time.


async def collect_attempts(
    planned: Sequence[Evaluation], *, jobs: int = 1, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Make the attempts of all `planned`, `jobs` evaluations at a time; return the summary of those kept, and the cost.

    Raises as `attempt_all` and `keep_attempts`.
    """
    await attempt_all(planned, jobs=jobs, say=say)
    first = planned[0]
    target = first.folder.path.parent if len(planned) > 1 else first.folder.path
    cost, money = Cost(), list[float]()
    for each in planned:
        cost_of_run = sum_costs(logged_episodes(each.folder.records()))
        cost = cost.plus(cost_of_run)
        if prices := each.folder.about().get("prices"):
            money.append(cost_of_run.money(Prices(*prices)))
    summary = keep_attempts([each.folder.path for each in planned], first.plan.config.keep, target / NAME)
    return {"run": str(target), **summary, "cost": cost._asdict() | ({"money": sum(money)} if money else {})}


def select_attempts(words: Sequence[str], output: Path | None) -> dict[str, Any]:
    """Select attempts from runs and files of examples, and write them to `output`, a file or folder.

    `words` are the runs and files, and filters ``keep.NAME=VALUE``. A single run supplies the other filters by its
    settings, and without `output` its examples are replaced. Returns the summary of `keep_attempts`, and raises as it,
    `ConfigError` for an unknown filter, and `UsageError` for other wrong `words`.
    """
    sources, filters = [Path(each) for each in words if "=" not in each], [each for each in words if "=" in each]
    if not sources:
        raise UsageError("no run is named", fix="crrl collect --select RUN... [keep.NAME=VALUE]...")
    if wrong := next((each for each in filters if not each.startswith(("keep.", "keep="))), ""):
        raise UsageError(f"{wrong!r} is not a filter", fix="write keep.above=0.5, for example")
    run = sources[0] if len(sources) == 1 and (sources[0] / "run.json").is_file() else None
    if output is None and run is None:
        raise UsageError("no file for the examples is named", fix="-o FILE.parquet, or -o FOLDER")
    base = configs.load_config(run) if run else configs.validate_config({"run": {"name": "selection"}}, "crrl collect")
    target = output or sources[0]
    keep = configs.apply_overrides(base, filters).keep
    return keep_attempts(sources, keep, target if target.suffix == ".parquet" else target / NAME)


def keep_attempts(sources: Sequence[Path], keep: Keep, target: Path) -> dict[str, Any]:
    """Write the attempts that pass the filters `keep` to `target` as examples; return a summary, also written as JSON.

    The summary's file is `target` with the suffix ``.json``. Equal sources give equal files. Raises `UsageError` for
    bad sources, a filter that leaves no attempt, and conversations that cannot share a file.
    """
    if twice := [path for path in sources if [each.resolve() for each in sources].count(path.resolve()) > 1]:
        raise UsageError(f"{twice[0]} is named twice", fix="name it once")
    summary_file = target.with_suffix(".json")
    if summary_file.exists() and not target.exists():
        raise UsageError(f"{summary_file} already exists and would be overwritten", fix="name another file with -o")
    opened = [open_conversations(path) for path in sources]
    selection = select_candidates(
        [each for number, source in enumerate(opened) for each in source.candidates(number)], keep
    )
    exact = rendered = 0

    def examples() -> Iterator[Example]:
        nonlocal exact, rendered
        for number, source in enumerate(opened):
            kept_ids = sorted(each.episode for each in selection.kept if each.source == number)
            for at in range(0, len(kept_ids), _CHUNK):  # sorted: a log has them in the order in which they ended
                chunk = source.examples(set(kept_ids[at : at + _CHUNK]).__contains__)
                for example in sorted(chunk, key=lambda each: each.id):
                    exact, rendered = exact + example.exact, rendered + (not example.exact)
                    if len(opened) > 1:  # sources may have attempts with equal ids
                        example = replace(example, id=f"{number}:{example.id}", episode=f"{number}:{example.episode}")
                    yield example

    written = write_examples(target, examples())
    result = {
        "examples": str(target),
        "rows": written,
        "exact": exact,
        "rendered": rendered,
        "sources": list(map(str, sources)),
        **selection.as_json(),
        "keep": keep.model_dump(mode="json"),
    }
    write_json(summary_file, result)
    return result


def format_collection(summary: Mapping[str, Any]) -> str:
    """Format the summary that `collect` or `select_attempts` returns."""
    lines = format_selection(summary)
    rows = [f"{summary[form]} {meaning}" for form, meaning in _FORMS.items() if summary[form]]
    lines += ["", f"examples: {summary['examples']}, {format_count(summary['rows'], 'row')} ({', '.join(rows)})"]
    if cost := summary.get("cost"):
        lines.append(format_cost(cost))
        runs = " ".join(map(shlex.quote, summary["sources"]))
        output = "" if len(summary["sources"]) == 1 else f" -o {shlex.quote(summary['run'])}"
        command = replace_crrl(f"crrl collect --select {runs} keep.best=1{output}")
        lines.append(f"next: {command}  selects from these attempts again")
    command = replace_crrl(f"crrl sft FILE data.paths={shlex.quote(summary['examples'])}")
    return "\n".join([*lines, f"next: {command}  fine-tunes on them with the settings in FILE, such as sft-tiny"])


_FORMS = {"exact": "with the sampled tokens", "rendered": "to be rendered with the learning model's chat template"}
