"""Metrics of an attempt: one function each, listed in `METRICS`.

A function returns None if undefined or unknown. Patch metrics also exist for non-empty patches alone
(``NAME_per_patch``): a mean over all attempts rises with fewer empty patches. docs/reference/metrics.md lists all.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from coderepairrl import rewards
from coderepairrl.report import localisation
from coderepairrl.rewards import MalformedPatch
from coderepairrl.rewards.verified import compute_identity
from coderepairrl.stats.intervals import SHARE_TOLERANCE, Interval, cluster_episodes, median_interval, slice_episodes
from coderepairrl.stats.measures import COUNTS as MEASURED_COUNTS
from coderepairrl.stats.measures import NAMES as MEASURED_NAMES
from coderepairrl.stats.measures import collect_columns, measure_episode, measure_interval, sum_costs
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode, Task, ToolCall

PER_PATCH = "_per_patch"
PER_TOOL = "tool_success/"
SIMILARITIES = ("patch_edits", "patch_lines", "patch_similarity", "nano_similarity", "draft_similarity", "file_match")
_EDITS = frozenset({"apply_patch", "edit", "patch", "write"})  # tools
# programs that print files
_READERS = frozenset({"awk", "cat", "diff", "egrep", "grep", "head", "less", "more", "nl", "rg", "sed", "tail", "wc"})
_FILE = re.compile(r"[\w./@+-]*\w\.[A-Za-z]\w{0,9}")  # a path with an extension
_MAX_COMMAND_CHARS = 10_000  # that are split into words
_CACHE_SIZE = 8  # several metrics in a row compare the same patches

MetricValues = Mapping[str, float]  # values of an attempt by metric


@dataclass(frozen=True, slots=True)
class AttemptData:
    """Episode, its task if kept, and files before any patch (None: did not exist; missing: unknown)."""

    episode: Episode
    task: Task | None = None
    sources: Mapping[str, bytes | None] | None = None

    @property
    def reference(self) -> bytes:
        """Reference patch; empty if unknown."""
        return self.task.reference if self.task is not None else b""

    @property
    def has_patch(self) -> bool:
        """Whether the patch is non-empty."""
        return bool(self.episode.patch.strip())


Measure = Callable[[AttemptData], float | None]


class Metric(NamedTuple):
    """Metric, and how it is summarised."""

    name: str
    measure: Measure
    unit: Literal["share", "count", "tokens", "lines", "s"] = "share"
    per_patch: bool = False
    """Also measured for non-empty patches alone."""
    median: bool = False
    """Summarised by the median: few attempts, long tail."""


# -- the patch


def completed(attempt: AttemptData) -> float:
    """1 for a non-empty patch."""
    return float(attempt.has_patch)


def solved(attempt: AttemptData) -> float | None:
    """1 if the patch passed the task's checks (`is_resolved`)."""
    verdict = is_resolved(attempt.episode)
    return None if verdict is None else float(verdict)


def exact(attempt: AttemptData) -> float | None:
    """1 if the patch results in the same files as the reference, trailing white space aside."""
    reference = _identify_patch(attempt.reference)
    return None if reference is None else float(_identify_patch(attempt.episode.patch) == reference)


@lru_cache(maxsize=_CACHE_SIZE)
def _identify_patch(patch: bytes) -> object:
    # equal for patches with the same effect; None for an empty, malformed or too long patch
    try:
        return compute_identity(patch) or None if len(patch) <= localisation.MAX_PATCH_BYTES else None
    except MalformedPatch:
        return None


def partial(attempt: AttemptData) -> float | None:
    """1 for some of the reference's changes (`patch_edits` above 0), if not `exact`."""
    is_exact, edits = exact(attempt), make_similarity("patch_edits")(attempt)
    return None if is_exact is None or edits is None else float(not is_exact and edits > SHARE_TOLERANCE)


def make_similarity(name: str) -> Measure:
    """Reward `name` of patch against reference, as scored or computed; 0 for unusable patches."""

    def measure(attempt: AttemptData) -> float | None:
        if (scored := next((s.value for s in attempt.episode.scores if s.name == name), None)) is not None:
            return scored
        patch, task = attempt.episode.patch, attempt.task
        if task is None or not task.reference.strip():
            return None
        return _compare_patches(name, task.reference, patch, task.language) if attempt.has_patch else 0.0

    return measure


