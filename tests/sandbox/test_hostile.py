"""What an agent does to its workspace is a failed call or a smaller diff: never a fault, never two replies or none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import grading
from coderepairrl.agents.texts import Texts
from coderepairrl.agents.tools import Tools
from coderepairrl.sandbox import session, workspace
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.contents import Entry
from coderepairrl.sandbox.guest.files import unpack
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.sandbox.workspace import PreparedWorkspace
from coderepairrl.types import Task

from .conftest import Make

WALKS = 20
"""In one sandbox, one after another."""
DEEP = "d/" * 1500
LONG = "python3 -c \"import os\nfor _ in range(20): os.mkdir('e' * 250); os.chdir('e' * 250)\nopen('f' * 200, 'w')\""
LINKS = 'python3 -ISc \'import os\nfor n in range(100): os.symlink(f"l{n + 1}", f"l{n}")\'; echo x > l100'
HOSTILE = (
    "true",
    "chmod 000 .",
    "chmod 444 .",
    "chmod 111 . bin",
    "chmod 444 bin; chmod 000 app.py",
    "rm -rf ./* .git",
    "rm -rf .git; mkdir .git .GIT",
    "mv bin b; ln -s b bin",
    "rm app.py; mkdir app.py; echo x > app.py/x",
    "rm app.py; mkfifo app.py",
    "rm app.py; ln -s app.py app.py",
    f"mkdir -p {DEEP[:600]}; echo x > {DEEP[:600]}/x",
    LONG,
    LINKS,
    "head -c 3000000 /dev/zero > big",
    "ln -s /dev/full full; ln -s /proc/1/mem mem",
    "kill -9 -1",
    "sleep 100 & disown",
    "yes | head -c 100000",
    "printf x > $'a\\nb\\xff'",
    "ln -s app.py .gitmodules; ln -s x .gitattributes; mkdir .git~1 'git~1'; echo x > 'git~1/x'",
    "echo '* filter=x' > .gitattributes; git config filter.x.clean 'sleep 100'",
    "exit 255",
    "exec 0<&- 1>&- 2>&-; sleep 0.01",
    "sh -c 'kill -STOP $$' & sleep 0.01",
    "(setsid sh -c 'trap \"\" HUP TERM INT; kill -STOP 0' &) ; (setsid sleep 100 &) & exit 3",
    "printf '\\0\\0\\0\\2\\0\\0\\0\\0{}%.0s' {1..99}",
    'truncate -s 200M sparse; mkfifo -m 000 pipe; python3 -c \'import os; os.setxattr(".", "user.x", b"x")\'',
    "python3 -ISc 'import os, signal\nwhile os.fork(): pass\nsignal.pause()' 2> /dev/null",
    "mkdir -p way; ln -s / way/out; ln -s /proc/self/fd/0 way/in; chmod 6777 app.py; exec -a $'\\e]0;x\\a' sleep 0.01",
)
PATHS = (
    *("app.py", "new/file", "bin", "app.py/x", ".git/HEAD", "", ".", "..", "/", "a\0b", "\udcff"),
    *("x" * 300, DEEP + "f", "n/" * 2100),
    *("l1", "full", "pipe", "way/out/tmp/x", "way/in"),  # what `HOSTILE` makes
)
STEPS = st.one_of(
    st.tuples(st.just("exec"), st.sampled_from(HOSTILE)),
    st.tuples(st.just("read"), st.sampled_from(PATHS)),
    st.tuples(st.just("write"), st.sampled_from(PATHS)),
    st.tuples(st.just("cwd"), st.sampled_from(PATHS)),
    st.tuples(st.sampled_from(("cancel", "cut")), st.sampled_from(HOSTILE)),
    st.tuples(st.just("diff"), st.just("")),
)


async def take(box: GuestSandbox, kind: str, what: str) -> None:
    """One step. Raises what no agent may bring about."""
    if kind == "exec":
        await box.exec(["bash", "-c", what], timeout=10)
    elif kind == "cwd":
        await box.exec(["true"], cwd=what)
    elif kind in ("cancel", "cut"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0 if kind == "cancel" else 0.004):
                await box.exec(["bash", "-c", what], timeout=10)
                await asyncio.sleep(1)
    elif kind == "diff":
        await box.diff()
    else:
        try:
            await (box.read(what) if kind == "read" else box.write(what, b"new"))
        except OSError:
            return


async def in_step(box: GuestSandbox) -> None:
    """The next reply answers its own request."""
    asked = secrets.token_hex(4)
    done = await box.exec(["/bin/sh", "-c", f"echo {asked}; exit 7"], cwd="/")
    assert (done.exit_code, done.output) == (7, f"{asked}\n".encode())


EMPTY = """cd {0} && chmod 700 . && find . -mindepth 1 -maxdepth 1 -exec rm -rf {{}} + 2> /dev/null ||
chmod -R u+rwX . && find . -mindepth 1 -maxdepth 1 -exec rm -rf {{}} +"""


class Walks:
    """Walks through one sandbox after another: each has its workspace as it was, and the next sandbox after a fault."""

    def __init__(self, backend: GuestBackend, task: Task) -> None:
        self.backend, self.task = backend, task
        self.loop = asyncio.Runner()
        self.opened = contextlib.AsyncExitStack()
        self.box: GuestSandbox | None = None
        self.walked = 0
        self.applied: set[bytes] = set()

    def walk(self, steps: list[tuple[str, str]]) -> None:
        try:
            self.loop.run(self._walk(steps))
        except BaseException:
            self.loop.run(self._leave())  # whatever it left behind shall not be in the way of a shorter one
            raise

    def end(self) -> None:
        self.loop.run(self._leave())
        self.loop.close()

    async def _leave(self) -> None:
        self.box, self.walked = None, 0
        await self.opened.aclose()

    async def _walk(self, steps: list[tuple[str, str]]) -> None:
        if self.walked == WALKS:
            await self._leave()
        if self.box is None:
            self.box = await self.opened.enter_async_context(self.backend.open(self.task))
        self.walked += 1
        for step in steps:
            await take(self.box, *step)
            await in_step(self.box)
        patch = await self.box.diff()
        await self._as_it_was(self.box)
        if patch not in self.applied:
            assert not await grading.apply_patch(self.box, patch)
            await self._as_it_was(self.box)
            self.applied.add(patch)

    async def _as_it_was(self, box: GuestSandbox) -> None:
        script = f"{EMPTY.format(shlex.quote(box.workdir))}; tar -xpof - -C ."
        files = tar_of(box.prepared.archive)
        assert (done := await box.exec(["bash", "-c", script], cwd="/", stdin=files)).ok, done.output


@cache
def tar_of(archive: Path) -> bytes:
    """What was packed for guests, as a program inside reads it."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(os.open(archive, os.O_RDONLY), folder)
        return subprocess.run(["tar", "-cf", "-", "-C", folder, "."], check=True, stdout=subprocess.PIPE).stdout


