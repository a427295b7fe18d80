"""Tasks in Harbor's format: read, built without a daemon, judged by their own scripts; export of our tasks."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import grading
from coderepairrl.checks.audit import trials
from coderepairrl.checks.task_source import verify_tasks
from coderepairrl.environments import dockerfile
from coderepairrl.environments.images import prepare_images
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.grading import collect
from coderepairrl.grading.reports import Outcome
from coderepairrl.grading.reports import parse_harbor as parse_rewards
from coderepairrl.protocols import Sandbox
from coderepairrl.rewards.simple import make_patched_episode
from coderepairrl.rewards.tests import StateTests, TestsReward
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.fake import ScriptedSandbox
from coderepairrl.sandbox.wrapped import OpenSandboxBackend
from coderepairrl.tasks import HandmadeSource, make_source
from coderepairrl.tasks.prepare import list_image_names
from coderepairrl.tasks.select import SelectedSource, Selection
from coderepairrl.tasks.sources import harbor
from coderepairrl.tasks.sources.harbor import export_harbor
from coderepairrl.types import Checks, Score, Task
from environments.conftest import open_folder, open_overlays
from environments.made import archive, entry, folder, hard_link, layout, link, pack_folder
from grading.test_attacks import made_for_junit, made_for_node
from projects import write
from rewards.folder import Repository, git
from sandbox.images import root_file_system

TEST = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = 42 ] && [ "$WORD" = "two words" ] && [ "$(pwd)" = /app ] && [ "$SAID" = it ]; then
  echo '{"reward": 1.0, "style": 0.2}' > /logs/verifier/reward.json
else
  echo 0 > /logs/verifier/reward.txt
fi
exit 3
"""
TOML = """
schema_version = "1.4"
[task]
name = "org/answer"
[metadata]
difficulty = "medium"
tags = ["files"]
[verifier]
timeout_sec = 30
env = { SAID = "it" }
[agent]
timeout_sec = 40
[environment]
memory_mb = 512
"""
DOCKERFILE = """# syntax=docker/dockerfile:1
ARG BASE=base:1
FROM ${BASE}
ENV WORD="two words"
WORKDIR /app
RUN mkdir -p /data/deep
COPY --chown=1:1 . .
COPY seed.txt /data/
CMD ["sleep", "1"]
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(home / "cache"))


@pytest.fixture(scope="module")
def base(home: Path) -> Path:
    """An OCI layout with an image of this machine's programs, as ``base:1`` and ``python:3.12``."""
    root_file_system(home / "root")
    shutil.rmtree(home / "root/testbed")
    for name in ("mktemp", "sort", "cmp", "diff", "seq", "uniq"):
        shutil.copy(f"/usr/bin/{name}", home / "root/usr/bin")
    layer = pack_folder(home / "root")
    for tag in ("base:1", "python:3.12"):
        layout(home / "oci", [layer], tag, compress=lambda data: data)
    return home / "oci"


@pytest.fixture
def backend(isolating: None) -> Iterator[Bubblewrap]:
    with open_overlays(memory=256 << 20, disk_bytes=64 << 20) as made:
        yield made


def write_task(folder: Path, **files: str) -> Path:
    """Write a task's folder; names of `files` have ``__`` for a slash and ``_0`` for a dot."""
    all_files = {
        "task.toml": TOML,
        "instruction.md": "<!-- BENCHMARK canary GUID 1 -->\n\nWrite 42 to answer.txt\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/seed.txt": "seed\n",
        "tests/test.sh": TEST,
        "tests/data/more.txt": "more\n",
        "solution/solve.sh": "#!/bin/sh\necho 42 > answer.txt\nfalse\n",
    } | {name.replace("__", "/").replace("_0", "."): text for name, text in files.items()}
    return write(folder, all_files)


