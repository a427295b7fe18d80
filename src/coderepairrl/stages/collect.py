"""Collect attempts worth learning from: made by a policy, or selected from existing runs and files."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl import config as configs
from coderepairrl.config.schema import Keep
from coderepairrl.errors import UsageError, replace_crrl
from coderepairrl.printable import format_count, join_first
from coderepairrl.runs import logged_episodes, write_json
from coderepairrl.runs.examples import EXAMPLES_FILE, Example, write_examples
from coderepairrl.stages.conversations import Candidate, open_conversations
from coderepairrl.stages.evaluation import Evaluation, attempt_all
from coderepairrl.stages.results import format_cost
from coderepairrl.stats.measures import Cost, Prices, sum_costs

_CHUNK = 1024  # Attempts read at a time: their conversations must fit in memory.
_BALANCED_FIELDS = ("language", "repository", "task")  # `keep.total` takes their values in turn.
_WELL_FORMED = "well-formed tool calls"  # Arguments are a JSON object, and the tool was offered.
_DISTINCT = "distinct patches and conversations"  # Among duplicates of a task, the highest reward is kept.
_LISTED = 8  # Tasks, repositories and languages that are listed; the others are counted.


async def collect_attempts(
    planned: Sequence[Evaluation], *, jobs: int = 1, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Make the attempts of all `planned`, `jobs` policies at a time; return the summary of kept attempts, and the cost.

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
    summary = keep_attempts([each.folder.path for each in planned], first.plan.config.keep, target / EXAMPLES_FILE)
    return {"run": str(target), **summary, "cost": cost._asdict() | ({"money": sum(money)} if money else {})}


def select_attempts(words: Sequence[str], output: Path | None) -> dict[str, Any]:
    """Select attempts from runs and files of examples, and write them to `output`, a file or folder.

    `words` are the runs and files, and filters ``keep.NAME=VALUE``. A single run also has filters in its settings;
    without `output` its examples are replaced. Returns and raises as `keep_attempts`; also raises `ConfigError` for an
    unknown filter, and `UsageError` for other wrong `words`.
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
    return keep_attempts(sources, keep, target if target.suffix == ".parquet" else target / EXAMPLES_FILE)


def keep_attempts(sources: Sequence[Path], keep: Keep, target: Path) -> dict[str, Any]:
    """Write the attempts that pass the filters `keep` to `target` as examples, and beside it a summary as JSON.

    Returns the summary. Equal sources give equal files. Raises `UsageError` for bad sources, a filter that leaves no
    attempt, and conversations that cannot share a file.
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
            # sorted: a log has them in the order in which they ended
            kept_ids = sorted(each.episode for each in selection.kept if each.source == number)
            for start in range(0, len(kept_ids), _CHUNK):
                chunk = source.examples(set(kept_ids[start : start + _CHUNK]).__contains__)
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
    rows = [f"{summary[form]} {description}" for form, description in _FORMS.items() if summary[form]]
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


# -- filters (section ``keep``)


class FilterResult(NamedTuple):
    """Numbers of attempts that a filter dropped and left."""

    filter: str
    dropped: int
    left: int


class Selection(NamedTuple):
    """Selected attempts in reproducible order, and how the filters led to them."""

    kept: tuple[Candidate, ...]
    candidates: int
    """Number of attempts before the filters."""
    steps: tuple[FilterResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data, with counts by task, repository and language."""
        return {
            "attempts": self.candidates,
            "kept": len(self.kept),
            "tasks": len({each.task for each in self.kept}),
            "filters": [step._asdict() for step in self.steps],
            **{f"by_{field}": _count_kept(self.kept, field) for field in _BALANCED_FIELDS},
        }


Filter = Callable[[Sequence[Candidate]], Sequence[Candidate]]


def select_candidates(candidates: Sequence[Candidate], keep: Keep) -> Selection:
    """Apply the filters of `keep` in order. Raises `UsageError` that names a filter that leaves no attempt."""
    left = sorted(candidates, key=lambda each: each.key)
    if not left:
        raise UsageError("no attempt has a verdict to select from", fix="crrl collect makes some")
    steps = []
    for name, apply in _active_filters(keep):
        before, left = left, list(apply(left))
        steps.append(FilterResult(name, len(before) - len(left), len(left)))
        if not left:
            raise UsageError(
                f"{name} leaves none of {format_count(len(before), 'attempt')}", fix=_suggest_fix(name, before)
            )
    return Selection(tuple(sorted(left, key=lambda each: each.key)), len(candidates), tuple(steps))


