"""Would reinforcement learning have anything to learn from? A policy's attempts at a sample of the training tasks.

The attempts are an evaluation as any other, sampled and rewarded as in training, in a run folder. To it are added
``probe.json``, the verdict with its numbers, and ``difficulty.jsonl``, a line for each task, easiest first::

    {"task": "mutants/stats.mean/operator-1f3a2b4c-q", "attempts": 8, "solved": 3, "reward": 0.52, "spread": 0.41,
     "kind": "", "language": "python", "repository": ""}

``attempts`` are those that were not void, ``solved`` those that passed the task's checks (null where none were run),
``reward`` their mean reward and ``spread`` its standard deviation: 0 for a group that teaches nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.assembly.plan import AgentPlan
from coderepairrl.config import Config
from coderepairrl.errors import HealthGateError, RunError
from coderepairrl.learn.advantages import group_advantages
from coderepairrl.printable import counted
from coderepairrl.report.verdict import Result, Table
from coderepairrl.runs import RunFolder
from coderepairrl.runs.folder import write_atomic
from coderepairrl.stages import evaluation
from coderepairrl.stats import Interval, mean_interval, resolved, summarise
from coderepairrl.stats.clusters import clusters_of, slices
from coderepairrl.types import Ending, Episode

TASKS = 32
"""Tasks of the sample, where nothing else is asked for."""
VERDICT, DIFFICULTY = "probe.json", "difficulty.jsonl"
LEAST_INFORMATIVE = 0.1
"""With a share of informative groups that lies below it, nine in ten episodes of each batch teach nothing."""
MOST_CUT_OFF = 0.5
"""With a share of attempts above it that a limit ends, the limit is what is learned."""
_NOTHING = 5e-4
"""Rewards up to it are none: an edit of a wrong place earns 1e-9."""
_SETTING = {"calls": "rollout.calls", "time": "rollout.seconds"}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why training would be in vain, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Part:
    """What the policy came to on some of the tasks, with 95 % intervals."""

    tasks: int
    solve_rate: Interval | None
    """Share of attempts that passed the checks; None where none were run."""
    reward: Interval
    informative: Interval
    """Share of tasks with attempts that earned differently: the others have no gradient."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The verdict, and what it rests on."""

    policy: str
    attempts: int
    """All of them, the void ones left out."""
    void: int
    whole: Part
    parts: Mapping[str, Part]
    """By kind, language, and what else tasks have in common."""
    never: int
    """Tasks that no attempt solved; where no checks were run, at which none earned anything."""
    always: int
    """Tasks that every attempt solved, or at which each earned something."""
    limit: Interval
    """Share of attempts that a limit ended."""
    reasons: Sequence[Reason]

    @property
    def go(self) -> bool:
        """Whether there is something to learn from."""
        return not self.reasons


def resolve(source: str, given: Sequence[str], policy: str | None = None) -> AgentPlan:
    """The attempts at training tasks of the configuration in `source` with the settings `given`, by `policy`, else by
    the model that it names. Of its ``eval`` section holds what is `given` alone. Raises what `evaluation.resolve` does.
    """
    path = Path(configs.shipped().get(source, source)).expanduser()
    overrides = ["run.name=probe", *given, *_as_in_training(configs.load(path, ["run.name=probe", *given]))]
    overrides += [each for each in given if each.startswith("eval.")]
    return evaluation.resolve(policy or str(path), overrides, settings_of=path)


def _as_in_training(config: Config) -> list[str]:
    """The settings of an evaluation that attempts what `config` trains on, as training would."""
    agent = configs.inline(config.agent.model_dump())
    return [
        *('eval.source=""', "eval.options={}", f"eval.split={json.dumps(config.tasks.split)}", "eval.also={}"),
        *(f"eval.tasks={TASKS}", f"eval.attempts={config.rollout.group_size}", "eval.reward={}"),
        *(f"eval.temperature={config.rollout.temperature}", "eval.top_p=1.0", "eval.top_k=0", "eval.min_p=0.0"),
        *([f"eval.agent={agent}"] if config.eval.agent is not None else ()),
    ]


async def probe(plan: AgentPlan, folder: RunFolder, *, resume: bool = False) -> Probe:
    """Make the attempts of `plan` into `folder`, and judge them. Raises what `evaluation.measure` raises."""
    await evaluation.measure(plan, folder, resume=resume)
    return conclude(folder, plan.config)


