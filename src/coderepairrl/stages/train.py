"""The whole loop on one page: tasks -> episodes -> rewards -> advantages -> update -> weights live."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, pstdev
from typing import Any

from coderepairrl.config import Config
from coderepairrl.errors import HealthGateError
from coderepairrl.learn import Batch
from coderepairrl.learn.algorithms import FLAT
from coderepairrl.report.answers import PLAIN
from coderepairrl.report.metrics import find_agents_by_kind
from coderepairrl.rollout.curriculum import collect_outcomes
from coderepairrl.rollout.group_queue import GroupQueue, StalenessWindow
from coderepairrl.rollout.groups import (
    Group,
    PlannedGroup,
    check_health,
    list_episodes,
    make_group,
    make_groups,
    plan_due_groups,
    plan_groups,
)
from coderepairrl.stages import gates
from coderepairrl.stages.history import BegunGroup, History, read_consumed_episodes, read_finished_episodes
from coderepairrl.stages.life_cycle import is_checkpoint_due, log_step
from coderepairrl.stages.parts import EvaluationContext, TrainingContext
from coderepairrl.stages.policy import count_informative, make_batch, replayed_steps
from coderepairrl.stages.references import References, read_references
from coderepairrl.stages.results import write_results
from coderepairrl.stages.watch import find_common_obstacle
from coderepairrl.stats.intervals import Interval
from coderepairrl.stats.measures import summarise
from coderepairrl.types import Ending, Episode, Sampling


async def train(context: TrainingContext, history: History) -> None:
    """Run the steps missing in `history`, with due evaluations and checkpoints.

    A step depends on log and config alone, so a killed run continues from the log's history. Raises `HealthGateError`,
    `RunError`, `LearnerFault`.
    """
    run, policy = context.config.run, context.policy
    references = await restore_run(context, history)
    window = StalenessWindow(context.config.rollout.tasks_per_step, context.config.rollout.max_staleness)
    async with GroupQueue(window) as queue:
        for step in range(history.step + 1, run.steps + 1):
            await evaluate_if_due(context, history, step - 1)

            began, sampled = time.monotonic(), context.log.sampled
            groups = await attempt_tasks(context, history, references, queue)
            batch = make_batch(list_episodes(groups), context.config)
            rolled_out = time.monotonic()

            context.progress.report_failures()
            context.log.sync()  # weights must not depend on an episode that a power cut could still lose
            learned, checksum = await policy.improve(batch, history)  # groups in `queue` continue meanwhile
            seconds = {"rollout_seconds": rolled_out - began, "learn_seconds": time.monotonic() - rolled_out}

            record = {"step": step, "version": policy.version, "checksum": checksum}
            record |= summarise_step(groups, batch, learned, seconds, references, queue, context.log.sampled - sampled)
            alarms = gates.check_gates([*history.steps, record], run)
            commit_step(context, history, record, groups, alarms)
            # added last: rewards of a step must not compare with its own repairs
            references.add(step, list_episodes(groups))
            await export_step(context, history, list_episodes(groups), references)
            raise_alarms(context, alarms)

    await evaluate_if_due(context, history, run.steps)


async def restore_run(context: TrainingContext, history: History) -> References:
    """Bring engine and learner to the end of `history`; return verified references.

    Finishes the last step's files, checkpoint and alarms. Raises `HealthGateError`.
    """
    if history.step:
        context.progress.resume(history.step, replayed_steps(context.folder, history))
    await context.policy.restore(history)
    max_per_task = context.config.tasks.verified_references or 0
    references = read_references(context.folder, history, context.train_tasks, max_per_task)
    if history.steps:
        last_episodes = read_consumed_episodes(context.folder, history.steps[-1:])[history.step]
        await export_step(context, history, last_episodes, references)
        raise_alarms(context, gates.find_unannounced_alarms(history.steps, history.stopped, context.config.run))
    return references


async def attempt_tasks(
    context: TrainingContext, history: History, references: References, queue: GroupQueue
) -> list[Group]:
    """Sample groups for the next step, and up to `curriculum.refill` more for uninformative ones.

    With `rollout.max_staleness` some began before the last update, and others continue after the return.
    """
    groups, version = list[Group](), context.policy.version
    while missing := count_missing_groups(groups, context.config):
        fill_queue(context, history, queue, missing, groups)
        if stale := await queue.requeue_stale(version, missing):
            context.log.append("shed", step=history.step, version=version, groups=stale)
            history.forget(stale)
            context.progress.say(f"groups begun again, as no step could consume them in time: {', '.join(stale)}")
        begin_groups(context, history, references, queue)
        groups += await queue.take(version, missing)
        check_health(groups)
    return groups


def fill_queue(
    context: TrainingContext, history: History, queue: GroupQueue, missing: int, taken: Sequence[Group]
) -> None:
    """Fill `queue` for a step that has `taken` groups and needs `missing` more, interrupted ones first."""
    present = {group.id: group.task for group in taken} | {slot.group: slot.task for slot in queue.slots}
    tasks = {task.id: task for task in context.train_tasks}
    for slot in plan_due_groups(
        context.curriculum,
        attempts=context.config.rollout.group_size,
        wanted=queue.window.capacity(missing, len(queue.slots), later=context.config.run.steps - history.step - 1),
        consumed=history.consumed | present.keys(),
        outcomes=history.outcomes,
        taken=[task.id for task in present.values()],
        tasks_by_id={name: tasks[begun.task] for name, begun in history.begun.items() if begun.task in tasks},
    ):
        queue.add(slot, history.begun[slot.group].version if slot.group in history.begun else None)


def begin_groups(context: TrainingContext, history: History, references: References, queue: GroupQueue) -> None:
    """Begin waiting groups; interrupted ones keep finished episodes."""
    rollout, step, version = context.config.rollout, history.step + 1, context.policy.version
    interrupted = [slot.group for slot in queue.waiting if slot.group in history.begun]
    finished = read_finished_episodes(context.folder, interrupted, history.given_up)

    def make(slot: PlannedGroup, began: Callable[[], None]) -> Coroutine[Any, Any, Group]:
        begun = history.begun.setdefault(slot.group, BegunGroup(slot.phase, step, slot.task.id, version))
        return make_group(
            context.rollout,
            replace(slot, step=begun.step),
            sampling=Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens),
            retries=context.config.run.retries,
            finished=[episode for episode in finished if episode.group == slot.group],
            tried=history.tried,
            verified=references.before(begun.step),
            began=began,
        )

    queue.start(make)
    context.progress.report_failures()


def count_missing_groups(groups: Sequence[Group], config: Config) -> int:
    """Count the groups still to sample for a step that has `groups`."""
    size, refill = config.rollout.tasks_per_step, config.curriculum.refill
    if not groups or not refill:
        return size - len(groups)
    # negative if advantages over the whole batch made several groups informative at once
    missing = size - count_informative(list_episodes(groups), config)
    return max(0, min(missing, size + refill - len(groups)))


def summarise_step(
    groups: Sequence[Group],
    batch: Batch,
    learned: Mapping[str, Any],
    seconds: Mapping[str, float],
    references: References,
    queue: GroupQueue,
    sampled: int,
) -> dict[str, Any]:
    """Record of a step's episodes, batch and update.

    `learned` are the learner's metrics, with a ``skipped_reason`` if weights stayed. ``tokens_per_second`` is `sampled`
    tokens over the seconds in which the engine could sample: the whole step if it runs while the learner does, else
    ``rollout_seconds``.
    """
    numbers = {name: value for name, value in learned.items() if name != "skipped_reason"}
    overlap = queue.window.staleness > 0 and "sleep_seconds" not in learned  # an engine on the learner's GPU sleeps
    metrics = {
        **compute_step_metrics(groups, batch, numbers),
        **references.metrics(groups),
        **{name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_second": round(sampled / (sum(seconds.values()) if overlap else seconds["rollout_seconds"]), 1),
        **({"ahead": len(queue.slots)} if queue.window.staleness else {}),
    }
    return {
        "metrics": metrics,
        "account": asdict(batch.account),
        "kinds": {kind: asdict(account) for kind, account in batch.kinds.items()},
        "episodes": [episode.id for episode in list_episodes(groups)],
        "advantages": {sample.episode_id: round(sample.advantage, 6) for sample in batch.samples},
        "outcomes": collect_outcomes(list_episodes(groups)),
        "tested": gates.list_tested_groups(groups),
        "skipped": learned.get("skipped_reason", ""),
    }


def commit_step(
    context: TrainingContext,
    history: History,
    record: dict[str, Any],
    groups: Sequence[Group],
    alarms: Sequence[gates.Alarm],
) -> None:
    """Log a step's record with its alarms; warn if nothing was sampled."""
    record["alarms"] = [alarm.as_json() for alarm in alarms]
    log_step(context.log, history, context.progress, record, (group.id for group in groups))
    if record["account"]["sampled"] == 0:
        context.progress.say(
            f"nothing was sampled: no episode of step {record['step']} had room for an answer, or for its prompt, in"
            f" rollout.tokens and the model's context"
            f" (crrl report {shlex.quote(str(context.folder.path))} --episode {record['episodes'][0]})"
        )