def prepare_source(path: Path, base: Path) -> tuple[Any, list[Task]]:
    """Build the images of the tasks in `path`; return the source and its tasks."""
    prepare_images(list_image_names(make_source("harbor", path=str(path))), offered=base)
    source = make_source("harbor", path=str(path))
    return source, list(source)


async def find_problem(backend: Bubblewrap, task: Task, checks: Checks) -> str:
    async with backend.open(task) as box:
        return (await grading.judge_state(backend, replace(task, checks=checks), box)).problem


async def score_state(backend: Bubblewrap, task: Task, box: Sandbox) -> Score:
    return await StateTests()(task, make_patched_episode(task, b"", "g"), OpenSandboxBackend(backend, box))


async def test_a_task_is_read_built_and_judged_by_its_own_script(
    tmp_path: Path, base: Path, backend: Bubblewrap
) -> None:
    """The oracle earns 1, the untouched workspace 0; exit codes do not count; agents do not see the tests."""
    source, [task] = prepare_source(write_task(tmp_path / "t"), base)
    assert (task.id, task.prompt, task.difficulty, task.split, task.kind) == (
        "org/answer", "Write 42 to answer.txt\n", 2.0, "train", "harbor",
    )  # fmt: skip
    assert task.checks.commands[0].timeout == 30 and source.row(task.id)["environment"]["memory_mb"] == 512
    assert "@sha256:" in task.workspace
    assert "reward failed" in await find_problem(backend, task, task.checks)
    assert await find_problem(backend, task, source.oracle(task.id)) == ""
    async with backend.open(task) as box:
        script = "ls -A -I .git; ls /data; ls -d /tests /solution /logs 2>/dev/null; cat seed.txt"
        listed = await box.exec(["sh", "-c", script])
        assert listed.output.decode().split() == ["Dockerfile", "seed.txt", "deep", "seed.txt", "seed"]
        assert (await score_state(backend, task, box)).value == 0
        await box.write("answer.txt", b"42\n")
        score = await score_state(backend, task, box)
        assert score.value == 1 and score.passed
    [_, exam] = await verify_tasks(source, backend)
    assert exam.ok and [finding.name for finding in exam.findings][1:] == [
        "the checks fail on the bug", "the checks pass on the reference",
    ]  # fmt: skip


async def test_an_audit_takes_the_changes_of_the_solution_as_the_reference(
    tmp_path: Path, base: Path, backend: Bubblewrap
) -> None:
    """Wrong patches are parts of it; a solution that does more than change files has none."""
    test = """#!/bin/sh
    [ "$(sh /app/run.sh)" = 42 ] && [ -e /data/seed.txt ] && echo 1 > /logs/verifier/reward.txt
    """
    solve = "#!/bin/sh\nprintf 'a=40\\nb=2\\nc=0\\necho $((a + b + c))\\n' >run.sh\n"
    program = {"environment/run.sh": "a=4\nb=3\necho $((a + b))\n", "tests/test.sh": test, "solution/solve.sh": solve}
    beside = {"solution/solve.sh": f"{solve}echo x >/data/more\n", "tests/test.sh": test.replace("seed.txt", "more")}
    for name, files in (("sound", program), ("outside", program | beside)):
        named = {"task.toml": TOML.replace("org/answer", f"org/{name}")}
        write(write_task(tmp_path / "set" / name), files | named)
    source, tasks = prepare_source(tmp_path / "set", base)
    settings = trials.Settings("set", "bwrap", repeat=2, mutants=4)
    audited = await trials.audit_tasks(source, tasks, backend, settings, tmp_path / "trials.jsonl", jobs=1)
    outside, sound = sorted(audited, key=lambda each: each.task.id)
    assert (sound.passes, sound.fails, sound.flaky, dict(sound.faults)) == (True, True, (), {})
    assert sound.history is not None and sound.history.commits == 0
    patches = {each.wrong.patch.decode(): each.accepted for each in sound.wrong}
    assert patches and all(".crrl-harbor" not in patch and "run.sh" in patch for patch in patches)
    assert False in patches.values() and None not in patches.values()
    assert (outside.passes, outside.fails, outside.wrong) == (True, True, ())
    assert outside.no_wrong == "the solution does more than change files of the workspace"


