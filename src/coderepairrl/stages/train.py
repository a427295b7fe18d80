"""The whole loop on one page: tasks -> episodes -> rewards -> advantages -> update -> weights live."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from types import MappingProxyType
from typing import Any

from coderepairrl.config import Config
from coderepairrl.errors import HealthGateError
from coderepairrl.learn import Batch
from coderepairrl.rollout import Group, Slot, check_health, collect, due, slots
from coderepairrl.stages import gates, overoptimisation
from coderepairrl.stages.history import History, consumed, finished
from coderepairrl.stages.parts import Bench, Parts
from coderepairrl.stages.policy import make_batch, replayed
from coderepairrl.stages.references import References, read_references
from coderepairrl.stats import Summary, summarise
from coderepairrl.types import Ending, Episode, Sampling, Verified


async def train(parts: Parts, history: History) -> None:
    """Run every step that `history` lacks, with evaluations and checkpoints where they are due.

    Each step is a function of the log and the config, so killing this anywhere and calling it again with the
    log's history continues as if nothing had happened. Raises `HealthGateError`, `RunError`, `LearnerFault`.
    """
    config, run, policy = parts.config, parts.config.run, parts.policy
    if history.step:
        parts.progress.resume(history.step, replayed(parts.folder, history))
    await policy.restore(history)
    references = read_references(parts.folder, history, parts.train_tasks, config.tasks.verified_references)
    if history.steps:  # the last process may have been killed between the record of a step and these
        newest = consumed(parts.folder, history.steps[-1:])[history.step]
        await export(parts, history, newest, references)
        raise_alarms(parts, gates.untold(history.steps, history.stopped, run))

    for step in range(history.step + 1, run.steps + 1):
        await evaluate_if_due(parts, history, step - 1)
        began = time.monotonic()

        rollout = config.rollout
        chosen = due(parts.sources, rollout.tasks_per_step, rollout.group_size, run.seed, history.consumed)
        sampling = Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens)
        groups = await gather(parts, history, chosen, sampling, verified=references.known)
        episodes = [episode for group in groups for episode in group.episodes]
        batch = make_batch(episodes, config)
        rolled_out = time.monotonic()

        parts.progress.phase("learn")
        parts.log.sync()
        learned, checksum = await policy.improve(batch, history)
        skipped = learned.pop("skipped_reason", "")
        metrics = step_metrics(groups, batch, learned) | {
            **references.metrics(groups),
            "rollout_seconds": round(rolled_out - began, 3),
            "learn_seconds": round(time.monotonic() - rolled_out, 3),
            "tokens_per_second": round(batch.account.sampled / (rolled_out - began), 1),
        }

        record: dict[str, Any] = {
            "step": step,
            "version": policy.version,
            "checksum": checksum,
            "metrics": metrics,
            "account": asdict(batch.account),
            "kinds": {kind: asdict(account) for kind, account in batch.kinds.items()},
            "episodes": [episode.id for episode in episodes],
            "tested": overoptimisation.tested(groups),
            "skipped": skipped,
        }
        alarms = gates.check([*history.steps, record], run)
        record["alarms"] = [alarm.as_json() for alarm in alarms]
        record["alarm"] = next((alarm.details for alarm in alarms if alarm.gate == "over_optimisation"), None)
        parts.log.append("step", **record)
        parts.log.sync()
        history.add_step(record, (group.id for group in groups))
        references.add(step, episodes)
        parts.progress.step(step, metrics)
        if skipped:
            parts.progress.say(f"step {step} is skipped, and its weights stay as they were: {skipped}")
        if batch.account.sampled == 0:
            parts.progress.say(
                f"nothing was sampled: no episode of step {step} had room for an answer, or for its prompt, in"
                f" rollout.tokens and the model's context (crrl view {parts.folder.path} {episodes[0].id})"
            )
        await export(parts, history, episodes, references)
        raise_alarms(parts, alarms)

    await evaluate_if_due(parts, history, run.steps)


def raise_alarms(parts: Parts, alarms: Sequence[gates.Alarm]) -> None:
    """Print them all, then raise `HealthGateError` for the first that stops the run."""
    for alarm in alarms:
        parts.progress.alarm(alarm.text)
    for alarm in alarms:
        if alarm.stops:
            raise HealthGateError(alarm.text, fix=alarm.fix)


async def export(parts: Parts, history: History, episodes: Sequence[Episode], references: References) -> None:
    """Write what the log implies of the newest step: episodes, metrics, references and, where due, a checkpoint."""
    run, step = parts.config.run, history.step
    parts.folder.write_episodes(f"train-{step:05d}", episodes)
    parts.folder.write_metrics([{"step": entry["step"], **entry["metrics"]} for entry in history.steps])
    if references.most:
        parts.folder.write_references(references.known)
    if (step % run.checkpoint_every == 0 or step == run.steps) and step not in parts.folder.saved_checkpoints():
        path = await parts.policy.save(step)
        parts.log.append("checkpoint", step=step, path=path.name)


async def gather(
    parts: Bench,
    history: History,
    chosen: Sequence[Slot],
    sampling: Sampling,
    *,
    verified: Mapping[str, tuple[Verified, ...]] = MappingProxyType({}),
) -> list[Group]:
    """The groups that are `chosen`, episodes that an interrupted process finished included. Raises `HealthGateError`.

    Evaluations leave `verified` out: the task's own reference alone makes the policy comparable before and after.
    """
    parts.progress.phase(chosen[0].phase, sum(len(slot.seeds) for slot in chosen))
    groups = await collect(
        parts.rollout,
        chosen,
        sampling=sampling,
        retries=parts.config.run.retries,
        finished=finished(parts.folder, [slot.group for slot in chosen if slot.group in history.begun]),
        tried=history.tried,
        verified=verified,
    )
    check_health(groups, parts.config.run.void_limit)
    return groups


def evaluation_due(config: Config, step: int) -> bool:
    """Whether the policy is evaluated as it is after `step` updates."""
    if step in (0, config.run.steps):
        return (step == 0 and config.eval.before) or (step == config.run.steps and config.eval.after)
    return bool(config.eval.every) and step % config.eval.every == 0


async def evaluate_if_due(parts: Parts, history: History, step: int) -> None:
    """Measure the policy as it is after `step` updates on the held-out tasks, unless it is not due or done."""
    for name, tasks in parts.eval_tasks.items():
        if evaluation_due(parts.config, step) and tasks and (name, step) not in history.evaluations:
            await evaluate(parts, history, name, step, parts.policy.version)


async def evaluate(parts: Bench, history: History, name: str, step: int, version: int) -> None:
    """One of the evaluations of policy `version`, as it is after `step` updates: ``eval``, or a further one by its
    name."""
    config = parts.config.eval.each[name]
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p, parts.config.rollout.turn_tokens)
    chosen = slots(name, step, parts.eval_tasks[name], config.attempts, parts.config.run.seed)
    groups = await gather(parts, history, chosen, sampling)
    episodes = [episode for group in groups for episode in group.episodes]
    found = summarise(episodes)
    summary = as_json(found)
    parts.folder.write_episodes(f"{name}-{step:05d}", episodes)
    parts.folder.write_evaluation(f"{name}-{step:05d}", {"step": step, **summary})
    record = {"name": name, "step": step, "version": version, "summary": summary}
    parts.log.append("eval", **record)
    parts.log.sync()
    history.evaluations[name, step] = record
    if (reward := found.values.get("reward")) is not None:
        parts.progress.say(f"{name} after step {step}: reward {reward}")


def step_metrics(groups: Sequence[Group], batch: Batch, learned: dict[str, Any]) -> dict[str, Any]:
    """What a step's episodes did (means over episodes) and, as ``learn/NAME``, what the learner made of them.

    ``surprisal`` is minus the mean logprob of all sampled tokens as the engine recorded it, in nats: on policy an
    unbiased estimate of the entropy per token. ``learn/entropy`` is the learner's, of trained tokens alone.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    spreads = [group.std for group in batch.groups.values()]
    valid = (episode for episode in episodes if episode.ending is not Ending.VOID)
    logprobs = [logprob for episode in valid for turn in episode.turns for logprob in turn.output.logprobs]
    return {
        **{name: interval.value for name, interval in summarise(episodes).values.items()},
        **{f"reward/{kind}": fmean(rewards) for kind, rewards in _by_kind(episodes).items() if len(batch.kinds) > 1},
        "reward_std": sum(spreads) / len(spreads),
        "flat_groups": sum(group.flat for group in batch.groups.values()),
        "episodes": len(episodes),
        "void": sum(group.void for group in groups),
        "delivered": batch.account.delivered,
        "expansion": batch.account.expansion,
        **({"surprisal": -sum(logprobs) / len(logprobs)} if logprobs else {}),
        **{f"learn/{name}": value for name, value in learned.items()},
    }


def _by_kind(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    """Rewards of valid episodes by the kind of their task, which is ``plain`` where it has none."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            found.setdefault(episode.kind or "plain", []).append(episode.reward)
    return found


def as_json(summary: Summary) -> dict[str, Any]:
    """A summary as plain data."""
    return {
        "episodes": summary.episodes,
        "tasks": summary.tasks,
        "void": summary.void,
        "values": {name: interval._asdict() for name, interval in summary.values.items()},
    }