def raise_alarms(context: TrainingContext, alarms: Sequence[gates.Alarm]) -> None:
    """Print all alarms, then raise `HealthGateError` for the first that stops the run."""
    for alarm in alarms:
        context.progress.alarm(alarm.text)
    if stopping := next((alarm for alarm in alarms if alarm.stops), None):
        raise HealthGateError(stopping.text, fix=stopping.fix)


async def export_step(
    context: TrainingContext, history: History, episodes: Sequence[Episode], references: References
) -> None:
    """Write the newest step's episodes, metrics, references and, if due, checkpoint."""
    step = history.step
    context.folder.write_episodes(f"train-{step:05d}", episodes)
    context.folder.write_metrics([{"step": entry["step"], **entry["metrics"]} for entry in history.steps])
    if references.max_per_task:
        context.folder.write_references(references.known)
    if is_checkpoint_due(context.folder, context.config, step):
        path = await context.policy.save(history)
        context.log.append("checkpoint", step=step, path=path.name)


def is_evaluation_due(config: Config, step: int) -> bool:
    """Whether an evaluation is due after `step` updates."""
    if step in (0, config.run.steps):
        return (step == 0 and config.eval.before) or (step == config.run.steps and config.eval.after)
    return bool(config.eval.every) and step % config.eval.every == 0


