"""Does SWE-bench without Docker give the benchmark's own verdicts? (docs/measurements/benchmarks.md)

    python benchmarks/swe_bench_native.py instances --rows swebench_verified.jsonl.gz --out held.jsonl
    python benchmarks/swe_bench_native.py instances --rows gym.jsonl.gz --specifications constants.py --out out.jsonl
    python benchmarks/swe_bench_native.py predictions --rows swebench_lite.jsonl.gz --name lite --held held.jsonl \\
        --pairs swebench_pairs.jsonl.gz --out predictions.jsonl
    python benchmarks/swe_bench_native.py table held.jsonl predictions.jsonl
    python benchmarks/swe_bench_native.py held held.jsonl >src/coderepairrl/tasks/sources/swe_bench_native.txt
    CRRL_CACHE=EMPTY_FOLDER python benchmarks/swe_bench_native.py offline --rows swebench_verified.jsonl.gz \\
        --out offline.jsonl

`instances`: grades each instance of ``--repository`` (default: all with a specification) with its reference and with
no patch, in its native environment (``workspace=native``); it "holds" if only the reference resolves it. `predictions`:
grades real patches with published outcomes (JSON lines with ``instance_id``, ``system``, ``dataset``, ``model_patch``
and ``resolved``) on the instances that hold by ``--held``. Both skip what is in ``--out``. Commits come from
``--clone``; with ``--specifications`` the rows are SWE-Gym's.
`offline`: prepares ten instances of the manifest (lowest SHA-256 of the id) with ``crrl tasks prepare`` in an empty
cache; then, without a network, grades the reference, no patch, and the reference of another instance of the repository;
at last flips one byte in an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coderepairrl import grading, sandbox, tasks
from coderepairrl.environments.build import Specification, build_environment
from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.caches import user_cache
from coderepairrl.protocols import SandboxBackend
from coderepairrl.stages.grade import grade_predictions
from coderepairrl.stages.predictions import Prediction
from coderepairrl.tasks import catalog
from coderepairrl.tasks.benchmark import encode_patch
from coderepairrl.types import Task

CRRL = str(Path(sys.executable).with_name("crrl"))
TRIED = ("gold", "untouched", "of other")
ROOM = {"memory": 4 << 30, "tmp_bytes": 2 << 30, "open_files": 4096}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from map(json.loads, file)


async def verdict(backend: SandboxBackend, task: Task, patch: bytes) -> dict[str, Any]:
    """Grade `patch`: whether it resolves the instance, why not, and the seconds."""
    began = time.monotonic()
    async with backend.open(task) as box:
        graded = await grading.grade_patch(box, task, patch)
    return {"resolved": not graded.problem, "seconds": round(time.monotonic() - began, 1), "why": graded.problem[:300]}


async def instances(arguments: argparse.Namespace, backend: SandboxBackend) -> None:
    wanted = [
        task
        for task in load_instances(arguments)
        if not arguments.repository or task.repository in arguments.repository
    ]
    await hold_each(wanted, backend, arguments.out)


async def hold_each(wanted: Iterable[Task], backend: SandboxBackend, path: Path, jobs: int = 1) -> None:
    """Run `hold` on each task that is not in `path` yet, `jobs` at a time, and append the results."""
    done = {each["id"] for each in lines(path)}
    slots = asyncio.Semaphore(jobs)

    async def one(task: Task) -> None:
        async with slots:
            about = json.dumps(await hold(task, backend))
        with path.open("a") as out:
            out.write(about + "\n")
        print(about[:200], flush=True)

    await asyncio.gather(*(one(task) for task in wanted if task.id not in done))


async def hold(task: Task, backend: SandboxBackend) -> dict[str, Any]:
    """Build the task's environment, and grade its reference and no patch in it."""
    about: dict[str, Any] = {"id": task.id, "repository": task.repository}
    began = time.monotonic()
    try:
        environment = await build_environment(Specification.parse(task.environment))
        about["built"] = round(time.monotonic() - began, 1)
        about["left_out"] = environment.left_out
        about["gold"] = await verdict(backend, task, task.reference)
        about["untouched"] = await verdict(backend, task, b"")
    except CodeRepairError as error:
        about["error"] = f"{type(error).__name__}: {error}"[:600]
    return about


