"""Small run folders, written through the real `RunFolder` and `Log`, for tests and for manual inspection."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coderepairrl.config import Config, to_toml
from coderepairrl.learn import build_batch
from coderepairrl.report import Site
from coderepairrl.runs import Log, RunFolder
from coderepairrl.stats.measures import summarise
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, ToolCall, Turn, VersionRange

COMMANDS = ("cat", "ls", "grep", "sed", "python3", "git", "find", "head", "echo", "wc", "tail")
FUNCTIONS = tuple(f"mod{i % 5}.function{i}" for i in range(12))


class RunMaker:
    """Writes a run that learns, with the log records that `crrl train` would write."""

    def __init__(self, path: Path, *, seed: int = 0, name: str = "", tests: bool = True, **sections: Any) -> None:
        self.random = random.Random(seed)
        self.tests = tests
        run = {"name": name or path.name, "seed": seed, "steps": 6, **sections.pop("run", {})}
        reward = {"patch_lines": 0.5, "tests": 0.5} if tests else {"patch_lines": 1.0}
        self.config = Config.model_validate({"run": run, "reward": reward, **sections})
        self.folder = RunFolder(path)
        self.folder.create(to_toml(self.config), {"name": self.config.run.name, "seed": seed})
        self.log: Log = self.folder.writer()
        self.now = 1_700_000_000.0
        self._names: set[str] = set()

    def run(self, steps: int, *, evaluations: Sequence[int] = (), end: bool = True) -> RunMaker:
        self.start()
        for step in range(1, steps + 1):
            if step - 1 in evaluations:
                self.evaluate(step - 1)
            self.step(step)
        if steps in evaluations:
            self.evaluate(steps)
        if end:
            self.record("end", step=steps)
        self.log.close()
        return self

    def start(self) -> None:
        self.record("start", step=0, sandbox="bwrap", engine="tiny")

    def record(self, type: str, **fields: Any) -> None:
        self.log.append(type, **fields)

    def step(self, step: int, groups: int = 4, size: int = 4) -> None:
        episodes = []
        for number in range(groups):
            name = f"train-{step:05d}-{number:03d}"
            task = f"mutants/{FUNCTIONS[(step + number) % 12]}/compare-{number:04x}-{'qu'[number % 2]}"
            if self.random.random() < 0.05:
                self.attempt(name, 0, "train", step, task, ending=Ending.VOID)
            episodes += [self.attempt(name, attempt, "train", step, task) for attempt in range(size)]
        made = build_batch(episodes, "zscore", max_tokens=10_000)
        skill = self.skill(step)
        metrics = {
            **{name: interval.value for name, interval in summarise(episodes).values.items()},
            "reward_std": sum(group.std for group in made.groups.values()) / groups,
            "flat_groups": sum(group.flat for group in made.groups.values()),
            "informative": sum(not group.flat for group in made.groups.values()) / groups,
            "episodes": len(episodes),
            "void": 0,
            "learn/loss": self.random.gauss(0, 0.02),
            "learn/grad_norm": 0.4 + 0.3 * self.random.random() - 0.2 * skill,
            "learn/lr": 1e-4,
            "learn/ratio_mean": 1.0,
            "learn/ratio_max": 1 + 0.05 * self.random.random(),
            "learn/clip_low": 0.02 * self.random.random(),
            "learn/clip_high": 0.03 * self.random.random(),
            "learn/entropy": 0.9 - 0.6 * skill + 0.05 * self.random.random(),
            "learn/staleness_max": 0,
            "learn/mismatch_max": 4e-6 * (1 + self.random.random()),
            "learn/mismatch_mean": 1e-6 * (1 + self.random.random()),
            "rollout_seconds": 2.0 + self.random.random(),
            "learn_seconds": 1.0 + 0.2 * self.random.random(),
            "tokens_per_second": 900 + 200 * self.random.random(),
        }
        self.record(
            "step",
            step=step,
            version=step,
            checksum=f"{step:064x}",
            metrics=metrics,
            account=asdict(made.account),
            episodes=[episode.id for episode in episodes],
            advantages={sample.episode_id: round(sample.advantage, 6) for sample in made.samples},
        )

    def evaluate(self, step: int, phase: str = "eval") -> None:
        episodes = [
            self.attempt(f"{phase}-{step:05d}-{at:03d}", 0, phase, step, f"mutants/{name}/swap-{twin:04x}-{'qu'[twin]}")
            for at, (name, twin) in enumerate((name, twin) for name in FUNCTIONS for twin in (0, 1))
        ]
        summary = summarise(episodes)
        values = {name: interval._asdict() for name, interval in summary.values.items()}
        counts = {"episodes": summary.episodes, "tasks": summary.tasks, "void": summary.void}
        self.record("eval", name=phase, step=step, version=step, summary={**counts, "values": values})

    def skill(self, step: int) -> float:
        return 1 / (1 + math.exp(-(step - 0.45 * self.config.run.steps) / (0.14 * self.config.run.steps + 1e-9)))

    def attempt(
        self, group: str, attempt: int, phase: str, step: int, task: str, ending: Ending = Ending.DONE
    ) -> Episode:
        id = f"{group}-{attempt:02d}"
        while id in self._names:
            id += "-retry"
        self._names.add(id)
        fields = {"phase": phase, "step": step, "group": group, "attempt": attempt}
        self.record("episode", id=id, task=task, seed=1, **fields)
        episode = replace(self._episode(id, task, ending, step), **fields)  # type: ignore[arg-type]
        for turn in episode.turns:
            self.record("turn", episode=id, turn=turn)
        self.record("verdict", verdict=replace(episode, turns=()))
        return episode

    def _episode(self, id: str, task: str, ending: Ending, step: int) -> Episode:
        rng, skill = self.random, self.skill(step)
        turns = tuple(self._turns(rng.randint(2, 4)))
        void = ending is Ending.VOID
        if not void and rng.random() < 0.2 - 0.15 * skill:
            ending = Ending.CRASH if len(turns) == 2 else Ending.LIMIT
        empty = void or rng.random() > 0.55 + 0.4 * skill
        fixed = not empty and rng.random() < 0.2 + 0.6 * skill * (1.0 if task.endswith("q") else 0.4)
        close = 0.0 if empty else 1.0 if fixed else min(1.0, max(0.0, rng.gauss(0.2 + 0.3 * skill, 0.15)))
        scores = () if void else (Score("patch_lines", close, 0.5 if self.tests else 1.0),)
        if self.tests and not void:
            scores += (Score("tests", float(fixed), 0.5),)
        calls = tuple(self._calls(len(turns), skill))
        generate = sum(turn.ended - turn.started for turn in turns)
        timings = {"sandbox": 0.04, "generate": generate, "tools": 0.05 * len(calls), "diff": 0.01, "reward": 0.08}
        return Episode(
            id, task, "", step, "", 0, ending,
            reason={Ending.VOID: "engine", Ending.LIMIT: "calls", Ending.CRASH: "exit 1"}.get(ending, "submitted"),
            fault="EngineFault: gone" if void else "",
            crash="mine ended with exit code 1" if ending is Ending.CRASH else "",
            turns=turns, tool_calls=calls, patch=b"" if empty else b"diff --git a/x b/x\n", scores=scores,
            timings={**timings, "total": sum(timings.values()) + 0.05},
        )  # fmt: skip

    def _turns(self, count: int) -> Iterator[Turn]:
        for index in range(count):
            length = self.random.randint(8, 30)
            self.now += 0.05
            ids = tuple(self.random.randrange(250) for _ in range(length))
            yield Turn(
                index,
                index - 1 if index else None,
                TokenSpan(tuple(range(30 if index else 120)), Origin.GIVEN),
                TokenSpan(ids, Origin.POLICY, (-0.5,) * length),
                versions=(VersionRange(0, 0, length),),
                started=self.now - 0.04,
                ended=self.now,
            )

    def _calls(self, count: int, skill: float) -> Iterator[ToolCall]:
        for index in range(count):
            last = index == count - 1
            name = "apply_patch" if last else "shell"
            weights = [4, 3, 1 + 4 * skill, 1, 2 - 1.5 * skill, 1, 1, 1, 0.5, 0.3, 0.2]
            command = "" if last else self.random.choices(COMMANDS, weights)[0]
            ok = self.random.random() < (0.45 if last else 0.7) + 0.3 * skill
            yield ToolCall(index, name, "{}", ok, 10, 0.05, command)


def write_run(path: Path, steps: int = 4, evaluations: Sequence[int] = (0, 4), **more: Any) -> Path:
    """Write a finished run of a few steps."""
    options: Mapping[str, Any] = {"run": {"steps": steps}, **more}
    return RunMaker(path, **options).run(steps, evaluations=evaluations).folder.path


def read_rows(path: Path) -> list[Any]:
    [run] = Site([path]).runs.values()
    return list(run.rows.by_id.values())


def write_hostile_run(path: Path, evil: str) -> Path:
    """Write a run whose words are all `evil`."""
    option = evil.replace("\ud800", "")  # TOML cannot have it
    maker = RunMaker(path, name="run", agent={"name": "nano", "options": {option: option}})
    plain, attempt = maker._episode, maker.attempt

    def made(id: str, task: str, ending: Ending, step: int) -> Episode:
        return make_hostile_episode(evil, plain(id, task, ending, step))

    def begun(group: str, number: int, phase: str, step: int, task: str, ending: Ending = Ending.DONE) -> Episode:
        return attempt(f"{evil}{group}", number, phase, step, f"{evil}/{task}", ending)

    maker._episode, maker.attempt = made, begun  # type: ignore[method-assign]
    maker.run(2, evaluations=(0, 2))
    tasks = dict.fromkeys(row.task for row in read_rows(path))
    maker.folder.add_tasks(Task(task, evil, evil, "", evil.encode(errors="replace"), repository=evil) for task in tasks)
    about: dict[str, Any] = json.loads((path / "run.json").read_text())
    changes = {"name": evil, "commit": evil, "argv": [evil], "platform": evil, "versions": {evil: evil}, "seed": evil}
    (path / "run.json").write_text(json.dumps(about | changes | {"policy": evil}))
    return path


def make_hostile_episode(evil: str, made: Episode) -> Episode:
    patch = f"diff --git a/{evil} b/{evil}\n--- a/{evil}\n+++ b/{evil}\n@@ -1 +1 @@ {evil}\n-{evil}\n+{evil}\n"
    scores = (*made.scores, Score(evil, 0.5, 0.0, evil, nearest=evil))
    call = {"id": evil, "function": {"name": evil, "arguments": json.dumps({evil: evil, "old": evil, "new": evil})}}
    reply = {"role": "assistant", "content": evil, "reasoning_content": evil, "tool_calls": [call, call]}
    answer = {"role": "tool", "tool_call_id": evil, "content": [{"text": evil}]}
    messages = ({"role": evil, "content": evil}, answer, reply)
    return replace(
        made,
        tool_calls=(ToolCall(0, evil, evil, True, command=evil), ToolCall(99, evil, evil, False)),
        scores=scores if made.ending is not Ending.VOID else (),
        reason=evil,
        fault=evil if made.ending is Ending.VOID else "",
        crash=evil if made.ending is Ending.CRASH else "",
        patch=b"" if made.ending is Ending.VOID else patch.encode(errors="replace"),
        printed=evil,
        language=evil,
        turns=tuple(replace(turn, dialect=evil, overridden=(evil,), messages=messages) for turn in made.turns),
    )