async def test_files_that_an_agent_leaves_do_not_steer_the_tests(
    tmp_path: Path, base: Path, backend: Bubblewrap
) -> None:
    """Reward files, files in the tests' folders, and links in their place."""
    _, [task] = prepare_source(write_task(tmp_path / "t"), base)
    for attempt in (
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt && echo 1 > /logs/verifier/reward.json",
        "mkdir -p .crrl-harbor/tests /tests && printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh"
        "&& cp /tests/test.sh .crrl-harbor/tests/test.sh && cp /tests/test.sh .crrl-harbor/test",
        "mkdir -p /tmp/x && ln -s /tmp/x /tests && ln -s /tmp/x .crrl-harbor && ln -s /tmp/x /logs",
    ):
        async with backend.open(task) as box:
            assert (await box.exec(["sh", "-c", attempt])).ok
            assert (await score_state(backend, task, box)).value == 0, attempt


async def test_exported_tasks_are_read_back_and_judged_alike(home: Path, base: Path, backend: Bubblewrap) -> None:
    """In two that are built, the reference and solve.sh earn 1, the untouched workspace 0."""
    ours = list(HandmadeSource())
    assert export_harbor(ours, home / "handmade") == len(ours)
    read = list(make_source("harbor", path=str(home / "handmade")))
    kept = ("id", "prompt", "language", "split", "licence", "difficulty", "reference")
    assert [[getattr(task, name) for name in kept] for task in sorted(read, key=lambda task: task.id)] == [
        [task.prompt.rstrip("\n") + "\n" if name == "prompt" else getattr(task, name) for name in kept] for task in ours
    ]
    limited = replace(ours[0], limits={"seconds": 9.0, "cpus": 2.0, "memory": float(1 << 30)})
    export_harbor([limited], home / "limited")
    copied = make_source("harbor", path=str(home / "limited"))
    assert export_harbor(SelectedSource(copied, Selection()), home / "copied") == 1
    for name in ("limited", "copied"):
        [again] = make_source("harbor", path=str(home / name))
        assert again.limits == limited.limits and again.checks == next(iter(copied)).checks
    export_harbor(ours[::4], home / "some")
    source, tasks = prepare_source(home / "some", base)
    assert len(tasks) == 2
    for task in tasks:
        assert "reward failed" in await find_problem(backend, task, task.checks)
        assert await find_problem(backend, task, source.oracle(task.id)) == "", task.id
        reward = TestsReward()
        assert (await reward(task, make_patched_episode(task, task.reference, "g"), backend)).value == 1, task.id


SEPARATE = """
artifacts = [{ source = "/app/out", exclude = ["*.tmp"] }]
[task]
name = "org/separate"
[verifier]
environment_mode = "separate"
env = { SAID = "it" }
[[verifier.collect]]
command = "cp /app/note.txt /logs/artifacts/"
"""
JUDGE = """#!/bin/sh
[ "$(cat /app/out/deep/answer)" = 42 ] && [ "$(cat /logs/artifacts/note.txt)" = noted ] && right=1
[ -e /app/out/x.tmp ] || [ -e /app/out/given ] || [ -e /app/other ] || [ "$SAID" != it ] && right=0
echo "{\\"reward\\": ${right:-0}, \\"style\\": 0.5}" > /logs/verifier/reward.json
"""
LEFT = (
    "mkdir -p out/deep && echo 42 >out/deep/answer && touch out/x.tmp other && rm -f out/given && echo noted >note.txt"
)
FORGED = """
mkdir -p bin tests logs/verifier /logs/verifier
echo '{"reward": 1}' | tee /logs/verifier/reward.json >logs/verifier/reward.json
printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt' | tee tests/test.sh >bin/sh && chmod +x tests/test.sh bin/sh
tar -cf all.tar bin tests logs && printf '#!/bin/sh\\ncat /app/all.tar' >"$(command -v tar)"
"""


