"""Our whole training loop against TRL's `GRPOTrainer` with tools, step by step in one run.

    python -m benchmarks.peers [--mixes hello long equal] [--against trl] [--rounds 3]
    python -m benchmarks.peers --model FOLDER --rounds 2   # a published model, in one turn

Model, tasks, prompts, tools, sandboxes, rewards, limits, batch, algorithm (GSPO without KL) and optimiser (AdamW) are
those of `crrl hello` on both sides, one torch thread for each process, fp32. The contestants are processes that take
turns at each step; measured is the CPU time (user and system) of a contestant's whole process tree, ended children
included. The first step warms up. Each side learns from its own samples.

Ours is the loop of `stages.train` as it is: gateway, agent, engine and learner in their own processes, the log synced
at every step. TRL is `peers_trl.Peer`: one process that samples for the whole batch with transformers' ``generate``,
turn after turn, calls the tools, computes rewards and updates; ``--against`` takes the names of `peers_trl.VARIANTS`.

Mixes: ``hello`` has the tasks and limits of `crrl hello`; ``long`` the same with more calls, so that some attempts go
on while most have ended; ``equal`` tasks whose prompt and file are of about one length, with few calls. ``turn`` trains
the model of `--model`, which has a large vocabulary: one answer without tools (`direct`), adapters, and all other
settings of the preset qwen2.5-coder-0.5b-cpu. Printed padding is the tokens of rows padded to the longest of the step,
over the tokens without padding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stages import Stages, Turns
from coderepairrl import config as configs
from coderepairrl.plan import Plan, plan_run
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.runs import RunFolder
from coderepairrl.stages import train as loop
from coderepairrl.stages.history import History
from coderepairrl.stages.parts import open_training
from coderepairrl.stages.progress import Progress
from coderepairrl.types import Episode, Task

MIXES: Mapping[str, Sequence[str]] = {
    "hello": (),
    "long": ("rollout.calls=16",),
    "equal": ("rollout.calls=3",),
    "turn": (
        *("tasks.sources=[]", 'tasks.source="mutants"', 'tasks.options={split="train"}'),
        "engine.options.threads=1",
    ),
}
"""Settings beside those of hello, for ``turn`` beside those of a preset."""
STAGES = ("sampling", "sandboxes", "agents, tokens, rewards", "learner", "weights to the engine", "rest")
PER_TOKEN = "all, for 1,000 sampled tokens"
_EQUAL = 64
"""Tasks of the mix ``equal``."""


def planned(mix: str, folder: Path, steps: int, overrides: Sequence[str] = ()) -> Plan:
    """Plan `steps` steps on the tasks of `mix`, for both sides."""
    run_settings = [f"run.dir={folder}", f"run.steps={steps}", f"run.checkpoint_every={steps}"]
    fixed = ["eval.before=false", "eval.after=false", "rollout.seconds=3600"]
    preset = "qwen2.5-coder-0.5b-cpu" if mix == "turn" else "hello"
    plan = plan_run(configs.load_config(preset, [*run_settings, *fixed, *MIXES[mix], *overrides]))
    tasks = alike(plan) if mix == "equal" else plan.train_tasks
    per_step, seed = plan.config.rollout.tasks_per_step, plan.config.run.seed
    return plan.replace(curriculum=Curriculum(sources=(WeightedTasks(tasks),), per_step=per_step, seed=seed))


def alike(plan: Plan) -> list[Task]:
    """The `_EQUAL` tasks with unquoted line whose issue and broken file are nearest to the median length in tokens."""

    def size(task: Task) -> int:
        [source] = (path for path in Path(task.workspace.removeprefix("dir:")).glob("*.py") if "test" not in path.name)
        return len(plan.model.codec.encode(task.prompt + source.read_text()))

    sizes = {task.id: size(task) for task in plan.train_tasks if task.id.endswith("-u")}
    usual = statistics.median(sizes.values())
    nearest = sorted(sizes, key=lambda name: (abs(sizes[name] - usual), name))[:_EQUAL]
    return [task for task in plan.train_tasks if task.id in nearest]


class StepReports(Progress):
    """Reports the CPU seconds of each step by stage; each step waits for its turn."""

    def __init__(self, steps: int, turns: Turns) -> None:
        super().__init__(steps, quiet=True)
        self.turns, self.stages, self.episodes = turns, Stages(), list[Episode]()

    def begin(self) -> None:
        """Begin a step: report the last one, and wait for the turn."""
        self.finish()
        self.turns.wait()
        self.stages.begin()
        self.stages.enter("rollout")

    def episode(self, episode: Episode) -> None:
        super().episode(episode)
        self.episodes.append(episode)

    def finish(self) -> None:
        """Report the last step, if there was one, including the time of files written after it."""
        if self.episodes:
            episodes, self.episodes = self.episodes, []
            rewards: dict[str, list[float]] = {}
            for episode in episodes:
                rewards.setdefault(episode.group, []).append(episode.reward)
            counts = {
                "tasks": sorted({episode.task_id for episode in episodes}),
                "prompt": sum(len(episode.turns[0].given.ids) for episode in episodes),
                "rows": [sum(len(turn.given.ids) + len(turn.output.ids) for turn in each.turns) for each in episodes],
                "sampled": sum(episode.sampled for episode in episodes),
                "turns": sum(len(episode.turns) for episode in episodes),
                "calls": sum(len(episode.tool_calls) for episode in episodes),
                "rewards": list(rewards.values()),
            }
            self.turns.tell(self.stages.end() | counts)


async def ours(plan: Plan, turns: Turns) -> None:
    """Run all steps of `plan` with our loop."""
    folder = RunFolder(Path(plan.config.run.dir) / plan.config.run.name)
    folder.create("", {})
    with StepReports(plan.config.run.steps, turns) as progress:
        async with open_training(plan, folder, progress) as parts:
            attempt, policy = loop.attempt_tasks, parts.policy
            improve, publish, serve = policy.improve, policy._publish, policy._serve

            async def report_attempts(*given: Any) -> Any:
                progress.begin()
                return await attempt(*given)

            async def report_improve(*given: Any) -> Any:
                progress.stages.enter("learn")
                return await improve(*given)

            async def report_publish() -> Any:
                progress.stages.enter("sync")
                return await publish()

            async def report_serve(published: Any) -> Any:
                served = await serve(published)
                progress.stages.enter("rest")
                return served

            loop.attempt_tasks = report_attempts
            policy.improve, policy._publish, policy._serve = report_improve, report_publish, report_serve  # type: ignore[method-assign]
            await loop.train(parts, History())
            progress.finish()


def stage_of(key: str) -> str:
    """The table row that the seconds of ``STAGE/PROCESS`` belong to."""
    stage, process = key.split("/")
    if process == "sandbox":
        return "sandboxes"
    if stage == "sync":
        return "weights to the engine"
    if stage == "generate" or process == "engine":
        return "sampling"
    if stage == "learn" or process == "learner":
        return "learner"
    return "agents, tokens, rewards" if stage in ("rollout", "reward") else "rest"


def by_stage(result: Mapping[str, Any]) -> dict[str, float]:
    """CPU seconds of a step by table row, and ``all``."""
    seconds_by_row = dict.fromkeys(STAGES, 0.0)
    for key, seconds in result["cpu"].items():
        seconds_by_row[stage_of(key)] += seconds
    return seconds_by_row | {"all": sum(seconds_by_row.values())}


class Contestant:
    """A process that makes one step per request."""

    def __init__(self, name: str, mix: str, folder: Path, steps: int, overrides: Sequence[str]) -> None:
        self.name = name
        words = ["--be", name, "--mixes", mix, "--folder", str(folder), "--rounds", str(steps), "--set", *overrides]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        self.log = (folder / f"{name}.log").open("w+")
        command = [sys.executable, "-m", "benchmarks.peers", *words]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        # a session of its own, as our child processes have: Linux divides a busy CPU among sessions
        self.process = subprocess.Popen(command, text=True, env=env, start_new_session=True, **streams)
        self._until("ready")

    def step(self) -> dict[str, Any]:
        """Let it make its next step; returns the measurements."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._until("cpu")

    def _until(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if key in (told := json.loads(line)):
                return dict(told)
        self.log.seek(0)
        raise RuntimeError(f"{self.name} ended:\n{self.log.read()[-3000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()


Found = dict[str, list[dict[str, Any]]]
"""The steps of each contestant."""


def measure(mix: str, names: Sequence[str], rounds: int, overrides: Sequence[str], lines: Path | None = None) -> Found:
    """Measure `rounds` steps of each contestant after a warm-up, and append them to `lines`.

    Raises `RuntimeError` unless all attempted the same tasks with prompts of equal length.
    """
    steps_by_name: Found = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contestants = []
        for name in names:
            contestants.append(Contestant(name, mix, Path(folder), rounds + 1, overrides))
            stack.callback(contestants[-1].close)
        for round_ in range(rounds + 1):
            for each in contestants:
                result = each.step()
                print(f"{mix} {round_} {each.name}: {by_stage(result)['all']:.1f} CPU s", file=sys.stderr, flush=True)
                if round_:
                    steps_by_name[each.name].append(result)
                    if lines:
                        with lines.open("a") as file:
                            print(json.dumps({"mix": mix, "name": each.name, **result}), file=file)
    for results in zip(*steps_by_name.values(), strict=True):
        for key in ("tasks", "prompt"):
            if any(result[key] != results[0][key] for result in results):
                raise RuntimeError(f"the contestants differ in {key}: {[result[key] for result in results]}")
    return steps_by_name


def table(mix: str, steps_by_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Markdown lines: medians of CPU seconds a step, and ratios within a round with their range."""
    our_steps = steps_by_name["ours"]
    names = [name for name in steps_by_name if name != "ours"]
    yield f"\n{mix}: {len(our_steps)} steps of {len(our_steps[0]['rows'])} attempts"
    for name, results in steps_by_name.items():
        rows = [row for result in results for row in result["rows"]]
        rectangle = sum(len(result["rows"]) * max(result["rows"]) for result in results)
        flat = statistics.fmean(len(set(group)) == 1 for result in results for group in result["rewards"])
        reward = statistics.fmean(each for result in results for group in result["rewards"] for each in group)
        said, turns, calls = (sum(each[key] for each in results) / len(rows) for key in ("sampled", "turns", "calls"))
        yield (
            f"- {name}: rows of {statistics.fmean(rows):.0f} tokens ({min(rows)} to {max(rows)}), padding"
            f" {rectangle / sum(rows):.2f}; an attempt samples {said:.0f} tokens in {turns:.2f} answers with"
            f" {calls:.2f} calls; reward {reward:.2f}, flat groups {flat:.0%}"
        )
    yield "| CPU seconds a step | ours | " + " | ".join(f"`{name}` | of ours" for name in names) + " |"
    yield "|---|---|" + "---|---|" * len(names)
    for line in (*STAGES, "all", PER_TOKEN, "wall"):
        cells = {name: [cell(line, result) for result in results] for name, results in steps_by_name.items()}
        our_median = statistics.median(cells["ours"])
        shown = [f"{line} | {our_median:.2f}"]
        for name in names:
            ratios = sorted(b / a for a, b in zip(cells["ours"], cells[name], strict=True) if a >= 0.01)
            of = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
            shown.append(f"{statistics.median(cells[name]):.2f} | {of}")
        yield "| " + " | ".join(shown) + " |"


def cell(line: str, result: Mapping[str, Any]) -> float:
    """Value of one step in the table row `line`."""
    if line == "wall":
        return float(result["wall"])
    spent = by_stage(result)
    return spent["all"] / result["sampled"] * 1000 if line == PER_TOKEN else spent[line]


def main() -> None:
    """Print a table for each mix; with ``--be NAME`` run as that contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", default=["hello", "long", "equal"], choices=MIXES)
    parser.add_argument("--model", type=Path, help="folder of a model, for the mix turn")
    parser.add_argument("--against", nargs="+", default=["trl"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the configuration, for both sides")
    parser.add_argument("--lines", type=Path, help="append what was measured, a line of JSON for each step")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        options.mixes, options.set = ["turn"], [f"model.path={options.model}", *options.set]
    if options.be:
        turns, folder = Turns(), options.folder / options.be
        plan = planned(options.mixes[0], folder, options.rounds, options.set)
        if options.be == "ours":
            asyncio.run(ours(plan, turns))
        else:
            from benchmarks import peers_trl

            peers_trl.run(plan, folder, options.be, turns)
        return
    for mix in options.mixes:
        steps_by_name = measure(mix, ["ours", *options.against], options.rounds, options.set, options.lines)
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print("\n".join(table(mix, steps_by_name)), flush=True)


if __name__ == "__main__":
    main()