def fuzz(backend: GuestBackend, task: Task, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's git, which has its own tests, composes each change once."""
    composed: dict[tuple[object, ...], bytes] = {}

    def compose(
        prepared: PreparedWorkspace, changed: list[Entry], deleted: list[str], *where: Path, user: int | None
    ) -> bytes:
        key = (tuple(changed), tuple(deleted))
        if key not in composed:
            composed[key] = workspace.compose_diff(prepared, changed, deleted, *where, user=user)
        return composed[key]

    monkeypatch.setattr(session, "compose_diff", compose)
    walks = Walks(backend, task)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(steps=st.lists(STEPS, min_size=3, max_size=12))
    def check(steps: list[tuple[str, str]]) -> None:
        walks.walk(steps)

    try:
        check()
    finally:
        walks.end()


@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=pytest.mark.by_hand, id="for hours")])
def test_nothing_an_agent_does_puts_the_guest_out_of_step(
    bwrap: Bubblewrap, task: Task, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    fuzz(bwrap, task, examples, monkeypatch)


async def test_a_closed_workspace_fails_calls_and_keeps_the_diff(box: GuestSandbox) -> None:
    await box.write("app.py", b"mended\n")
    assert (await box.exec(["chmod", "000", "."])).ok
    closed = await box.exec(["cat", "app.py"])
    assert not closed.ok or os.geteuid() == 0
    await in_step(box)
    assert b"+mended" in await box.diff()


async def test_folders_deeper_than_python_recurses_or_a_path_reaches(box: GuestSandbox) -> None:
    """A file with a path that the kernel takes is in the diff; one that has none is left out."""
    await box.write(DEEP + "file", b"deep\n")
    assert await box.read(DEEP + "file") == b"deep\n"
    assert (await box.exec(["bash", "-c", LONG])).ok
    patch = await box.diff()
    assert b"+deep" in patch and b"fff" not in patch


async def test_a_full_workspace_refuses_and_keeps_what_it_has(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    async with make("bwrap", disk_bytes=4 << 20).open(task) as box:
        await box.write("app.py", b"before\n")
        full = await box.exec(["bash", "-c", "head -c 64M /dev/zero > filler"])
        assert b"No space left" in full.output
        with pytest.raises(OSError) as refused:
            await box.write("app.py", b"after\n" * 100_000)
        assert refused.value.errno == errno.ENOSPC
        assert await box.read("app.py") == b"before\n"
        tools = Tools(box, Texts(), 2000)
        call = {"file_path": "app.py", "old_content": "before\n", "new_content": "after\n" * 100_000}
        result = await tools.apply_patch(call)
        assert not result.ok and "No space left" in result.text
        assert b"+before" in await box.diff()


async def test_a_link_that_git_refuses_does_not_cost_the_rest(
    box: GuestSandbox, backend: GuestBackend, task: Task
) -> None:
    await box.write("app.py", b"mended\n")
    await box.exec(["bash", "-c", "ln -s app.py .gitmodules; ln -s app.py bin/.GitModules"])
    patch = await box.diff()
    async with backend.open(task) as fresh:
        assert not await grading.apply_patch(fresh, patch)
        assert await fresh.read("app.py") == b"mended\n"


async def test_what_there_is_no_memory_for_is_refused(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    """The guest has no more than one command, from the first on."""
    async with make("bwrap", memory=64 << 20).open(task) as box:
        await in_step(box)
        with pytest.raises(OSError) as refused:
            await box.write("large", bytes(40 << 20))
        assert refused.value.errno == errno.ENOMEM
        await in_step(box)
        fed = await box.exec(["wc", "-c"], stdin=bytes(40 << 20))
        assert (fed.exit_code, fed.output) == (126, b"Cannot allocate memory\n")
        await box.exec(["bash", "-c", "head -c 60M /dev/zero > large; echo mended > app.py"])
        with pytest.raises(OSError):
            await box.read("large")
        assert b"+mended" in await box.diff()
        await in_step(box)


async def test_names_that_are_long_and_many_fill_no_memory(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    many = "import os\nfor _ in range(16): os.mkdir('e' * 240); os.chdir('e' * 240)\n"
    many += "for n in range(60_000): os.close(os.open(str(n) + 'f' * 100, os.O_CREAT))"
    async with make("bwrap", memory=64 << 20).open(task) as box:
        await box.write("app.py", b"mended\n")
        assert (await box.exec(["python3", "-ISc", many])).ok
        assert b"+mended" in await box.diff()