@pytest.mark.parametrize("own_image", [True, False])
async def test_a_verifier_in_its_own_environment_gets_the_artifacts_alone(
    tmp_path: Path, base: Path, backend: Bubblewrap, own_image: bool
) -> None:
    """In its own image with the tests, or a fresh one of the agent's; forged files do not arrive."""
    solve = {"solution/solve.sh": f"#!/bin/sh\n{LEFT}\n", "tests/test.sh": JUDGE, "task.toml": SEPARATE}
    images = {"environment/Dockerfile": "FROM base:1\nWORKDIR /app\n"}
    if own_image:
        images["tests/Dockerfile"] = (
            "FROM base:1\nWORKDIR /app\nCOPY test.sh /tests/\nRUN mkdir -p out && touch out/given\n"
        )
    source, [task] = prepare_source(write(write_task(tmp_path / "t"), solve | images), base)
    assert (task.checks.workspace == task.workspace) is not own_image and "tests" not in task.workspace
    assert "reward failed" in await find_problem(backend, task, task.checks)
    assert await find_problem(backend, task, source.oracle(task.id)) == ""
    for left, value in ((LEFT, 1), ("echo 42 >answer", 0), (LEFT.replace("noted", "x"), 0), (FORGED, 0)):
        async with backend.open(task) as box:
            assert (await box.exec(["sh", "-c", left])).ok
            score = await score_state(backend, task, box)
        assert score.value == value, (left, score.note)
    async with backend.open(task) as box:
        assert (await box.exec(["sh", "-c", 'rm "$(command -v tar)"'])).ok
        judged = await grading.judge_state(backend, task, box)
    assert judged.doubtful and "has no tar" in judged.problem, "a control says whose fault that is"


def test_only_files_below_the_collected_folder_arrive_from_a_forged_archive() -> None:
    entries = [
        folder("out"), entry("out/a", b"a", mode=0o4755), link("out/in", "a"), link("out/up", "../x"),
        link("out/far", "/etc"), entry("out/../b", b"b"), entry("b", b"b"), entry("/tests/test.sh", b"b"),
        hard_link("out/again", "out/a"), entry("out/pipe", type=tarfile.FIFOTYPE),
    ]  # fmt: skip
    kept = collect._sanitize_archive(archive(entries), "out")
    with tarfile.open(fileobj=io.BytesIO(kept)) as tar:
        assert [(each.name, oct(each.mode)) for each in tar] == [
            ("out", "0o755"), ("out/a", "0o755"), ("out/in", "0o777"), ("out/again", "0o644"),
        ]  # fmt: skip
        again = tar.extractfile("out/again")
        assert again is not None and again.read() == b"a"
    huge = entry("out/huge", size=1 << 40)[0].tobuf(tarfile.GNU_FORMAT)
    for data in (huge + bytes(1024), archive([hard_link("out/x", "none")]), b"sh: no tar\n"):
        with pytest.raises((tarfile.TarError, KeyError, ValueError)):
            collect._sanitize_archive(data, "out")
    for data in (archive([link("out", "/etc")]), archive([]), b""):
        assert collect._sanitize_archive(data, "out") == b""


async def test_an_archive_that_nests_too_deep_is_refused() -> None:
    nested = archive([entry("name", b"out/a\0", type=tarfile.GNUTYPE_LONGNAME)] * 3_000)
    checks = Checks(collect={"/app/out": "pack"})
    refused = await collect.copy_collected_files(ScriptedSandbox({}, {"sh": nested}), ScriptedSandbox(), checks)
    assert refused.startswith("/app/out could not be collected")