def _active_filters(keep: Keep) -> Iterator[tuple[str, Filter]]:
    """Filters that `keep` switches on, named as on the command line."""

    def is_rewarded(each: Candidate) -> bool:
        return keep.above < 0 if each.reward is None else each.reward > keep.above

    yield f"keep.endings={','.join(keep.endings)}", lambda some: [each for each in some if each.ending in keep.endings]
    yield _WELL_FORMED, lambda some: [each for each in some if not each.malformed]
    yield f"keep.above={keep.above:g}", lambda some: list(filter(is_rewarded, some))
    if keep.passed:
        yield "keep.passed=true", lambda some: [each for each in some if each.passed]
    yield _DISTINCT, _drop_duplicates
    if keep.best > 0:
        yield f"keep.best={keep.best}", lambda some: _keep_best(some, keep.best)
    if keep.total > 0:
        yield f"keep.total={keep.total}", lambda some: _interleave(some, _BALANCED_FIELDS)[: keep.total]


def _sort_by_reward(attempts: Sequence[Candidate]) -> list[Candidate]:
    # highest first; those that were not judged come last
    return sorted(attempts, key=lambda each: float("inf") if each.reward is None else -each.reward)


def _drop_duplicates(attempts: Sequence[Candidate]) -> list[Candidate]:
    seen, kept = set[tuple[str, str]](), set[tuple[int, str]]()
    for each in _sort_by_reward(attempts):
        digests = {(each.task, digest) for digest in (each.patch, each.conversation) if digest}
        if not digests & seen:
            kept.add(each.key)
        seen |= digests
    return [each for each in attempts if each.key in kept]


def _keep_best(attempts: Sequence[Candidate], k: int) -> list[Candidate]:
    count_by_task = Counter[str]()
    best = []
    for each in _sort_by_reward(attempts):
        count_by_task[each.task] += 1
        if count_by_task[each.task] <= k:
            best.append(each)
    return sorted(best, key=lambda each: each.key)


def _interleave(attempts: Sequence[Candidate], fields: Sequence[str]) -> list[Candidate]:
    """Order attempts round robin over the values of the first field, and within a value over those of the next."""
    if not fields:
        return sorted(attempts, key=lambda each: _random_key(each.task, each.conversation, each.patch))
    groups = defaultdict[str, list[Candidate]](list)
    for each in attempts:
        groups[getattr(each, fields[0])].append(each)
    queues = [_interleave(group, fields[1:]) for group in groups.values()]
    queues.sort(key=lambda queue: _random_key(getattr(queue[0], fields[0])))
    longest = max(map(len, queues), default=0)
    return [queue[at] for at in range(longest) for queue in queues if at < len(queue)]


def _random_key(*parts: str) -> bytes:
    # the order depends only on contents, and so is the same on every machine; "0" is its seed
    return hashlib.blake2b("\0".join(["0", *parts]).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _suggest_fix(name: str, before: Sequence[Candidate]) -> str:
    field, _, _ = name.removeprefix("keep.").partition("=")
    if field == "endings":
        counts = Counter(each.ending for each in before).most_common()
        endings = ", ".join(f"{count} {ending}" for ending, count in counts)
        return f"their endings: {endings}; accept more of them: keep.endings=done,limit"
    if field == _WELL_FORMED:
        return f"for example: {before[0].malformed}"
    rewards = [each.reward for each in before if each.reward is not None]
    if field == "above" and rewards:
        return f"the highest reward is {max(rewards):g}: lower keep.above, or collect more attempts"
    if field == "above":
        return "none of them was judged: keep.above=-1 keeps attempts without a verdict, crrl grade judges patches"
    if field == "passed" and all(each.passed is None for each in before):
        return "none of them was judged: crrl grade judges patches"
    return "relax this filter, or collect more attempts"


def _count_kept(kept: Sequence[Candidate], field: str) -> dict[str, int]:
    return dict(sorted(Counter(getattr(each, field) for each in kept).items(), key=lambda pair: (-pair[1], pair[0])))


def format_selection(summary: Mapping[str, Any]) -> list[str]:
    """Format `Selection.as_json` as lines."""
    rows = [(f"{summary['attempts']:>7}", "", "attempts")]
    rows += [(f"{each['left']:>7}", f"-{each['dropped']}", each["filter"]) for each in summary["filters"]]
    lines = [f"{left} {dropped:>7}  {name}".rstrip() for left, dropped, name in rows]
    for part in _BALANCED_FIELDS:
        names = [f"{name} {count}" for name, count in summary[f"by_{part}"].items() if name]
        if names:
            plural = {"repository": "repositories"}.get(part, f"{part}s")
            lines.append(f"{len(names):>7} {plural if names[1:] else part}: {join_first(names, _LISTED)}")
    return lines
