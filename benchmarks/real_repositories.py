"""A training step on real repositories, three in images and three in native environments, without Docker or a network.

    python benchmarks/real_repositories.py --rows swebench_verified.jsonl.gz \\
        --clone /srv/mirrors/{repository} --work FOLDER

First, with a network (or a package index), it prepares the native environments of six instances of SWE-bench and makes
images of three of them in SWE-bench's layout: this machine's programs, the environment at conda's path, and the
repository with its whole later history in ``/testbed``. Then it searches each prepared image for the published
repair as an agent could: in every commit later than the base, tags, logs, stashes, hooks, other repositories and
package caches.

At last it makes two runs of ``crrl train``, each in a network namespace with only a loopback, each one step of a small
model with random weights and a context of 16,384 tokens, after the usual check of references. In the first, an engine
replays the published repair in the first attempt at each task; in the second, the model samples.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coderepairrl import sandbox, tasks
from coderepairrl.engines import ScriptedEngine
from coderepairrl.environments.build import Specification, build_environment
from coderepairrl.protocols import EngineSpec, Reward, SandboxBackend
from coderepairrl.runs import RunFolder
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import EngineNeeds, Episode, Sampling, Score, Task
from images import Layout, copy_programs

NATIVE = ("pallets__flask-5014", "pytest-dev__pytest-7982", "pylint-dev__pylint-4970")
IMAGES = ("psf__requests-1142", "sympy__sympy-13480", "sphinx-doc__sphinx-7440")
CONTEXT = 16_384
SHAPE = {
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CONDA = """conda() { [ "$1" = activate ] && export PATH=/opt/miniconda3/envs/$2/bin:$PATH CONDA_DEFAULT_ENV=$2; }\n"""
CONFIG = """
[run]
name = "{name}"
dir = "{work}/runs"
steps = 1
[model]
path = "{work}/model"
init = "random"
[engine]
name = "{engine}"
options = {options}
[agent]
name = "nano"
[reward]
{reward}
[rollout]
tasks_per_step = {tasks}
group_size = 2
concurrency = 2
calls = 3
tokens = {context}
turn_tokens = {turn}
seconds = 600
[sandbox.options]
memory = 4294967296
[train]
lr = 1e-4
[eval]
before = false
after = false
tasks = 0
[[tasks.sources]]
source = "swe_bench"
options = {{ path = "{work}/native-{each}.jsonl", workspace = "native", clone = "{clone}", for_training = true }}
[[tasks.sources]]
source = "swe_bench"
options = {{ path = "{work}/images-{each}.jsonl", workspace = "image", clone = "{clone}", for_training = true }}
"""


# -- the engine and the reward of the runs


class Replay(EngineSpec):
    """An engine that replays the published repair in the first attempt at each task, and replies "Done." in the others.

    It recognises a task by the beginning of its issue. `rows`: file of the tasks' rows.
    """

    name = "replay"

    def __init__(self, *, rows: str) -> None:
        self._rows = [json.loads(line) for line in Path(rows).read_text().splitlines()]

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        words = Tokenizer.from_file(str(model / "tokenizer.json"))
        requests: Counter[str] = Counter()

        def script(ids: Sequence[int], sampling: Sampling, seed: int) -> Sequence[int]:
            text = words.decode(list(ids), skip_special_tokens=False)
            reply = "Done."
            if "<tool_response>" not in text:
                row = next(row for row in self._rows if row["problem_statement"].strip()[:60].splitlines()[0] in text)
                requests[row["instance_id"]] += 1
                if requests[row["instance_id"]] == 1:
                    patch = row["patch"] if row["patch"].endswith("\n") else row["patch"] + "\n"
                    call = {"name": "shell", "arguments": {"cmd": f"git apply - <<'END_OF_PATCH'\n{patch}END_OF_PATCH"}}
                    reply = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            return words.encode(f"{reply}<|im_end|>", add_special_tokens=False).ids

        return ScriptedEngine(script, context=CONTEXT, chunk=64)


class EvenTokens(Reward):
    """The share of sampled tokens with an even id, in which replies of random weights differ."""

    name = "even_tokens"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        ids = [token for turn in episode.turns for token in turn.output.ids]
        return Score(self.name, sum(token % 2 == 0 for token in ids) / max(len(ids), 1))


# -- making images


def pack_folders(*folders: tuple[Path, str]) -> bytes:
    """Pack the contents of folders as a layer, each at a path from the root, owned by root."""
    import io

    buffer = io.BytesIO()

    def by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder, where in folders:
            for path in sorted(folder.iterdir()):
                archive.add(path, f"{where}/{path.name}".lstrip("/"), filter=by_root)
    return buffer.getvalue()


def clone_repository(row: Mapping[str, Any], mirror: str, target: Path, built: Path, edits: Sequence[str]) -> None:
    """Clone the whole history, check out the commit of `row`, and add the built files of an editable install.

    The benchmark's `edits` are committed on top, as in its images: without them, sphinx's log names no passed test.
    """
    subprocess.run(["git", "clone", "-q", mirror, target], check=True)
    subprocess.run(["git", "checkout", "-q", row["base_commit"]], cwd=target, check=True)
    subprocess.run(["bash", "-e"], input="\n".join(edits), text=True, cwd=target, check=True)
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-am", "SWE-bench"], cwd=target, check=True)
    if built.is_dir():
        shutil.copytree(built, target, dirs_exist_ok=True)


def copy_environment(folder: Path, target: Path) -> None:
    """Copy the native environment in `folder` to `target`, importing the project from ``/testbed`` as conda's does."""
    shutil.copytree(folder, target, symlinks=True, ignore=shutil.ignore_patterns("built", "environment.json"))
    for path in target.glob("lib/python*/site-packages/*.pth"):
        path.write_text(path.read_text().replace("/workspace", "/testbed"))