async def test_limits_of_a_task_are_kept_below_those_of_the_sandbox(
    tmp_path: Path, base: Path, backend: Bubblewrap, caplog: pytest.LogCaptureFixture
) -> None:
    [task] = prepare_source(write_task(tmp_path / "t"), base)[1]
    assert task.limits == {"seconds": 40, "memory": 512 << 20}
    older = write_task(tmp_path / "o", task_0toml="[environment]\nmemory = '100M'\nstorage = '32M'\ncpus = 0.5")
    [small] = prepare_source(older, base)[1]
    assert small.limits == {"cpus": 0.5, "memory": 100 << 20, "disk_bytes": 32 << 20}
    for each, memory in ((task, 256), (small, 100), (task, 256)):
        async with backend.open(each) as box:
            assert (await box.exec(["sh", "-c", "ulimit -d"])).output.strip() == b"%d" % (memory << 10)
    assert caplog.text.count(f"sandbox.options.memory={512 << 20}") == 1


def test_a_task_that_asks_for_a_network_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, asks in {"a": "allow_internet = true", "b": "network_mode = 'no-network'", "c": ""}.items():
        write_task(tmp_path / "t" / name, task_0toml=f"[environment]\n{asks}")
    assert len(list(make_source("harbor", path=str(tmp_path / "t")))) == 3
    assert caplog.text.count("ask for a network") == 1 and "t/a" in caplog.text and "t/b" not in caplog.text


PATCH = "diff --git a/seed.txt b/seed.txt\n--- a/seed.txt\n+++ b/seed.txt\n@@ -1 +1 @@\n-seed\n+corn\n"


@pytest.mark.parametrize("file", [False, True])
async def test_the_patch_of_a_solution_is_the_reference(
    tmp_path: Path, base: Path, backend: Bubblewrap, file: bool
) -> None:
    """In a file, or within the script; by similarity it earns 1, an empty patch 0."""
    solve = "#!/bin/sh\ngit apply /solution/the.patch" if file else f"#!/bin/sh\ngit apply - <<'END'\n{PATCH}END\n"
    test = "#!/bin/sh\ngrep -q corn seed.txt && echo 1 >/logs/verifier/reward.txt\n"
    files = {"solution/solve.sh": solve, "tests/test.sh": test} | ({"solution/the.patch": PATCH} if file else {})
    source, [task] = prepare_source(write(write_task(tmp_path / "t"), files), base)
    assert task.reference.decode() == PATCH
    [_, exam] = await verify_tasks(source, backend)
    assert exam.ok and {"the reference applies", "the checks pass on the reference"} <= {
        finding.name for finding in exam.findings
    }
    assert any("patch_edits" in finding.name for finding in exam.findings)


STATED = [*harbor.USED.split(), *harbor.REFUSED.split(), *" ".join(harbor.IGNORED).split()]


def test_each_field_is_stated_once_and_the_guide_names_those_that_are_used_or_refused() -> None:
    assert len(STATED) == len(set(STATED))
    guide = (Path(__file__).parents[2] / "docs/guides/harbor.md").read_text()
    names = {name.rpartition(".")[2] for name in (*harbor.USED.split(), *harbor.REFUSED.split())}
    assert {name for name in names if name not in guide} == set()


WALK = """
import typing
from pydantic import BaseModel
from harbor.models.task import config

def walk(model, prefix=""):
    for name, field in model.model_fields.items():
        print(prefix + name)
        for inner in () if prefix + name in ("steps", "verifier.environment") else models(field.annotation):
            walk(inner, prefix + name + ".")

def models(kind):
    kind = getattr(config, kind, None) if isinstance(kind, str) else kind
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from models(part)

walk(config.TaskConfig)
"""
READ = "import sys; from harbor.models.task.task import Task; [Task(folder) for folder in sys.argv[1:]]"


