"""Functions for other programs: what `crrl score`, `grade`, `attempt`, `eval` and `compare` do.

Importable from `coderepairrl` (docs/guides/library.md). They block, print nothing, and raise `coderepairrl.errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coderepairrl import rewards
from coderepairrl.errors import UsageError
from coderepairrl.rewards.text import LARGEST_PATCH

if TYPE_CHECKING:
    from coderepairrl.sandbox import BackendChoice
    from coderepairrl.types import Episode, Task

T = TypeVar("T")
_log = logging.getLogger(__name__)
_make_reward = lru_cache(maxsize=32)(rewards.make_reward)  # cached: making one takes as long as comparing two patches


def score(patch: str | bytes, reference: str | bytes, reward: str = "patch_edits") -> float:
    """Score a diff against a reference diff with a reward that runs no code; the shipped ones are in [0, 1].

    Ignores text around a diff. A patch that is empty, malformed or above 16 MiB scores 0. Raises `UsageError` for an
    unusable reference or a reward that needs more than two diffs, `ConfigError` for an unknown reward.

    >>> reference = "--- a/f.py\\n+++ b/f.py\\n@@ -1 +1 @@\\n-x = 1\\n+x = 2\\n"
    >>> score(reference, reference), score("No.", reference), score(reference.replace("2", "3"), reference)
    (1.0, 0.0, 0.375)
    """
    compare, diff, reference = _make_reward(reward).compare, _encode_diff(patch), _encode_diff(reference)
    if not reference.strip():
        raise UsageError("the reference is empty", fix="pass the diff of a repair")
    if len(diff) > LARGEST_PATCH:
        return 0.0
    try:
        value = compare(reference, diff)
    except rewards.MalformedPatch:
        try:
            rewards.parse_patch(reference)
        except rewards.MalformedPatch as problem:
            raise UsageError(f"the reference: {problem}", fix=problem.fix) from problem
        return 0.0
    if value is None:
        raise UsageError(
            f"reward {reward} needs more than two diffs (a repository, a reply)",
            fix="use one that compares patches, such as patch_edits or patch_similarity",
        )
    return value if diff.strip() else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a benchmark's tests on a patch; `seconds` includes opening sandboxes."""

    task: str
    resolved: bool | None
    """None after an infrastructure fault, which says nothing about the patch."""
    problem: str
    """Reason that it is not resolved, or the fault."""
    seconds: float


def grade(
    patches: Iterable[tuple[str, str | bytes]],
    tasks: str | Iterable[Task],
    *,
    options: Mapping[str, Any] | None = None,
    jobs: int = 2,
    sandbox: str = "auto",
) -> list[Verdict]:
    """Run a benchmark's tests on pairs of task id and patch, `jobs` at a time; return verdicts in order.

    `tasks` is the name of a task source, with `options`, or the tasks themselves (`tasks.make_source`), to read them
    once for many calls. Several patches may be for the same task. Raises `ConfigError` for an unknown source or option,
    `UsageError` for an unknown task, `TaskError` for one without checks, `PrerequisiteError` if no sandbox works.

        [verdict] = grade([("quixbugs/gcd", diff)], "quixbugs", options={"path": "QuixBugs"})
        verdict.resolved
    """
    from coderepairrl import sandbox as sandboxes
    from coderepairrl.processes.scratch import scratch
    from coderepairrl.stages import grade as grading
    from coderepairrl.stages.predictions import Prediction
    from coderepairrl.tasks.catalog import load_source

    source = load_source(tasks, options or {}) if isinstance(tasks, str) else tasks
    predictions = [Prediction(task, str(number), _encode_diff(patch)) for number, (task, patch) in enumerate(patches)]
    if not predictions:
        return []
    by_id, predictions, _ = grading.choose_predictions(predictions, source)
    choice = sandboxes.choose_backend(sandbox)
    _warn_of_weaker_sandbox(choice)
    with scratch("grade") as folder:
        backend = sandboxes.make_backend(choice.name)
        graded = _run_blocking(
            grading.grade_predictions(predictions, by_id, backend, folder / "verdicts.jsonl", jobs=jobs)
        )
    return [
        Verdict(each.instance_id, None if each.fault else each.resolved, each.fault or each.problem, each.seconds)
        for each in graded
    ]