@lru_cache(maxsize=_CACHE_SIZE)
def _compare_patches(name: str, reference: bytes, patch: bytes, language: str) -> float | None:
    reward = rewards.make_reward(name)
    try:
        return reward.compare(reference, patch, language) if len(patch) <= localisation.MAX_PATCH_BYTES else 0.0
    except MalformedPatch:
        return 0.0


def count_changed_files(attempt: AttemptData) -> float | None:
    """Files in the patch; None if too long."""
    if len(attempt.episode.patch) > localisation.MAX_PATCH_BYTES:
        return None
    return float(len({file.path for file in localisation.parse_patch_or_empty(attempt.episode.patch)}))


def count_changed_lines(attempt: AttemptData) -> float | None:
    """Removed and added lines; None if too long."""
    if len(attempt.episode.patch) > localisation.MAX_PATCH_BYTES:
        return None
    files = localisation.parse_patch_or_empty(attempt.episode.patch)
    return float(sum(len(block.removed) + len(block.added) for file in files for block in file.blocks))


# -- files, functions and lines that both change


Overlap = Callable[[Any, Any], float | None]  # `localisation.recall` or ``precision``


def make_file_overlap(overlap: Overlap) -> Measure:
    """`overlap` of changed files."""

    def measure(attempt: AttemptData) -> float | None:
        lines = localisation.find_compared_lines(attempt.episode.patch, attempt.reference)
        return overlap(*map(localisation.list_changed_files, lines))

    return measure


def make_line_overlap(overlap: Overlap) -> Measure:
    """`overlap` of changed lines."""
    return lambda attempt: overlap(*localisation.find_compared_lines(attempt.episode.patch, attempt.reference))


def make_function_overlap(overlap: Overlap) -> Measure:
    """`overlap` of changed Python functions; None without the files."""

    def measure(attempt: AttemptData) -> float | None:
        lines = localisation.find_compared_lines(attempt.episode.patch, attempt.reference)
        functions = [localisation.find_changed_functions(side, attempt.sources or {}) for side in lines]
        return None if None in functions else overlap(*functions)

    return measure


# -- what the agent did


def count_actions(attempt: AttemptData) -> float | None:
    """Tool calls that the agent reports, else those in the main conversation."""
    episode = attempt.episode
    if episode.tool_calls:
        return float(len(episode.tool_calls))
    main = [turn for turn in episode.turns if turn.index not in set(episode.side)]
    if any(turn.tools for turn in main):
        return float(sum(len(turn.messages[-1].get("tool_calls") or ()) for turn in main if turn.messages))
    return 0.0 if episode.calls_known else None


def measure_applied_edits(attempt: AttemptData) -> float | None:
    """Share of editing calls that succeeded, without edits by shell commands."""
    edits = [call.ok for call in attempt.episode.tool_calls if call.name in _EDITS]
    return sum(edits) / len(edits) if edits else None


def resolved_if_applied(attempt: AttemptData) -> float | None:
    """`solved` if every edit was applied: repair, apart from the format of edits."""
    return solved(attempt) if measure_applied_edits(attempt) == 1 else None


def count_repeated_failures(attempt: AttemptData) -> float | None:
    """Failed calls that repeat an earlier failed one."""
    seen: set[tuple[str, str]] = set()
    repeated = 0
    for call in attempt.episode.tool_calls:
        if not call.ok:
            repeated += (call.name, call.arguments) in seen
            seen.add((call.name, call.arguments))
    return float(repeated) if attempt.episode.calls_known else None


def count_commands(attempt: AttemptData) -> float | None:
    """Programs in the first ten words of shell commands."""
    if not attempt.episode.calls_known:
        return None
    return float(sum(len(call.command.split()) for call in attempt.episode.tool_calls))


def count_viewed_files(attempt: AttemptData) -> float | None:
    """Distinct files that successful commands (cat, sed, grep, ...) print.

    A file is a word with an extension (``src/a.py``); patterns and folders do not count.
    """
    if not attempt.episode.calls_known:
        return None
    return float(len({path for call in attempt.episode.tool_calls if call.ok for path in _list_viewed_paths(call)}))