@pytest.mark.by_hand
@pytest.mark.skipif("HARBOR_PYTHON" not in os.environ, reason="HARBOR_PYTHON: a Python with the package harbor")
def test_harbors_package_reads_our_tasks_and_each_of_its_fields_is_used_refused_or_ignored(tmp_path: Path) -> None:
    def run_harbor(program: str, *arguments: str) -> str:
        command = [os.environ["HARBOR_PYTHON"], "-c", program, *arguments]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout

    export_harbor([replace(next(iter(HandmadeSource())), limits={"seconds": 9, "memory": 1 << 30})], tmp_path / "made")
    run_harbor(READ, *map(str, (tmp_path / "made").iterdir()))
    fields = set(run_harbor(WALK).split())
    whole = tuple(f"{name}." for name in (*harbor.REFUSED.split(), *" ".join(harbor.IGNORED).split()))
    tables = {name.rpartition(".")[0] for name in fields}
    assert {name for name in fields if not name.startswith(whole)} - tables == set(STATED) - tables


DOCKERFILES = [
    ("FROM base:1\nRUN --mount=type=secret,id=x cat /run/secrets/x", "line 2: RUN --mount=type=secret"),
    ("FROM base:1\nRUN cat <<EOF > /x\nline", "ends in the here-document EOF"),
    ("FROM base:1\nRUN <<EOF\n#!/usr/bin/python3\nEOF", "line 2: RUN of a here-document for a program other than"),
    ("FROM base:1\nSHELL /bin/bash", "line 2: SHELL"),
    ("FROM base:1 AS a\nFROM a b", "line 2: FROM a b"),
    ("FROM base:1\nCOPY --exclude=a . /x/", "line 2: COPY --exclude"),
    ("FROM base:1\nCOPY missing /x/", "no such file"),
    ("FROM base:1\nCOPY ../task.toml /x/", "outside"),
    ("FROM base:1\nADD https://example.org/x /x/", "nothing is fetched"),
    ("FROM base:1\nONBUILD RUN x", "ONBUILD is not understood"),
    ("FROM scratch", "FROM scratch"),
    ("WORKDIR /x", "before FROM"),
    ("# nothing", "no FROM"),
]
TOMLS = [
    ('[[steps]]\nname = "a"', "steps"),
    ('[environment]\nos = "windows"', "environment.os"),
    ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "a shared verifier"),
    ("[verifier.environment]\ngpus = 1", "environment.gpus"),
    ("[environment.tpu]\ntype = 'v6e'", "environment.tpu"),
    ("[[environment.mcp_servers]]\nname = 'a'", "mcp_servers"),
    ("[environment.healthcheck]\ncommand = 'true'", "healthcheck"),
    ("[[verifier.collect]]\ncommand = 'true'\nservice = 'db'", "service"),
    ("[[artifacts]]\nsource = '/x'\nservice = 'db'", "service"),
    ("artifacts = ['out/x']\nverifier.environment_mode = 'separate'", "not an absolute path"),
    ('[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }', "variable of the host"),
    ("[environment", "task.toml"),
    ("environment = 1", "is not a table"),
]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        *(("environment__Dockerfile", *each) for each in DOCKERFILES),
        *(("task_0toml", *each) for each in TOMLS),
        ("trajectory_0json", "{}", "trajectory.json"),
        ("tests___0harborignore", "x", "harborignore"),
        ("environment__docker-compose_0yaml", "", "docker-compose"),
    ],
)
def test_unsupported_settings_and_files_are_refused_by_name(tmp_path: Path, file: str, text: str, says: str) -> None:
    write_task(tmp_path / "t", **{file: text})
    with pytest.raises(TaskError, match=says):
        list(make_source("harbor", path=str(tmp_path / "t")))