async def evaluate_if_due(context: TrainingContext, history: History, step: int) -> None:
    """Evaluate after `step` updates, if due and not done."""
    for name, tasks in context.eval_tasks.items():
        if is_evaluation_due(context.config, step) and tasks and (name, step) not in history.evaluations:
            await evaluate_policy(context, history, name, step, context.policy.version)


async def evaluate_policy(context: EvaluationContext, history: History, name: str, step: int, version: int) -> None:
    """Run evaluation `name` after `step` updates, reusing episodes of an interrupted process."""
    config, section = context.config, context.config.eval.each[name]
    sampling = Sampling(section.temperature, section.top_p, section.top_k, section.min_p, config.rollout.turn_tokens)
    chosen = context.shard.share(plan_groups(name, step, context.eval_tasks[name], section.attempts, config.run.seed))
    context.progress.report_failures()
    # without verified references: they grow during training, and evaluations have to stay comparable
    groups = await make_groups(
        context.rollout,
        chosen,
        sampling=sampling,
        retries=config.run.retries,
        finished=read_finished_episodes(context.folder, [slot.group for slot in chosen if slot.group in history.begun]),
        tried=history.tried,
    )
    check_health(groups)
    episodes, tasks = list_episodes(groups), (group.task for group in groups)
    agents = find_agents_by_kind(config.model_dump(mode="json"), name)
    record = await asyncio.to_thread(  # comparing patches may take a while
        write_results, context.folder, name, step, version, episodes, tasks, model=context.model_name, agents=agents
    )
    context.log.append("eval", **record)
    context.log.sync()
    history.evaluations[name, step] = record
    if (reward := record["summary"]["values"].get("reward")) is not None:
        when = f" after step {step}" if context.progress.total_steps else ""  # an evaluation alone has no steps
        context.progress.say(f"{name}{when}: reward {Interval(**reward)}")
    if warning := find_common_obstacle(episodes):
        context.progress.alarm(f"{name}: {warning}")