def python_of(folder: Path) -> Path:
    """Prefix of the Python installation of the native environment in `folder`."""
    return Path(json.loads((folder / "environment.json").read_text())["python"]).parent.parent


def make_image(
    layout: Layout, base: bytes, row: Mapping[str, Any], mirror: str, built: Specification, scratch: Path
) -> str:
    folder, prefix = built.folder, python_of(built.folder)
    shutil.rmtree(scratch, ignore_errors=True)
    copy_environment(folder, scratch / "env")
    clone_repository(row, mirror, scratch / "testbed", folder / "built", built.edits)
    (scratch / "cache").mkdir()
    (scratch / "cache/later-9.9-py3-none-any.whl").write_text(row["patch"])
    layers = [
        base,
        pack_folders((prefix, str(prefix))),
        pack_folders((scratch / "env", "/opt/miniconda3/envs/testbed")),
        pack_folders((scratch / "testbed", "/testbed"), (scratch / "cache", "/root/.cache/pip")),
    ]
    return layout.image(layers, row["instance_id"])


# -- searching images for the repair


PROBE = """
cd /testbed
echo reflog $(git reflog --all | wc -l) stash $(git stash list | wc -l) replaced $(git replace | wc -l)
echo remotes $(git remote | wc -l) hooks $(ls .git/hooks 2>/dev/null | grep -v sample | wc -l)
echo refs-beyond $(git for-each-ref --format='%(objectname)' --no-merged HEAD | wc -l)
echo commits-beyond $(($(git rev-list --all --count) - $(git rev-list HEAD --count)))
echo dangling $(git fsck --no-reflogs --unreachable 2>/dev/null | wc -l)
echo promised $(ls .git/objects/pack | grep -c promisor) borrowed $(ls .git/objects/info/alternates 2>/dev/null | wc -l)
echo wheels $(find / -xdev -name '*.whl' -not -path '*/ensurepip/*' -not -path '*/embed/*' 2>/dev/null | wc -l)
echo repositories $(find / -xdev -name HEAD -path '*.git/HEAD' -not -path '/testbed/.git/HEAD' 2>/dev/null | wc -l)
"""


