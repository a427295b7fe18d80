"""Kinds of tasks on the tiny policy: can each be learned from its reward, and does mixing them help or harm?

``python benchmarks/kinds.py FOLDER`` makes miniatures and demonstrations (`workshop.tiny.kinds`), fine-tunes
``builtin:tiny`` on them once, then runs ``crrl train``, seed by seed: each kind alone, and all mixed, with the same
number of episodes of each kind in a step. Repeating the command skips finished runs and resumes interrupted ones.
``--table`` prints the results so far.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from coderepairrl.agents import patching
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stages.history import read_history
from coderepairrl.stats.replicates import mean_of_replicates, replicated_difference
from coderepairrl.tasks.jsonl import JsonlSource, write_jsonl
from coderepairrl.types import Ending, Episode
from workshop.tiny import kinds
from workshop.tiny.prompt import AGENT_OPTIONS

SEEDS = (0, 1)
STEPS, TASKS, GROUP = 40, 4, 8
"""Steps, tasks of each kind in a step, attempts at each."""
SECONDS = 300
"""Limit of an attempt, high enough for a busy machine."""
MIXED = "mixed"
USUAL = ("detect", "repair", "implement")
"""All kinds but ``tools``, which `crrl hello` trains."""
RATE = 3e-4
"""Learning rate, half of that of `crrl hello`: at 6e-4 the score of ``repair`` fell to zero."""
ALONE = {"agent": {"name": "direct", "options": {"system": "", "files": "none"}}}
KIND: Mapping[str, Mapping[str, Any]] = {
    "detect": {**ALONE, "reward": {"label": 1.0}, "turn_tokens": 24},
    "repair": {**ALONE, "turn_tokens": 112},
    "tools": {"agent": {"name": "nano", "options": dict(AGENT_OPTIONS)}, "turn_tokens": 96},
    "implement": {**ALONE, "turn_tokens": 96},
}
"""The sections ``[kinds.NAME]``."""
WARM_START = (
    *("data.epochs=2", "data.batch=16", "data.held_out=0.02", "run.checkpoint_every=100"),
    *("train.lr=1e-3", "train.warmup_ratio=0.05"),
)
"""docs/measurements/kinds.md was measured at commit 56e73c6, with its train.optimizer=muon train.muon_lr=0.006. With
AdamW, one epoch at 1.5e-3, six in ten replies of ``repair`` named text that was not in the file."""


def crrl(*arguments: str) -> None:
    """Run the command to its end. Raises `subprocess.CalledProcessError`."""
    subprocess.run([sys.executable, "-m", "coderepairrl.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def is_finished(run: RunFolder) -> bool:
    """Whether the run has ended."""
    return run.log.exists() and any(record["type"] == "end" for record in run.records())


def toml(value: Any) -> str:
    """`value` in TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def write_config(data: Path, of: Sequence[str]) -> Path:
    """Write the config of a run of the kinds `of`, and its held-out tasks, to `data`, where the tasks are."""
    held_out, file = (data / f"{'-'.join(of)}.{what}" for what in ("test.jsonl", "toml"))
    write_jsonl([task for kind in of for task in JsonlSource(data / f"{kind}.jsonl", split="test")], held_out)
    sources = [{"source": "jsonl", "options": {"path": str(data / f"{kind}.jsonl"), "split": "train"}} for kind in of]
    lines = [
        'extends = "hello"',
        f"tasks = {toml({'sources': sources, 'verify': False})}",
        f"kinds = {toml({kind: KIND[kind] for kind in of})}",
        "reward = { patch_edits = 0.5, tests = 0.5 }",
        f"rollout = {toml({'tasks_per_step': TASKS * len(of), 'group_size': GROUP, 'seconds': SECONDS})}",
        f"train = {toml({'balance_kinds': True, 'lr': RATE})}",
        f"eval = {toml({'source': 'jsonl', 'options': {'path': str(held_out)}, 'reward': {}})}",
        f"run = {toml({'steps': STEPS, 'checkpoint_every': STEPS, 'health': {'action': 'warn'}})}",
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def fine_tune(run: Path, model: str, examples: Sequence[Path]) -> None:
    """Fine-tune `model` on `examples` unless the run has ended."""
    if not is_finished(RunFolder(run)):
        resume = ["--resume"] if RunFolder(run).log.exists() else []
        where = (f"run.dir={run.parent}", f"run.name={run.name}", f"model.path={model}")
        crrl("sft", "sft-tiny", *where, f"data.paths={toml(list(map(str, examples)))}", *WARM_START, *resume)


def measure(folder: Path, of: Sequence[str]) -> None:
    """Run what is missing, seed by seed, so that all arms have the same seeds."""
    data, warm = folder / "data", folder / "warm"
    if not all((data / f"{kind}.parquet").exists() for kind in of):
        kinds.make(data, of)
    fine_tune(warm, "builtin:tiny", [data / f"{kind}.parquet" for kind in of])
    for seed in SEEDS:
        for name, own in arms(of).items():
            run = RunFolder(folder / f"{name}-{seed}")
            if not is_finished(run):
                resume = ["--resume"] if run.log.exists() else []
                where = (f"run.dir={folder}", f"run.name={run.path.name}", f"run.seed={seed}")
                crrl("train", str(write_config(data, own)), f"model.path={warm}", *where, *resume)


def arms(of: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The kinds in each arm."""
    return {**{kind: (kind,) for kind in of}, MIXED: tuple(of)}


def held_out(run: RunFolder) -> dict[str, dict[int, dict[str, Episode]]]:
    """The attempts at held-out tasks by kind, by step, and by task."""
    attempts: dict[str, dict[int, dict[str, Episode]]] = {}
    for episode in logged_episodes(run.records(), lambda name: name.startswith("eval-")):
        if episode.ending is not Ending.VOID:
            by_step = attempts.setdefault(episode.task_id.partition("/")[0], {})
            by_step.setdefault(episode.step, {})[episode.task_id] = episode
    return attempts


def table(folder: Path, of: Sequence[str]) -> Iterator[str]:
    """The results so far, as Markdown; kinds mixed and alone are compared on the seeds that both have."""
    runs = {(arm, seed): RunFolder(folder / f"{arm}-{seed}") for arm in arms(of) for seed in SEEDS}
    attempts = {key: held_out(run) for key, run in runs.items() if is_finished(run)}
    yield "| kind | trained | seeds | tasks in clusters | before | after | after - before | mixed - alone |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in of:
        for arm in (kind, MIXED):
            replicates = [attempts[arm, seed][kind] for seed in SEEDS if (arm, seed) in attempts]
            if not replicates:
                continue
            rows, clusters = _rows(*(steps[0] for steps in replicates), *(steps[STEPS] for steps in replicates))
            before, after = rows[: len(replicates)], rows[len(replicates) :]
            cells = [kind, "mixed" if arm == MIXED else "alone", str(len(replicates))]
            cells += [f"{len(clusters)} in {len(set(clusters))}"]
            cells += [str(mean_of_replicates(each, clusters, share=True).interval) for each in (before, after)]
            cells += [str(replicated_difference(before, after, clusters, share=True).interval)]
            both = [seed for seed in SEEDS if {(kind, seed), (MIXED, seed)} <= attempts.keys()]
            if arm == MIXED and both:
                last = [attempts[each, seed][kind][STEPS] for each in (kind, MIXED) for seed in both]
                rows, clusters = _rows(*last)
                difference = replicated_difference(rows[: len(both)], rows[len(both) :], clusters, share=True)
                cells += [str(difference.interval)]
            else:
                cells += [""]
            yield f"| {' | '.join(cells)} |"
    yield "\nTraining reward: first and last quarter of the steps. Empty held-out patches: before and after.\n"
    yield "| trained | seed | kind | held-out change | training reward | empty patches |"
    yield "|---|---|---|---|---|---|"
    for (arm, seed), by_kind in attempts.items():
        steps = [step["metrics"] for step in read_history(runs[arm, seed]).steps]
        for kind, tried in by_kind.items():
            earned = [step["reward" if len(by_kind) == 1 else f"reward/{kind}"] for step in steps]
            ends = ", ".join(f"{fmean(part):.3f}" for part in (earned[: STEPS // 4], earned[-(STEPS // 4) :]))
            empty = ", ".join(f"{fmean(not each.patch for each in tried[at].values()):.3f}" for at in (0, STEPS))
            rows, clusters = _rows(tried[0], tried[STEPS])
            change = replicated_difference(rows[:1], rows[1:], clusters, share=True).interval
            yield f"| {arm} | {seed} | {kind} | {change} | {ends} | {'' if kind == 'detect' else empty} |"
    yield "\n| trained | seed | step | held-out replies of repair |"
    yield "|---|---|---|---|"
    for (arm, seed), by_kind in attempts.items():
        for step, replies in by_kind.get("repair", {}).items():
            counts = Counter(map(quoted, replies.values()))
            yield f"| {arm} | {seed} | {step} | {', '.join(f'{what}: {n}' for what, n in counts.most_common())} |"


def quoted(episode: Episode) -> str:
    """Classify how a reply of ``repair`` quotes the text to replace."""
    *_, asked, reply = (str(message["content"]) for message in episode.turns[-1].messages)
    blocks = patching.parse_blocks(reply)
    if not blocks:
        return "no block"
    search, shown = list(blocks[0].search), asked.split("```")[-2].splitlines()[1:]
    if not _within(search, shown):
        bare = ([line.strip() for line in lines] for lines in (search, shown))
        return "other indentation" if _within(*bare) else "not there"
    return "by itself" if blocks[0].search == blocks[0].replace else "there"


def _within(part: list[str], whole: list[str]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def _rows(*each: Mapping[str, Episode]) -> tuple[list[list[float]], list[str]]:
    """Rewards of the tasks that all mappings have, and their functions, by which tasks are clustered."""
    tasks = sorted(set.intersection(*map(set, each)))
    return [[one[task].reward for task in tasks] for one in each], [task.rpartition("/")[0] for task in tasks]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", default=",".join(USUAL), help="of these and tools, separated by commas")
    parser.add_argument("--table", action="store_true", help="run nothing, and print what is there")
    options = parser.parse_args()
    folder, of = options.folder.resolve(), options.kinds.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        measure(folder, of)
    print("\n".join(table(folder, of)))


if __name__ == "__main__":
    main()
