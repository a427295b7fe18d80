"""Reinforcement learning of the tiny policy in simulated episodes: a quick search for settings.

``python benchmarks/hello_gspo.py [KEY=VALUE ...]`` is `crrl hello` with these settings, in one thread and a third of
its CPU time: tasks, their order, rewards and the learner are its own, agent and tools are simulated, and checks are run
in forked processes. It measures on the mutants of the split ``test`` that `crrl hello` does *not* evaluate on, with the
broken line quoted and not, before and after, sampled and greedy: settings are chosen on other tasks than they are
judged on. Numbers of this script are a guide for the shipped config.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from coderepairrl import config as configs
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.errors import ConfigError, exit_on_error
from coderepairrl.learn.trainer import Trainer
from coderepairrl.plan import Plan, plan_run
from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.lines import PatchLines
from coderepairrl.rewards.simple import count_repeats_without_progress
from coderepairrl.rollout.curriculum import collect_outcomes
from coderepairrl.rollout.groups import Group, PlannedGroup, list_episodes, plan_due_groups
from coderepairrl.stages.policy import make_batch
from coderepairrl.stages.train import count_missing_groups
from coderepairrl.stats.measures import summarise
from coderepairrl.stats.paired import bootstrap_difference
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, load_corpus_functions, load_mutants, make_exercise
from coderepairrl.tasks.mutants.judge import judge_mutants
from coderepairrl.tasks.patches import format_diff
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange
from workshop.tiny.simulate import Attempt, Simulation

SLOTS = 64
PATCHES = {reward.name: reward() for reward in (PatchEdits, PatchLines)}


def scores(attempts: Sequence[Attempt], paid: Collection[str]) -> list[dict[str, float]]:
    """Scores of each attempt by name: tests, empty, limit, repeats, and the patch rewards among `paid`."""
    by_name = {(f.module, f.name): f for f in load_corpus_functions()}
    jobs = []
    for attempt in attempts:
        module = attempt.exercise.mutant.function.module
        names = [line[4:].split("(")[0] for line in attempt.exercise.fixed.splitlines() if line.startswith("def ")]
        jobs.append((attempt.content, [(c.call, c.want) for name in names for c in by_name[module, name].checks]))
    results = []
    for attempt, failure in zip(attempts, judge_mutants(jobs), strict=True):
        path, broken = attempt.exercise.path, attempt.exercise.files[attempt.exercise.path]
        patch, oracle = (format_diff(path, broken, text) for text in (attempt.content, attempt.exercise.fixed))
        values = {
            "tests": float(failure is None),
            "empty": float(attempt.empty),
            "limit": float(attempt.ended != "submitted"),
            "repeats": -float(count_repeats_without_progress(attempt.calls)),
        }
        results.append(values | {n: each.compare(oracle, patch, "python") for n, each in PATCHES.items() if n in paid})
    return results


class Experiment:
    """A run of a config in simulated episodes."""

    def __init__(self, plan: Plan) -> None:
        self.config = plan.config
        rollout = self.config.rollout
        self.curriculum = plan.curriculum
        if unknown := set(self.config.reward) - {*PATCHES, "tests", "repeats"}:
            raise ConfigError(f"the reward {min(unknown)} is not simulated")
        self.trainer = Trainer(plan.model.folder, plan.learner)
        self.shape = ModelConfig.read(plan.model.folder)
        self.simulation = Simulation(
            plan.model.codec,
            TinyModel(self.shape, slots=SLOTS, context=rollout.tokens),
            calls=rollout.calls or 10**6,
            turn_tokens=rollout.turn_tokens,
            tokens=rollout.tokens,
        )
        self.exercises = {
            f"mutants/{mutant.key}-{'q' if quoted else 'u'}": (mutant, quoted)
            for mutant in load_mutants()
            for quoted in (True, False)
        }
        self.generator = torch.Generator().manual_seed(self.config.run.seed)
        judged = {task.id[:-2] for task in plan.eval_tasks["eval"]}
        rest = sorted(
            f"mutants/{m.key}" for m in load_mutants() if m.split == "test" and f"mutants/{m.key}" not in judged
        )
        self.held_out = {
            kind: [made for key in rest if (made := self.exercise(f"{key}-{kind}")) is not None] for kind in ("q", "u")
        }
        self.outcomes: dict[str, list[float]] = {}
        self.consumed: set[str] = set()

    def exercise(self, task: str) -> Exercise | None:
        """The exercise of a task of the source ``mutants`` with its default seed."""
        mutant, quoted = self.exercises[task]
        return make_exercise(mutant, Random(f"{mutant.key}/0"), quoted)

    def weights(self) -> Weights:
        """The policy's current weights."""
        tensors = self.trainer.policy.model.state_dict()
        return Weights.build(self.shape, lambda name: tensors[name].detach())

    def measure(self, attempts: int) -> dict[str, list[dict[str, float]]]:
        """Scores of each held-out task by temperature and kind, averaged over its attempts."""
        weights, results = self.weights(), {}
        for kind, exercises in self.held_out.items():
            for name, temperature, count in (("sampled", 1.0, attempts), ("greedy", 0.0, 1)):
                each = [e for e in exercises for _ in range(count)]
                attempts_made = self.simulation.run(weights, each, temperature, torch.Generator().manual_seed(1))
                values = scores(attempts_made, ())
                rows = [values[at : at + count] for at in range(0, len(values), count)]
                results[f"{name} {kind}"] = [{key: fmean(row[key] for row in own) for key in own[0]} for own in rows]
        return results

    def groups(self) -> list[Group]:
        """Attempt the tasks of a step, chosen as `stages.train.attempt_tasks` does."""
        size, weights, groups = self.config.rollout.group_size, self.weights(), list[Group]()
        while wanted := count_missing_groups(groups, self.config):
            taken = [group.task.id for group in groups]
            slots = plan_due_groups(self.curriculum, size, wanted, self.consumed, self.outcomes, taken)
            self.consumed |= {slot.group for slot in slots}
            each = [self.exercise(slot.task.id) for slot in slots for _ in range(size)]
            attempts = self.simulation.run(weights, [e for e in each if e is not None], 1.0, self.generator)
            scored = scores(attempts, self.config.reward)
            for slot, at in zip(slots, range(0, len(attempts), size), strict=True):
                own = zip(attempts[at : at + size], scored[at : at + size], strict=True)
                episodes = (_episode(slot, n, *each, self.config.reward) for n, each in enumerate(own))
                groups.append(Group(slot.group, slot.task, tuple(episodes)))
        return groups

    def step(self) -> dict[str, float]:
        """Make one step of the run; returns metrics of its episodes."""
        began = time.process_time()
        episodes = list_episodes(self.groups())
        sampled = time.process_time()
        for task, found in collect_outcomes(episodes).items():
            self.outcomes.setdefault(task, []).extend(found)
        batch = make_batch(episodes, self.config)
        learned = self.trainer.step(batch.samples, batch.episodes, batch.tokens) if batch.samples else {}
        means = {name: interval.value for name, interval in summarise(episodes).values.items()}
        return {
            **{name: means[name] for name in ("reward", "tests", "empty_patches", "limit")},
            "episodes": len(episodes),
            "rows": len(batch.samples),
            **{name: learned[name] for name in ("grad_norm", "entropy") if name in learned},
            "sampling_s": sampled - began,
            "learning_s": time.process_time() - sampled,
        }


