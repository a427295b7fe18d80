"""What an agent does to its workspace is a failed call or a smaller diff: never a fault, never two replies or none."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import grading
from coderepairrl.agents.texts import Texts
from coderepairrl.agents.tools import Tools
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.types import Task

from .conftest import Make

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


async def take_step(box: GuestSandbox, kind: str, what: str) -> None:
    """Take one step. Raises errors that no agent may cause."""
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


async def check_in_step(box: GuestSandbox) -> None:
    """Assert that the next reply answers its own request."""
    word = secrets.token_hex(4)
    done = await box.exec(["/bin/sh", "-c", f"echo {word}; exit 7"], cwd="/")
    assert (done.exit_code, done.output) == (7, f"{word}\n".encode())


async def walk(backend: GuestBackend, task: Task, steps: list[tuple[str, str]]) -> None:
    """Take steps in a fresh sandbox, whose diff then applies to another one."""
    async with backend.open(task) as box:
        for step in steps:
            await take_step(box, *step)
            await check_in_step(box)
        patch = await box.diff()
        await check_in_step(box)
    async with backend.open(task) as fresh:
        assert not await grading.apply_patch(fresh, patch)


@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=pytest.mark.by_hand, id="for hours")])
def test_nothing_an_agent_does_puts_the_guest_out_of_step(bwrap: Bubblewrap, task: Task, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(steps=st.lists(STEPS, min_size=3, max_size=12))
    def check(steps: list[tuple[str, str]]) -> None:
        runner.run(walk(bwrap, task, steps))

    with asyncio.Runner() as runner:
        check()


async def test_a_closed_workspace_fails_calls_and_keeps_the_diff(box: GuestSandbox) -> None:
    await box.write("app.py", b"mended\n")
    assert (await box.exec(["chmod", "000", "."])).ok
    closed = await box.exec(["cat", "app.py"])
    assert not closed.ok or os.geteuid() == 0
    await check_in_step(box)
    assert b"+mended" in await box.diff()


async def test_folders_deeper_than_python_recurses_or_a_path_reaches(box: GuestSandbox) -> None:
    """Files with longer paths than the kernel takes are not in the diff."""
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


async def test_a_link_that_git_refuses_leaves_the_rest_of_the_diff(
    box: GuestSandbox, backend: GuestBackend, task: Task
) -> None:
    await box.write("app.py", b"mended\n")
    await box.exec(["bash", "-c", "ln -s app.py .gitmodules; ln -s app.py bin/.GitModules"])
    patch = await box.diff()
    async with backend.open(task) as fresh:
        assert not await grading.apply_patch(fresh, patch)
        assert await fresh.read("app.py") == b"mended\n"


async def test_files_larger_than_memory_are_refused(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    """The guest has the memory of one command, from the first request on."""
    async with make("bwrap", memory=64 << 20).open(task) as box:
        await check_in_step(box)
        with pytest.raises(OSError) as refused:
            await box.write("large", bytes(40 << 20))
        assert refused.value.errno == errno.ENOMEM
        await check_in_step(box)
        fed = await box.exec(["wc", "-c"], stdin=bytes(40 << 20))
        assert (fed.exit_code, fed.output) == (126, b"Cannot allocate memory\n")
        await box.exec(["bash", "-c", "head -c 60M /dev/zero > large; echo mended > app.py"])
        with pytest.raises(OSError):
            await box.read("large")
        assert b"+mended" in await box.diff()
        await check_in_step(box)


async def test_many_long_names_do_not_exhaust_memory(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    many = "import os\nfor _ in range(16): os.mkdir('e' * 240); os.chdir('e' * 240)\n"
    many += "for n in range(60_000): os.close(os.open(str(n) + 'f' * 100, os.O_CREAT))"
    async with make("bwrap", memory=64 << 20).open(task) as box:
        await box.write("app.py", b"mended\n")
        assert (await box.exec(["python3", "-ISc", many])).ok
        assert b"+mended" in await box.diff()