def attempt(
    source: str | Path,
    task: str,
    *,
    policy: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
) -> Episode:
    """Make one attempt at a task of a source, config or run; return its episode: turns, calls, patch, scores.

    `policy` is a run, checkpoint, model folder, ``builtin:NAME`` or URL; `settings` are dotted settings and the
    source's options. `output` is a new run folder that keeps the episode. Raises `ConfigError` and `UsageError` for
    mistakes, `PrerequisiteError`, and `RunError` if an infrastructure fault ended it.

        episode = attempt("handmade", "handmade/pager", policy="builtin:tiny", settings={"rollout.calls": 5})
        episode.reward, episode.patch
    """
    from coderepairrl.stages import attempt as attempting
    from coderepairrl.stages.trace import Trace

    folder, name = None if output is None else Path(output), None if policy is None else str(policy)
    plan = attempting.plan_attempt(str(source), task, _as_overrides(settings), policy=name, output=folder)
    return _run_blocking(attempting.show_attempt(plan, folder, Trace(quiet=True)))


def evaluate(
    source: str | Path,
    *,
    policy: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Evaluate a policy on the tasks of a source, config or run, in a run folder; return what `--json` prints.

    ``["evaluations"][NAME]["outcomes"]["resolved"]`` has `value`, `low` and `high`: a share in [0, 1] with its 95 %
    interval. Other parameters are those of `attempt`. With `resume`, `source` may be the folder of an evaluation, which
    is only read if it is finished. Raises what `attempt` raises, and `HealthGateError` for too many faults.

        result = evaluate("handmade", policy="runs/mine", settings={"eval.attempts": 4}, output="runs/measured")
        result["evaluations"]["eval"]["outcomes"]["resolved"]["low"]
    """
    from coderepairrl.stages.arguments import plan_evaluations
    from coderepairrl.stages.evaluation import measure_policy
    from coderepairrl.stages.results import read_results

    folder, policies = None if output is None else Path(output), [] if policy is None else [str(policy)]
    [planned] = plan_evaluations(str(source), _as_overrides(settings), policies, output=folder, resume=resume)
    _warn_of_weaker_sandbox(planned.plan.choice)
    if not (resume and planned.is_complete):
        _run_blocking(measure_policy(planned, quiet=True))
    return read_results(planned.folder)


def compare(
    *policies: str | Path,
    metric: str = "resolved",
    common: bool = False,
    other_conditions: bool = False,
    cluster: str = "repository",
    pass_at: Sequence[int] = (),
) -> dict[str, Any]:
    """Compare results on the same tasks with paired tests; return what `--json` prints, each policy against the first.

    A policy is a run folder (``RUN@NAME-STEP``), a file of outcomes, another program's log or ``36/500``. `common`
    restricts to tasks that all have. Each of ``["comparisons"]`` has `early`, `late` and `change` with 95 % intervals,
    and `p`. Raises `UsageError` for results that cannot be compared.

    >>> [comparison] = compare("36/500", "60/500")["comparisons"]
    >>> {key: round(value, 4) for key, value in comparison["change"].items()}
    {'value': 0.048, 'low': 0.0098, 'high': 0.087}
    """
    from coderepairrl.report.comparison import ComparisonOptions
    from coderepairrl.report.verdict import answer_comparison

    question = ComparisonOptions(
        metric=metric,
        common=common,
        other_conditions=other_conditions,
        cluster=cluster,
        pass_at=",".join(map(str, pass_at)),
    )
    return dict(answer_comparison(list(map(str, policies)), question).numbers)


def _run_blocking(job: Coroutine[Any, Any, T]) -> T:
    """Run `job` to its result. Raises `UsageError` in a thread that runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    job.close()  # else Python warns that it was never awaited
    raise UsageError(
        "this function blocks, but its thread runs an event loop, as in a notebook",
        fix="await asyncio.to_thread(FUNCTION, ...)",
    )


def _encode_diff(diff: str | bytes) -> bytes:
    """Encode `diff`, and add the line end that models leave out of their replies."""
    if isinstance(diff, bytes):
        encoded = diff
    else:
        try:
            encoded = diff.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half of a surrogate pair, escaped in JSON
            encoded = diff.encode("utf-8", "surrogatepass")
    return encoded if encoded.endswith(b"\n") or not encoded.strip() else encoded + b"\n"


def _as_overrides(settings: Mapping[str, Any] | None) -> list[str]:
    """Format settings as on the command line."""
    from coderepairrl.config import to_inline

    plain = {key: str(value) if isinstance(value, Path) else value for key, value in (settings or {}).items()}
    return [f"{key}={to_inline(value)}" for key, value in plain.items()]


def _warn_of_weaker_sandbox(choice: BackendChoice) -> None:
    if choice.fix:
        _log.warning("%s", choice)
