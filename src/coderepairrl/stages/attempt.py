"""``crrl attempt``: one attempt at one task, shown live."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.errors import HealthGateError, RunError, UsageError
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs import RunFolder
from coderepairrl.runs.codec import dump
from coderepairrl.stages import arguments, evaluation
from coderepairrl.stages.evaluation import Evaluation
from coderepairrl.stages.trace import Trace
from coderepairrl.tasks.catalog import suggest_task_ids
from coderepairrl.types import AgentReport, Ending, Episode, Turn


def plan_attempt(
    what: str, task_id: str, words: Sequence[str] = (), *, policy: str | None = None, output: Path | None = None
) -> AgentPlan:
    """Plan an attempt at the task `task_id`, of any split; policy and settings are as for `crrl eval`.

    Raises as `plan_evaluations`, and `UsageError` for an unknown task, a missing policy, or an `output` with a run.
    """
    if output is not None and RunFolder(output).log.exists():
        raise UsageError(f"{output} already holds a run", fix="name a new folder: an attempt is not continued")
    settings, option_words = arguments.split_settings(words)
    options = configs.parse_options(option_words, "path")
    if arguments.find_config_file(what) is None:
        if policy is None:
            command = shlex.join(["crrl", "attempt", what, task_id, "--policy"])
            raise UsageError("no policy is named", fix=f"{command} RUN|FOLDER|builtin:tiny|URL")
        select = options.get("select", {})
        if isinstance(select, dict) and not any(each.startswith("eval.split") for each in settings):
            # without `holdout`, and with all tasks in the split that evaluations read, any task may be attempted
            options["select"] = {**{key: value for key, value in select.items() if key != "holdout"}, "split": "test"}
        settings.append(f"eval.options={configs.to_inline(options)}")  # instead of the options of the policy's config
    elif options:
        raise UsageError(
            f"{what} is not a task source, and {min(options)} is not a setting", fix="crrl config lists settings"
        )
    settings += ["eval.attempts=1", "eval.tasks=0"]
    policies = [policy] if policy else []
    [planned] = arguments.plan_evaluations(what, settings, policies, output=output or Path(task_id))
    plan = planned.plan
    for name, tasks in plan.eval_tasks.items():
        for task in tasks:
            if task.id == task_id:
                return plan.replace(eval_tasks={name: (task,)})
    task_ids = [task.id for tasks in plan.eval_tasks.values() for task in tasks]
    raise UsageError(f"{what} evaluates no task {task_id}", fix=suggest_task_ids(task_id, task_ids))


async def show_attempt(plan: AgentPlan, output: Path | None, trace: Trace) -> Episode:
    """Make the attempt, showing each turn and the result in `trace`; `output` is its run folder, if it is kept.

    Raises as `evaluation.measure_policy`, and `RunError` if an infrastructure fault ended it.
    """
    [[task]] = plan.eval_tasks.values()  # `plan_attempt` leaves one
    ended = list[Episode]()
    trace.say("task", f"{task.id}: {task.workspace}")
    trace.say("sandbox", str(plan.choice))
    trace.say("model", plan.model.name)
    trace.say("agent", plan.kinds[task.kind if task.kind in plan.kinds else ""].agent.name)
    trace.say("engine", f"{plan.config.engine.name} starts")

    def follow(event: Turn | Episode) -> None:
        if isinstance(event, Turn):
            trace.show_turn(event)
            return
        ended.append(event)
        calls = event.tool_calls if event.calls_known else None
        trace.show_end(AgentReport(event.reason, calls, event.crash), event.timings.get("total", 0.0))
        for call in calls or ():
            trace.say("call", f"{call.name} {call.arguments}: {'ok' if call.ok else 'failed'}")
        for score in event.scores:
            note = f": {score.note}" if score.note else ""
            trace.say("score", f"{score.name} {score.value:.4g}, weight {score.weight:g}{note}")
        trace.say("reward", f"{event.reward:.4g}, {event.ending.value}, {event.sampled:,} tokens sampled")

    with scratch("attempt") as home:
        folder = RunFolder(output or home / "attempt")
        try:
            await evaluation.measure_policy(Evaluation(plan, folder), quiet=True, follow=follow)
        except HealthGateError:  # void attempts stop an evaluation; here they are reported below
            if not ended:
                raise
    if not ended or ended[-1].ending is Ending.VOID:
        raise RunError(f"the attempt is void: {ended[-1].fault if ended else 'it never ended'}", fix="try crrl check")
    return ended[-1]


def attempt_as_json(output: Path | None, episode: Episode) -> dict[str, Any]:
    """Attempt as plain data, with the conversation as ``messages``."""
    messages = [message for turn in episode.turns for message in turn.messages]
    run = {"run": str(output)} if output else {}
    fields: dict[str, Any] = dump(replace(episode, turns=()))
    return {**run, **fields, "reward": episode.reward, "messages": messages}