def conclude(folder: RunFolder, config: Config) -> Probe:
    """The verdict on the attempts in `folder`, which gets its files. Raises `RunError` where there are none."""
    episodes = list(folder.episodes("eval-00000"))
    found = judge(episodes, config)
    write_atomic(folder.path / DIFFICULTY, "".join(json.dumps(row) + "\n" for row in difficulties(episodes)))
    write_atomic(folder.path / VERDICT, json.dumps(as_json(found), indent=2) + "\n")
    return found


def judge(episodes: Sequence[Episode], config: Config) -> Probe:
    """What the attempts of one policy say of training it by `config`. Raises `RunError` without a valid one."""
    valid = [each for each in episodes if each.ending is not Ending.VOID]
    if not valid:
        raise RunError("no attempt of the probe is valid", fix="log.jsonl in its run folder says what failed")
    clusters = clusters_of(episodes)
    by_task = [[_succeeds(each) for each in own] for own in _by_task(valid).values()]
    whole = _part(valid, clusters)
    limit = summarise(valid).values["limit"]
    return Probe(
        policy=config.model.path,
        attempts=len(valid),
        void=len(episodes) - len(valid),
        whole=whole,
        parts={
            name: _part([each for each in valid if each.task_id in ids], clusters)
            for name, ids in slices(valid).items()
            if any(each.task_id in ids for each in valid)
        },
        never=sum(not any(own) for own in by_task),
        always=sum(all(own) for own in by_task),
        limit=limit,
        reasons=list(_reasons(valid, whole, limit)),
    )


def _succeeds(episode: Episode) -> bool:
    passed = resolved(episode)
    return episode.reward > _NOTHING if passed is None else passed


def _part(valid: Sequence[Episode], clusters: Mapping[str, str]) -> Part:
    found = summarise(valid)
    groups = {task: own for task, own in _by_task(valid).items() if len(own) > 1} or _by_task(valid)
    informative = {task: not group_advantages([each.reward for each in own]).flat for task, own in groups.items()}
    passed = [(each, verdict) for each in valid if (verdict := resolved(each)) is not None]
    return Part(
        tasks=found.tasks,
        solve_rate=_share((clusters[each.task_id], verdict) for each, verdict in passed) if passed else None,
        reward=found.values["reward"],
        informative=_share((clusters[task], differ) for task, differ in informative.items()),
    )


def _share(rows: Iterable[tuple[str, bool]]) -> Interval:
    """The share of what is so, one cluster label each."""
    clusters, values = zip(*rows, strict=True)
    return mean_interval([float(value) for value in values], clusters, share=True)