def test_a_prebuilt_image_wins_and_a_changed_folder_is_another_image(tmp_path: Path, home: Path) -> None:
    digest = "sha256:" + "1" * 64
    one = write_task(tmp_path / "a", task_0toml=f'[environment]\ndocker_image = "r.example/x@{digest}"')
    [task] = make_source("harbor", path=str(one))
    assert (task.workspace, task.id) == (f"image:r.example/x@{digest}", "a")
    (one / "environment/Dockerfile").unlink()
    [task] = make_source("harbor", path=str(one))
    made = Path(task.workspace.removeprefix("image:dockerfile:").rpartition(":")[0])
    assert (made / "Dockerfile").read_text() == f"FROM r.example/x@{digest}\nCOPY . ./\n"
    assert (made / "seed.txt").is_file()
    before = dockerfile.dockerfile_image_name(made)
    (made / "seed.txt").write_text("other")
    assert dockerfile.dockerfile_image_name(made) != before
    with pytest.raises(TaskError, match="has changed"):
        dockerfile.look_up_image(before, home, None, user=None, work=home / ".building")  # before any registry is asked


def test_of_a_folder_those_that_can_be_made_are_taken_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path / "all/a")
    write_task(tmp_path / "all/b", environment__Dockerfile="FROM base:1\nRUN --security=insecure make")
    with pytest.raises(TaskError, match="RUN --security"):
        list(make_source("harbor", path=str(tmp_path / "all")))
    [task] = make_source("harbor", path=str(tmp_path / "all"), usable=True)
    assert task.id == "org/answer" and "RUN --security" in caplog.text


def test_rewards_are_read_as_harbor_reads_them() -> None:
    passed, failed = {"reward": Outcome.PASSED}, {"reward": Outcome.FAILED}
    for text in ("1", "1.0\n", " 1. ", '{"reward": 1, "x": 0}', "2", "true"):
        assert parse_rewards(text) == passed, text
    for text in ("0", "0.99", "-1", '{"reward": 0.5}'):
        assert parse_rewards(text) == failed, text
    for text in ("", "nan", "inf", '{"reward": "1"}', '{"reward": NaN}', "[1]", "yes", "[" * 10_000, "1" * 400):
        assert parse_rewards(text) == {}, text
    assert parse_rewards('{"a": 1, "b": 0.5}') == {"a": Outcome.PASSED, "b": Outcome.FAILED}


@pytest.mark.parametrize("language", ["java", "javascript"])
def test_exported_scripts_judge_java_and_javascript(language: str, tmp_path: Path) -> None:
    """By the report of JUnit and the exit code of Node; a named test that did not run has not passed."""
    if shutil.which({"java": "javac", "javascript": "node"}[language]) is None:
        pytest.skip(f"no {language}")
    (tmp_path / "repository").mkdir()
    repository = Repository(tmp_path / "repository")
    task = made_for_junit(repository) if language == "java" else made_for_node(repository, ("node", "--test"))

    def judge(task: Task, patch: bytes) -> str:
        """Run the exported script here, on a copy of the workspace with `patch`."""
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        export_harbor([task], place)
        [folder] = place.iterdir()
        script = (folder / "tests/test.sh").read_text()
        script = script.replace("/tests/restore", f"{folder}/tests/restore").replace("/logs/", f"{folder}/logs/")
        workspace = folder / "environment/workspace"
        if patch:
            git(workspace, "apply", "-", stdin=patch)
        subprocess.run(["sh", "-c", script], cwd=workspace, check=True, stdin=subprocess.DEVNULL)
        return (folder / "logs/verifier/reward.txt").read_text().strip()

    assert (judge(task, b""), judge(task, task.reference)) == ("0", "1")
    tests = {"low": "1", "no": "0"} if language == "java" else {}
    for name, reward in tests.items():
        named = replace(task, checks=replace(task.checks, pass_to_pass=(f"tests.ClampTest.{name}",)))
        assert judge(named, b"") == judge(named, task.reference) == reward, name


def test_an_export_replaces_nothing_and_writes_all_tasks_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        export_harbor(HandmadeSource(), tmp_path)
    for second, says in ((Task("t", "p", "python", "dir:/x", b""), "no checks"), (next(iter(HandmadeSource())), "two")):
        with pytest.raises(TaskError, match=says):
            export_harbor([next(iter(HandmadeSource())), second], tmp_path / "y")
    assert not list(tmp_path.iterdir())