async def predictions(arguments: argparse.Namespace, backend: SandboxBackend) -> None:
    held = {each["id"] for path in arguments.held for each in lines(path) if holds(each)}
    holding = {task.id: task for task in load_instances(arguments) if task.id in held}
    pairs = [
        pair
        for pair in lines(arguments.pairs)
        if pair["dataset"] == arguments.name and pair["instance_id"] in holding and (pair["model_patch"] or "").strip()
    ]
    requests = [Prediction(each["instance_id"], each["system"], encode_patch(each["model_patch"])) for each in pairs]
    verdicts = arguments.out.with_suffix(".graded.jsonl")
    graded = await grade_predictions(requests, holding, backend, verdicts, resume=True, jobs=1, say=print)
    with arguments.out.open("w") as out:
        for pair, each in zip(pairs, graded, strict=True):
            name = each.instance_id
            about = {"id": name, "system": each.model_name_or_path, "repository": holding[name].repository}
            about |= {"published": pair["resolved"], "resolved": each.resolved, "seconds": each.seconds}
            out.write(json.dumps({**about, "why": (each.fault or each.problem)[:300]}) + "\n")


def load_instances(arguments: argparse.Namespace, **options: bool) -> list[Task]:
    """Load the instances of ``--rows`` that have a specification."""
    if arguments.specifications:
        gym = {"workspace": "native", "specifications": arguments.specifications, "clone": arguments.clone}
        return list(tasks.make_source("swe_gym", path=str(arguments.rows), **gym))
    options = {"all_native": True, **options}
    native = {"name": arguments.name, "workspace": "native", "clone": arguments.clone}
    return list(tasks.make_source("swe_bench", path=str(arguments.rows), **native, **options))


def offline(arguments: argparse.Namespace) -> None:
    """Prepare into an empty cache, then restart this script without a network."""
    cache = user_cache()
    if cache.exists() and any(cache.iterdir()):
        raise SystemExit(f"{cache} is not empty: set CRRL_CACHE to a new folder")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "tasks.jsonl")
        catalog.export_tasks_jsonl(by_hash(load_instances(arguments, all_native=False))[: arguments.number], source)
        began = time.monotonic()
        prepare = [CRRL, "tasks", "prepare", "jsonl", f"path={source}"]
        done = subprocess.run(prepare, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, f"prepared in {time.monotonic() - began:.0f} s", sep="", file=sys.stderr)
        done.check_returncode()
        built = re.findall(r"^environment .*: ([0-9a-f]{16}), ([\d.]+) s$", done.stderr, re.MULTILINE)
        about = {name: {"seconds": float(seconds), **disk(cache / "environments" / name)} for name, seconds in built}
        arguments.out.write_text("")
        again = [sys.executable, __file__, "inside", *sys.argv[2:], "--built", json.dumps(about)]
        nobody = [] if os.geteuid() == 0 else ["--map-current-user"]
        subprocess.run(["unshare", *nobody, "--net", *again], check=True)
        flip_byte(arguments, prepare)