def _by_task(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
    found: dict[str, list[Episode]] = {}
    for each in episodes:
        found.setdefault(each.task_id, []).append(each)
    return found


def _reasons(valid: Sequence[Episode], whole: Part, limit: Interval) -> Iterable[Reason]:
    of = f"{counted(len(valid), 'attempt')} at {counted(whole.tasks, 'task')}"
    if not any(each.sampled or each.turns for each in valid):
        yield Reason(
            f"none of {of} had room for a reply: the prompt fills the episode",
            "raise rollout.tokens, or leave out tasks with long prompts",
        )
    elif not any(each.patch.strip() or each.reward > _NOTHING for each in valid):  # an answer earns without a patch
        works = [call.ok for each in valid for call in each.tool_calls]
        calls = f"{sum(works)} of {counted(len(works), 'tool call')} worked" if works else "there was no tool call"
        yield Reason(
            f"none of {of} changed anything ({calls})",
            "fine-tune on trajectories of this agent first (crrl collect, crrl sft), or take an agent that the policy"
            " can speak to",
        )
    elif whole.solve_rate is not None and whole.solve_rate.value == 0:
        yield Reason(
            f"none of {of} solved one (solve rate {whole.solve_rate})",
            "fine-tune on trajectories that solve them first (crrl collect, crrl sft), or begin with easier tasks",
        )
    elif not any(each.reward > _NOTHING for each in valid):
        yield Reason(
            f"none of {of} earned anything",
            "fine-tune on good trajectories first (crrl collect, crrl sft), or begin with easier tasks",
        )
    elif whole.solve_rate is not None and whole.solve_rate.value == 1:
        yield Reason(f"all of {of} solved it: nothing is left to learn", "take harder tasks")
    elif whole.informative.value == 0 or whole.informative.below(LEAST_INFORMATIVE):
        yield Reason(
            f"attempts at the same task earn the same: the share of groups to learn from is {whole.informative}",
            "a larger rollout.group_size, tasks neither always nor never solved, or a reward that tells attempts apart"
            " (patch_edits beside tests)",
        )
    if limit.above(MOST_CUT_OFF):
        limits = Counter(each.reason for each in valid if each.ending is Ending.LIMIT)
        first, count = limits.most_common(1)[0]
        yield Reason(
            f"limits end the share {limit} of the attempts, most often that of {first} ({count} of {len(valid)})",
            f"raise {_SETTING.get(first, 'rollout.tokens or rollout.turn_tokens')}",
        )


def difficulties(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """The rows of ``difficulty.jsonl``: how hard each task is for the policy, easiest first."""
    rows = []
    for task, own in _by_task(each for each in episodes if each.ending is not Ending.VOID).items():
        verdicts = [verdict for each in own if (verdict := resolved(each)) is not None]
        advantages = group_advantages([each.reward for each in own])
        first = own[0]
        rows.append(
            {
                "task": task,
                "attempts": len(own),
                "solved": sum(verdicts) if verdicts else None,
                "reward": round(advantages.mean, 9),
                "spread": 0.0 if advantages.flat else round(advantages.std, 9),
                "kind": first.kind,
                "language": first.language,
                "repository": first.repository,
            }
        )
    return sorted(rows, key=lambda row: (-(row["solved"] or 0) / row["attempts"], -row["reward"], row["task"]))


def as_json(found: Probe) -> dict[str, Any]:
    """As ``probe.json`` has it: intervals as value, low and high."""

    def part(each: Part) -> dict[str, Any]:
        return {
            name: value._asdict() if isinstance(value, Interval) else value for name, value in _fields(each).items()
        }

    return {
        "go": found.go,
        "policy": found.policy,
        "attempts": found.attempts,
        "void": found.void,
        **part(found.whole),
        "never_solved": found.never,
        "always_solved": found.always,
        "limit": found.limit._asdict(),
        "parts": {name: part(each) for name, each in found.parts.items()},
        "reasons": [asdict(reason) for reason in found.reasons],
    }


def _fields(part: Part) -> dict[str, Any]:
    return {name: getattr(part, name) for name in ("tasks", "solve_rate", "reward", "informative")}


def result(found: Probe) -> Result:
    """For `report.verdict.render`."""
    of = f"{counted(found.whole.tasks, 'task')}, the share {found.whole.informative}"
    verdicts = [f"No-go: {reason.what}." for reason in found.reasons]
    verdicts = verdicts or [f"Go: of {of} has attempts that earn differently, which is what is learned from."]
    rows = [("all", *_cells(found.whole)), *((name, *_cells(each)) for name, each in found.parts.items())]
    table = Table(
        f"{found.policy}: {counted(found.attempts, 'attempt')}",
        ("tasks", "number", "solve rate", "reward", "informative groups"),
        rows,
    )
    notes = [
        f"{found.never} tasks were never solved, {found.always} always; limits ended {found.limit} of the attempts.",
        *([f"{counted(found.void, 'attempt')} void by a fault of the machinery, not measured."] if found.void else []),
        *(f"Fix: {reason.fix}." for reason in found.reasons),
        "Brackets are 95 % intervals of clusters of tasks.",
    ]
    return Result(verdicts, [table], notes, as_json(found))


def _cells(part: Part) -> tuple[str, str, str, str]:
    return (
        str(part.tasks),
        "-" if part.solve_rate is None else str(part.solve_rate),
        str(part.reward),
        str(part.informative),
    )


def refusal(reasons: Iterable[Reason], again: str) -> HealthGateError:
    """The error that a probe ends with which says no; `again` is how to go on nevertheless."""
    given = list(reasons)
    return HealthGateError(
        "no-go: " + "; ".join(reason.what for reason in given),
        fix="; or ".join([*(reason.fix for reason in given), again]),
    )