def _list_viewed_paths(call: ToolCall) -> Iterator[str]:
    if not _READERS & set(call.command.split()):
        return
    try:
        arguments = json.loads(call.arguments)
        texts = arguments.values() if isinstance(arguments, dict) else ()
        line = next((text for text in texts if isinstance(text, str)), "")  # the command line, whatever its name
        words = shlex.split(line[:_MAX_COMMAND_CHARS].replace(";", " ").replace("|", " "), comments=False)
    except (ValueError, RecursionError):  # no JSON, an unclosed quote
        return
    yield from (word.removeprefix("./") for word in words if _FILE.fullmatch(word))


def measure_tools(attempt: AttemptData) -> dict[str, float]:
    """Measure success rates by tool; those that were not offered are ``not_offered``."""
    offered = {tool for turn in attempt.episode.turns for tool in turn.tools}
    outcomes: dict[str, list[bool]] = {}
    for call in attempt.episode.tool_calls:
        name = call.name if call.name in offered or not offered else "not_offered"
        outcomes.setdefault(name, []).append(call.ok)
    return {f"{PER_TOOL}{name}": sum(successes) / len(successes) for name, successes in sorted(outcomes.items())}


# -- costs


def count_prompt_tokens(attempt: AttemptData) -> float | None:
    """Prompt tokens, cached or not; None if unreported."""
    cost = sum_costs([attempt.episode])
    return None if cost.unreported else float(cost.prompt_tokens)


def seconds(attempt: AttemptData) -> float | None:
    """Wall time, from opening the sandbox to the scores."""
    return attempt.episode.timings.get("total")


def restrict_to_resolved(measure: Measure) -> Measure:
    """Restrict a metric to resolved attempts."""
    return lambda attempt: measure(attempt) if is_resolved(attempt.episode) else None


METRICS = (
    Metric("resolved", solved, per_patch=True),
    Metric("completed", completed),
    Metric("empty", lambda attempt: 1 - completed(attempt)),
    Metric("exact", exact, per_patch=True),
    Metric("partial", partial, per_patch=True),
    *(Metric(name, make_similarity(name), per_patch=True) for name in SIMILARITIES),
    Metric("file_recall", make_file_overlap(localisation.recall), per_patch=True),
    Metric("file_precision", make_file_overlap(localisation.precision)),
    Metric("function_recall", make_function_overlap(localisation.recall), per_patch=True),
    Metric("function_precision", make_function_overlap(localisation.precision)),
    Metric("line_recall", make_line_overlap(localisation.recall), per_patch=True),
    Metric("line_precision", make_line_overlap(localisation.precision)),
    Metric("changed_files", count_changed_files, "count", per_patch=True),
    Metric("changed_lines", count_changed_lines, "lines", per_patch=True),
    Metric("edit_applied", measure_applied_edits),
    Metric("resolved_if_applied", resolved_if_applied),
    Metric("repeated_failures", count_repeated_failures, "count"),
    Metric("files_viewed", count_viewed_files, "count"),
    Metric("commands", count_commands, "count"),
    Metric("actions", count_actions, "count"),
    Metric("prompt_tokens", count_prompt_tokens, "tokens"),
    Metric("seconds", seconds, "s"),
    Metric("actions_to_resolve", restrict_to_resolved(count_actions), "count", median=True),
    Metric("seconds_to_resolve", restrict_to_resolved(seconds), "s", median=True),
)
"""Metrics in printed order. Precision is always per patch."""

_ORDER = {metric.name: number for number, metric in enumerate(METRICS)}
_NO_SHARES = {metric.name for metric in METRICS if metric.unit != "share"}
COUNTS = MEASURED_COUNTS | _NO_SHARES | {name + PER_PATCH for name in _NO_SHARES}
MEDIANS = frozenset(metric.name for metric in METRICS if metric.median)
# the metrics that slices of the tasks summarise, and no others
HEADLINE = ("resolved", "reward", "completed", "exact", "partial", "patch_edits", "file_recall", "actions")


def list_metric_names(scores: Iterable[str]) -> set[str]:
    """All metrics possible with `scores`, except `PER_TOOL`."""
    per_patch = {*scores, *(metric.name for metric in METRICS if metric.per_patch)}
    return {*MEASURED_NAMES, *(metric.name for metric in METRICS), *scores, *(name + PER_PATCH for name in per_patch)}