def compute_step_metrics(groups: Sequence[Group], batch: Batch, learned: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a step's episodes (means) and, as ``learn/NAME``, of the learner.

    ``surprisal`` is minus the engine's mean logprob of sampled tokens, in nats: on policy an unbiased estimate of
    entropy per token. ``learn/entropy`` is the learner's, of trained tokens. ``informative`` is the share of groups
    trained at an advantage other than 0, or by a value head; ``flat_groups`` counts the others. ``distinct_patches``
    and ``distinct_actions`` are the share of a group's attempts with patches, and sequences of calls, that differ;
    ``SCORE_std`` is the standard deviation of a group's scores.
    """
    episodes = list_episodes(groups)
    has_value_head = "value_loss" in learned  # it also learns from rewards of 0
    informative = {row.group for row in batch.samples if has_value_head or abs(row.advantage) > FLAT}
    spreads = [group.std for group in batch.groups.values()]
    valid = [episode for episode in episodes if episode.ending is not Ending.VOID]
    lengths = [episode.sampled for episode in valid]
    logprobs = [logprob for episode in valid for turn in episode.turns for logprob in turn.output.logprobs]
    return {
        **{name: interval.value for name, interval in summarise(episodes).values.items()},
        **{
            f"reward/{kind}": fmean(rewards)
            for kind, rewards in _rewards_by_kind(episodes).items()
            if len(batch.kinds) > 1
        },
        "reward_std": sum(spreads) / len(spreads),
        **{f"kind_scale/{kind or PLAIN}": scale for kind, scale in batch.scales.items() if len(batch.kinds) > 1},
        **{
            f"trained/{kind or PLAIN}": balance.trained for kind, balance in batch.kinds.items() if len(batch.kinds) > 1
        },
        "flat_groups": len(batch.groups) - len(informative),
        "groups": len(groups),
        "informative": len(informative) / len(batch.groups),
        "episodes": len(episodes),
        "void": sum(group.void for group in groups),
        **({"sampled_tokens_min": min(lengths), "sampled_tokens_max": max(lengths)} if lengths else {}),
        **_measure_diversity(groups),
        "delivered": batch.account.delivered,
        "expansion": batch.account.expansion,
        **({"surprisal": -sum(logprobs) / len(logprobs)} if logprobs else {}),
        **{f"learn/{name}": value for name, value in learned.items()},
    }


def _measure_diversity(groups: Sequence[Group]) -> dict[str, float]:
    values_by_metric: dict[str, list[float]] = {}
    for group in groups:
        valid = [episode for episode in group.episodes if episode.ending is not Ending.VOID]
        if valid:
            values_by_metric.setdefault("distinct_patches", []).append(len({each.patch for each in valid}) / len(valid))
        if valid and all(each.calls_known for each in valid):
            actions = {tuple((call.name, call.arguments) for call in each.tool_calls) for each in valid}
            values_by_metric.setdefault("distinct_actions", []).append(len(actions) / len(valid))
        for name in dict.fromkeys(score.name for each in valid for score in each.scores):
            values = [score.value for each in valid for score in each.scores if score.name == name]
            values_by_metric.setdefault(f"{name}_std", []).append(pstdev(values))
    return {name: fmean(values) for name, values in values_by_metric.items()}


def _rewards_by_kind(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            rewards.setdefault(episode.kind or PLAIN, []).append(episode.reward)
    return rewards