async def search_later_history(backend: SandboxBackend, task: Task, mirror: str, row: Mapping[str, Any]) -> str:
    """Search an image for later history as an agent could; all zeros mean that nothing was found."""
    later = subprocess.run(
        ["git", "rev-list", "--all", f"^{row['base_commit']}"], cwd=mirror, capture_output=True, text=True, check=True
    ).stdout
    line = max(
        (line[1:].strip() for line in row["patch"].splitlines() if line[:1] == "+" and line[:3] != "+++"), key=len
    )
    async with backend.open(task) as box:
        has = await box.exec(["git", "cat-file", "--batch-check"], stdin=later.encode(), max_bytes=64 << 20)
        later_found = sum(not each.endswith(b" missing") for each in has.output.splitlines())
        printed = (await box.exec(["bash", "-c", PROBE], timeout=300)).output.decode()
        script = 'git cat-file --batch-all-objects --batch --buffer | grep -a -c -F -e "$1"; git rev-list --count HEAD'
        counts = await box.exec(["bash", "-c", script, "bash", line], timeout=300, cwd="/testbed")
    words = " ".join(printed.split())
    texts, ancestors = counts.output.decode().split()
    return (
        f"{later_found} of {len(later.splitlines())} later commits, {texts} objects with the repair's longest line,"
        f" {ancestors} ancestors kept; {words}"
    )


# -- the two runs


def write_model(target: Path) -> None:
    """Write a model folder without weights, smaller and with a longer context than the shipped policy."""
    shipped = resources.files("coderepairrl.models.tiny")
    target.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_text((shipped / name).read_text())
    about = json.loads((target / "config.json").read_text()) | SHAPE
    (target / "config.json").write_text(json.dumps(about))