def measure_attempt(attempt: AttemptData) -> dict[str, float]:
    """Defined metrics of an attempt, its `stats.measures`, and tools."""
    values = measure_episode(attempt.episode)
    for metric in METRICS:
        value = metric.measure(attempt)
        if value is not None:
            values[metric.name] = value
            if metric.per_patch and attempt.has_patch:
                values[metric.name + PER_PATCH] = value
    return values | measure_tools(attempt)


def measure_attempts(attempts: Iterable[AttemptData]) -> dict[str, dict[str, float]]:
    """Metrics by episode id, without void episodes."""
    return {each.episode.id: measure_attempt(each) for each in attempts if each.episode.ending is not Ending.VOID}


def summarise_metrics(episodes: Sequence[Episode], values: Mapping[str, MetricValues]) -> dict[str, Interval]:
    """Means (or `MEDIANS`) of `values` by episode id, with 95 % intervals, clustered by `cluster_episodes`."""
    columns = collect_columns(episodes, cluster_episodes(episodes), (values.get(each.id, {}) for each in episodes))
    return {
        name: median_interval(*columns[name])
        if name in MEDIANS
        else measure_interval(name, *columns[name], counts=COUNTS)
        for name in sorted(columns, key=lambda name: (_ORDER.get(name.removesuffix(PER_PATCH), len(METRICS)), name))
    }


# -- slices


def classify_edit(reference: bytes) -> str:
    """Classify the size of a reference's changes outside tests; empty if unknown.

    >>> classify_edit(b"--- a/x.py\\n+++ b/x.py\\n@@ -1 +1 @@\\n-b\\n+c\\n")
    'one line'
    """
    paths = localisation.list_changed_files(localisation.find_compared_lines(b"", reference)[1])
    blocks = [
        block for file in localisation.parse_patch_or_empty(reference) if file.path in paths for block in file.blocks
    ]
    if len(paths) != 1:
        return "several files" if paths else ""
    if len(blocks) != 1:
        return "one file"
    return "one line" if max(len(blocks[0].removed), len(blocks[0].added)) <= 1 else "one hunk"


def slice_tasks(
    episodes: Sequence[Episode], tasks: Mapping[str, Task], agents: Mapping[str, str]
) -> dict[str, frozenset[str]]:
    """Task ids by slice: `slice_episodes`, year, kind of edit, agent."""

    def name_year(episode: Episode) -> str:
        task = tasks.get(episode.task_id)
        return f"year {task.created[:4]}" if task and task.created else ""

    def name_edit(episode: Episode) -> str:
        task = tasks.get(episode.task_id)
        kind = classify_edit(task.reference) if task else ""
        return f"edit of {kind}" if kind else ""

    def name_agent(episode: Episode) -> str:
        agent = agents.get(episode.kind) or agents.get("", "")
        return f"agent {agent}" if agent else ""

    return slice_episodes(episodes, (name_year, name_edit, name_agent))


def find_agents_by_kind(config: Mapping[str, Any], evaluation: str = "eval") -> dict[str, str]:
    """Find agents by kind of task (``""``: other kinds) in a configuration as plain data.

    >>> config = {"agent": {"name": "nano"}, "kinds": {"java": {"agent": {"name": "aider"}}, "go": {"agent": None}},
    ...          "eval": {"also": {"other": {"agent": "pi"}}}}
    >>> find_agents_by_kind(config), find_agents_by_kind(config, "other")
    ({'': 'nano', 'java': 'aider', 'go': 'nano'}, {'': 'pi', 'java': 'aider', 'go': 'pi'})
    """
    settings = config.get("eval") or {}
    also = (settings.get("also") or {}).get(evaluation) or {}
    name = _get_agent_name(also.get("agent") or settings.get("agent") or config.get("agent"))
    kinds = config.get("kinds") or {}
    return {"": name, **{kind: _get_agent_name(each.get("agent")) or name for kind, each in kinds.items()}}


def _get_agent_name(agent: Any) -> str:  # a table with a name, or the name alone
    return str((agent.get("name") if isinstance(agent, Mapping) else agent) or "")