def _episode(
    slot: PlannedGroup, number: int, attempt: Attempt, values: Mapping[str, float], reward: dict[str, float]
) -> Episode:
    turns = list[Turn]()
    spans = [[*span] for _, span in groupby(range(len(attempt.ids)), lambda at: attempt.sampled[at])]
    for before, own in zip(spans[::2], spans[1::2], strict=False):  # an unanswered last prompt is left out
        given = TokenSpan(tuple(attempt.ids[at] for at in before), Origin.GIVEN)
        ids, logprobs = (tuple(column[at] for at in own) for column in (attempt.ids, attempt.logprobs))
        output = TokenSpan(ids, Origin.POLICY, logprobs)
        base = len(turns) - 1 if turns else None
        turns.append(Turn(len(turns), base, given, output, versions=(VersionRange(0, 0, len(own)),)))
    return Episode(
        id=f"{slot.group}-{number}",
        task_id=slot.task.id,
        phase=slot.phase,
        step=slot.step,
        group=slot.group,
        attempt=number,
        ending=Ending.LIMIT if values["limit"] else Ending.DONE,
        turns=tuple(turns),
        tool_calls=tuple(attempt.calls),
        patch=b"" if values["empty"] else b"changed",
        scores=tuple(
            Score(name, values[name], weight, passed=bool(values[name]) if name == "tests" else None)
            for name, weight in reward.items()
        ),
    )


def main() -> None:
    """Measure, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=2, help="sampled attempts at each held-out task")
    parser.add_argument("--every", type=int, default=0, help="also measure every N steps")
    parser.add_argument("--before", type=Path, help="before.json of an earlier call with the same model")
    parser.add_argument("--out", type=Path, help="folder for the measurements and the weights")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as of `crrl hello`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(plan_run(configs.load_config("hello", options.overrides)))
    steps = experiment.config.run.steps
    before = json.loads(options.before.read_text()) if options.before else experiment.measure(options.attempts)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "before.json").write_text(json.dumps(before))
    spent = 0.0
    for step in range(1, steps + 1):
        began = time.process_time()
        row = experiment.step()
        spent += time.process_time() - began
        if step % 5 == 0:
            shown = row | {"cpu_s": spent}
            print(json.dumps({"step": step} | {name: round(value, 3) for name, value in shown.items()}), flush=True)
        if step == steps or (options.every and step % options.every == 0):
            after = experiment.measure(options.attempts)
            report(experiment, step, before, after)
            if options.out:
                (options.out / f"after-{step}.json").write_text(json.dumps(after))
                experiment.trainer.publish(options.out)


def report(experiment: Experiment, step: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print before, after and the change, with its interval by function."""
    for temperature in ("sampled", "greedy"):
        for name, kinds in (("all", "qu"), ("quoted", "q"), ("not quoted", "u")):
            early, late = ([row for kind in kinds for row in side[f"{temperature} {kind}"]] for side in (before, after))
            functions_ = [e.mutant.function.key for kind in kinds for e in experiment.held_out[kind]]
            tests = [[row["tests"] for row in side] for side in (early, late)]
            shown = {
                "step": step,
                "held out": f"{temperature}, {name}",
                "tests": f"{fmean(tests[0]):.3f} -> {fmean(tests[1]):.3f}",
                "change": bootstrap_difference(tests[0], tests[1], functions_).text("+.3f"),
            }
            print(json.dumps(shown | {key: round(fmean(row[key] for row in late), 3) for key in ("empty", "limit")}))


if __name__ == "__main__":
    with exit_on_error():
        main()