async def inside(arguments: argparse.Namespace, backend: SandboxBackend) -> None:
    """Without a network, grade each instance with its reference, no patch and another instance's reference."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 53))  # sends nothing: fails if there is no route
        raise SystemExit("there is a network here")
    built, every = json.loads(arguments.built), by_hash(load_instances(arguments, all_native=False))
    with arguments.out.open("a") as out:
        for task in every[: arguments.number]:
            others = [each for each in every if each.repository == task.repository and each.id != task.id] or every
            other = next(each for each in others if each.id != task.id)
            name = Specification.parse(task.environment).folder.name
            about = {"id": task.id, "repository": task.repository, "environment": built[name], "other": other.id}
            about["gold"] = await verdict(backend, task, task.reference)
            about["untouched"] = await verdict(backend, task, b"")
            about["of other"] = await verdict(backend, task, other.reference)
            out.write(json.dumps(about) + "\n")
            out.flush()
            print(json.dumps(about)[:300], flush=True)


def flip_byte(arguments: argparse.Namespace, prepare: list[str]) -> None:
    """Flip a byte in the environment of the first instance, and print how three commands report it."""
    [first, *_] = by_hash(load_instances(arguments, all_native=False))
    path = max(Specification.parse(first.environment).folder.rglob("*.py"), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for words in (prepare, [CRRL, "tasks", "verify", *prepare[3:]], [CRRL, "check", "environments", *prepare[3:]]):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        message = (done.stderr or done.stdout).strip()
        print(f"one byte flipped: {' '.join(words[1:4])}: exit code {done.returncode}: {message}")


def by_hash(instances: list[Task]) -> list[Task]:
    """Sort by the hash of ids, an order that nobody chose."""
    return sorted(instances, key=lambda task: hashlib.sha256(task.id.encode()).hexdigest())


def disk(folder: Path) -> dict[str, float]:
    """MiB of an environment, and of its files that no other environment has."""
    files = [path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    unshared = [each for each in files if each.st_nlink <= 2]  # one link here, one in the pool of shared files
    mib, unshared_mib = (round(sum(512 * each.st_blocks for each in some) / 2**20, 1) for some in (files, unshared))
    return {"MiB": mib, "own MiB": unshared_mib}


def holds(about: dict[str, Any]) -> bool:
    """Whether the reference resolves the instance and no patch does not."""
    return "error" not in about and about["gold"]["resolved"] and not about["untouched"]["resolved"]


def table_offline(rows: list[dict[str, Any]]) -> None:
    print("| instance | built, s | MiB | of its own | gold resolves | untouched | gold of another | test run, s |")
    print("|---|---|---|---|---|---|---|---|")
    for each in rows:
        environment, verdicts = each["environment"], {name: str(each[name]["resolved"]).lower() for name in TRIED}
        cells = [each["id"], *(f"{environment[key]:.0f}" for key in ("seconds", "MiB", "own MiB"))]
        other = f"{verdicts['of other']} ({each['other'].rpartition('-')[2]})"
        cells += (verdicts["gold"], verdicts["untouched"], other, f"{each['gold']['seconds']:.1f}")
        print(f"| {' | '.join(cells)} |")


def table(arguments: argparse.Namespace) -> None:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    out: list[str] = []
    rows_read = [each for path in arguments.results for each in lines(path)]
    if rows_read and "environment" in rows_read[0]:
        return table_offline(rows_read)
    for about in rows_read:
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


def held(arguments: argparse.Namespace) -> None:
    print("\n".join(sorted(each["id"] for path in arguments.results for each in lines(path) if holds(each))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instances", "predictions", "table", "held", "offline", "inside"))
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--name", default="verified")
    parser.add_argument("--specifications")
    parser.add_argument("--clone", default="https://github.com/{repository}.git")
    parser.add_argument("--repository", action="append", default=[])
    parser.add_argument("--held", type=Path, action="append", default=[])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--number", type=int, default=10)
    parser.add_argument("--built", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what in ("table", "held"):
        return {"table": table, "held": held}[arguments.what](arguments)
    if arguments.what == "offline":
        offline(arguments)
        return
    backend = sandbox.make_backend("bwrap", **ROOM)
    asyncio.run(
        {"instances": instances, "predictions": predictions, "inside": inside}[arguments.what](arguments, backend)
    )


if __name__ == "__main__":
    main()
