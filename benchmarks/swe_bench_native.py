"""Does SWE-bench without Docker give the benchmark's own verdicts? (docs/measurements/benchmarks.md)

    python benchmarks/swe_bench_native.py instances --rows swebench_verified.jsonl.gz --out held.jsonl
    python benchmarks/swe_bench_native.py instances --rows gym.jsonl.gz --specifications constants.py --out out.jsonl
    python benchmarks/swe_bench_native.py predictions --rows swebench_lite.jsonl.gz --name lite --held held.jsonl \\
        --pairs swebench_pairs.jsonl.gz --out predictions.jsonl
    python benchmarks/swe_bench_native.py table held.jsonl predictions.jsonl
    python benchmarks/swe_bench_native.py held held.jsonl >src/coderepairrl/tasks/sources/swe_bench_native.txt

`instances`: each instance of ``--repository`` (all that have a specification, if none is named), its reference and no
patch at all, in its native environment (``workspace=native``), judged by the harness. `predictions`: real patches with
published outcomes (JSON lines with ``instance_id``, ``system``, ``dataset``, ``model_patch`` and ``resolved``), on the
instances that hold by ``--held``. What is in ``--out`` already is not run again. Commits come from ``--clone``;
with ``--specifications`` the rows are SWE-Gym's.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coderepairrl import grading, sandbox, tasks
from coderepairrl.environments import Specification, build
from coderepairrl.errors import CodeRepairError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.types import Task

ROOM = {"memory": 4 << 30, "tmp_bytes": 2 << 30, "open_files": 4096}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from map(json.loads, file)


async def verdict(backend: SandboxBackend, task: Task, patch: bytes) -> dict[str, Any]:
    """Whether `patch` resolves the instance, in how many seconds, and why not."""
    began = time.monotonic()
    async with backend.open(task) as box:
        found = await grading.grade(box, task, patch)
    return {"resolved": not found.problem, "seconds": round(time.monotonic() - began, 1), "why": found.problem[:300]}


async def instances(given: argparse.Namespace, backend: SandboxBackend) -> None:
    done = {each["id"] for each in lines(given.out)}
    with given.out.open("a") as out:
        for task in chosen(given):
            if task.id in done or (given.repository and task.repository not in given.repository):
                continue
            about: dict[str, Any] = {"id": task.id, "repository": task.repository}
            began = time.monotonic()
            try:
                await build(Specification.parse(task.environment))
                about["built"] = round(time.monotonic() - began, 1)
                about["gold"] = await verdict(backend, task, task.reference)
                about["untouched"] = await verdict(backend, task, b"")
            except CodeRepairError as error:
                about["error"] = f"{type(error).__name__}: {error}"[:600]
            out.write(json.dumps(about) + "\n")
            out.flush()
            print(json.dumps(about)[:200], flush=True)


async def predictions(given: argparse.Namespace, backend: SandboxBackend) -> None:
    held = {each["id"] for path in given.held for each in lines(path) if holds(each)}
    done = {(each["id"], each["system"]) for each in lines(given.out)}
    there = {task.id: task for task in chosen(given) if task.id in held}
    with given.out.open("a") as out:
        for pair in lines(given.pairs):
            task, key = there.get(pair["instance_id"]), (pair["instance_id"], pair["system"])
            if task is None or pair["dataset"] != given.name or key in done or not (pair["model_patch"] or "").strip():
                continue
            patch = pair["model_patch"] if pair["model_patch"].endswith("\n") else pair["model_patch"] + "\n"
            await build(Specification.parse(task.environment))
            found = await verdict(backend, task, patch.encode("utf-8", "surrogateescape"))
            about = {
                "id": key[0],
                "system": key[1],
                "repository": task.repository,
                "published": pair["resolved"],
                **found,
            }
            out.write(json.dumps(about) + "\n")
            out.flush()


def chosen(given: argparse.Namespace) -> list[Task]:
    """The instances of the table that have a specification."""
    if given.specifications:
        options = {"workspace": "native", "specifications": given.specifications, "clone": given.clone}
        return list(tasks.make("swe_gym", path=str(given.rows), **options))
    options = {"name": given.name, "workspace": "native", "all_native": True, "clone": given.clone}
    return list(tasks.make("swe_bench", path=str(given.rows), **options))


def holds(about: dict[str, Any]) -> bool:
    """Whether an instance is what it should be."""
    return "error" not in about and about["gold"]["resolved"] and not about["untouched"]["resolved"]


def table(given: argparse.Namespace) -> None:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    out: list[str] = []
    for about in (each for path in given.results for each in lines(path)):
        row = rows[about["repository"]]
        if "published" in about:
            row["predictions"] += 1
            row["as published"] += about["published"] == about["resolved"]
            if about["published"] != about["resolved"]:
                out.append(
                    f"- {about['id']} by {about['system']}: published {about['published']}; {about['why'][:160]}"
                )
            continue
        row["instances"] += 1
        row["hold"] += holds(about)
        if not holds(about):
            why = about.get("error") or about["gold"]["why"] or "resolved without any patch"
            out.append(f"- {about['id']}: {why[:160]}")
        elif "built" in about:
            seconds[about["repository"]].append(about["gold"]["seconds"])
    print(
        "| repository | instances | hold | test run, median s | predictions | as published |\n|---|---|---|---|---|---|"
    )
    for name, row in sorted(rows.items()):
        ran = sorted(seconds[name])
        middle = f"{ran[len(ran) // 2]:.1f}" if ran else ""
        cells = (row["instances"], row["hold"], middle, row["predictions"] or "", row["as published"] or "")
        print(f"| {name} | {' | '.join(map(str, cells))} |")
    print("\n" + "\n".join(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instances", "predictions", "table", "held"))
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--name", default="verified")
    parser.add_argument("--specifications")
    parser.add_argument("--clone", default="https://github.com/{repository}.git")
    parser.add_argument("--repository", action="append", default=[])
    parser.add_argument("--held", type=Path, action="append", default=[])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "table":
        table(given)
        return
    if given.what == "held":
        print("\n".join(sorted(each["id"] for path in given.results for each in lines(path) if holds(each))))
        return
    backend = sandbox.make("bwrap", **ROOM)
    asyncio.run({"instances": instances, "predictions": predictions}[given.what](given, backend))


if __name__ == "__main__":
    main()