def train(config: Path) -> float:
    """Run `crrl train` without any network; returns its seconds."""
    began = time.monotonic()
    who = [] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps"]
    inside = ["sh", "-c", 'ip link set lo up && ! ip route get 1.1.1.1 2>/dev/null && exec "$@"', "sh"]
    command = [sys.executable, "-m", "coderepairrl.cli", "train", str(config)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(["unshare", "--net", *who, *inside, *command], env=env, check=True)
    return time.monotonic() - began


def show(folder: Path, seconds: float) -> None:
    run = RunFolder(folder)
    print(f"\n{folder.name}: {seconds:.0f} s\n")
    print("| task | workspace | attempt | tokens | sampled | ending | patch | reward |")
    print("|---|---|---|---|---|---|---|---|")
    tasks_by_id = run.tasks()
    for episode in sorted(run.episodes("train-*"), key=lambda each: (each.task_id, each.attempt)):
        kind = tasks_by_id[episode.task_id].workspace.partition(":")[0]
        longest = max((len(turn.given.ids) + len(turn.output.ids) for turn in episode.turns), default=0)
        sampled = sum(len(turn.output.ids) for turn in episode.turns)
        scores = ", ".join(f"{score.name} {score.value:.3g}" for score in episode.scores)
        words = [episode.task_id, "native" if kind == "git" else kind, episode.attempt, longest, sampled]
        print("|", " | ".join(map(str, [*words, episode.ending.name, len(episode.patch), scores])), "|")
    for step in run.metrics():
        print("\n", {key: value for key, value in step.items() if isinstance(value, int | float)})


async def make_images(arguments: argparse.Namespace) -> None:
    """Prepare the environments, make and prepare the images, and search each for the published repair."""
    arguments.work.mkdir(parents=True)
    arguments.work.chmod(0o755)
    wanted = (*NATIVE, *IMAGES)
    with gzip.open(arguments.rows, "rt") as file:
        rows = {row["instance_id"]: row for row in map(json.loads, file) if row["instance_id"] in wanted}
    write(arguments.work / "all.jsonl", list(rows.values()))
    write(arguments.work / "native.jsonl", [rows[name] for name in NATIVE])
    options = {"workspace": "native", "clone": arguments.clone, "for_training": True}
    ready = {
        task.id: task for task in tasks.make_source("swe_bench", path=str(arguments.work / "all.jsonl"), **options)
    }
    began = time.monotonic()
    await prepare_tasks([ready[name] for name in NATIVE], say=print)
    specifications = {name: Specification.parse(ready[name].environment) for name in IMAGES}
    folders = [(await build_environment(each)).folder for each in specifications.values()]
    print(f"six environments: {time.monotonic() - began:.0f} s (those in the cache are verified)")
    root = arguments.work / "root"
    copy_programs(root, {python_of(folder) for folder in folders})
    (root / "opt/miniconda3/bin").mkdir(parents=True)
    (root / "opt/miniconda3/bin/activate").write_text(CONDA)
    layout, base, image_rows = Layout(arguments.work / "oci"), pack_folders((root, "")), []
    for name in IMAGES:
        mirror = arguments.clone.format(repository=rows[name]["repo"])
        reference = make_image(layout, base, rows[name], mirror, specifications[name], arguments.work / "scratch")
        image_rows.append(rows[name] | {"image": reference})
    write(arguments.work / "images.jsonl", image_rows)
    began = time.monotonic()
    options = {"workspace": "image", "for_training": True}
    done = await prepare_tasks(
        tasks.make_source("swe_bench", path=str(arguments.work / "images.jsonl"), **options), say=print
    )
    print(f"three images unpacked: {time.monotonic() - began:.0f} s")
    for image in done.images:
        report = image.image.report or {}
        print(f"  {report['files']} files, {report['bytes'] >> 20} MiB, {report['shared'] >> 20} of it shared,"
              f" removed {report['removed']}")  # fmt: skip
    backend = sandbox.make_backend("bwrap", memory=4 << 30)
    for task in tasks.make_source("swe_bench", path=str(arguments.work / "images.jsonl"), **options):
        mirror = arguments.clone.format(repository=rows[task.id]["repo"])
        print(f"attacks on {task.id}: {await search_later_history(backend, task, mirror, rows[task.id])}")
    backend.close()


def make_runs(arguments: argparse.Namespace) -> None:
    """Train for a step on the first tasks of each kind: on replayed repairs, and on samples of random weights."""
    write_model(arguments.work / "model")
    for kind, names in (("native", NATIVE), ("images", IMAGES)):
        rows = map(json.loads, (arguments.work / f"{kind}.jsonl").read_text().splitlines())
        write(
            arguments.work / f"{kind}-{arguments.each}.jsonl",
            [row for row in rows if row["instance_id"] in names[: arguments.each]],
        )
    common = {
        "work": arguments.work,
        "clone": arguments.clone,
        "context": CONTEXT,
        "each": arguments.each,
        "tasks": 2 * arguments.each,
    }
    for name, engine, options, reward, turn in (
        ("replay", "real_repositories:Replay", f'{{ rows = "{arguments.work}/all.jsonl" }}', "tests = 1.0", 8192),
        ("random", "tiny", "{}", 'tests = 0.5\n"real_repositories:EvenTokens" = 0.5', 256),
    ):
        config = arguments.work / f"{name}.toml"
        config.write_text(CONFIG.format(**common, name=name, engine=engine, options=options, reward=reward, turn=turn))
        show(arguments.work / "runs" / name, train(config))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="SWE-bench Verified, as .jsonl.gz")
    parser.add_argument("--clone", required=True, help="where mirrors are: /srv/mirrors/{repository}")
    parser.add_argument("--work", type=Path, required=True, help="a new folder, or one with images and without runs")
    parser.add_argument("--each", type=int, default=3, help="number of tasks to train on, natively and in images each")
    arguments = parser.parse_args()
    if not (arguments.work / "images.jsonl").exists():
        asyncio.run(make_images(arguments))
    make_runs(arguments)
