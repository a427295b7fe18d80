"""The diff says exactly what changed, whatever was done to git, and applies back byte for byte."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import grading
from coderepairrl.checks.attacks import probes
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.types import Task

from .conftest import Make


async def snapshot(box: GuestSandbox) -> dict[str, tuple[str, bytes]]:
    """Every file of a sandbox as git sees it: path to kind and content, `.git` left out."""
    code = """
import os, stat, sys
for d, ds, fs in os.walk("."):
    ds[:] = [n for n in ds if n != ".git"]
    for n in [n for n in fs if n != ".git"] + [n for n in ds if os.path.islink(os.path.join(d, n))]:
        p = os.path.join(d, n); m = os.lstat(p).st_mode
        kind = "l" if stat.S_ISLNK(m) else "x" if m & 0o100 else "f"
        data = os.fsencode(os.readlink(p)) if kind == "l" else open(p, "rb").read()
        sys.stdout.buffer.write(b"%s %s %s\\n" % (os.fsencode(p).hex().encode(), kind.encode(), data.hex().encode()))
"""
    result = await box.exec(["python3", "-c", code], max_bytes=1 << 26)
    assert result.ok, result.output
    rows = (line.split(b" ") for line in result.output.splitlines())
    return {bytes.fromhex(p.decode()).decode(errors="surrogateescape"): (k.decode(), d) for p, k, d in rows}


async def round_trip(backend: GuestBackend, task: Task, script: str) -> bytes:
    """Run `script`, take the diff, apply it to a fresh copy: the trees and the diffs must be equal."""
    async with backend.open(task) as box:
        result = await box.exec(["bash", "-c", script])
        assert result.exit_code == 0, result.output
        patch = await box.diff()
        after = await snapshot(box)
    async with backend.open(task) as fresh:
        assert not await grading.apply_patch(fresh, patch)
        assert await snapshot(fresh) == after
        assert await fresh.diff() == patch
    return patch


EDIT = "sed -i 's/a - b/a + b/' app.py; printf 'one\\r\\n2\\r\\n' > notes.txt; echo new > added; rm link;"
SHAPES = {
    "old times": f"{EDIT} touch -d 2000-01-01 app.py notes.txt added; touch -r notes.txt app.py",
    "excludes of the user": f"{EDIT} git config core.excludesFile /tmp/x; echo '*' > /tmp/x",
    "submodule": "mkdir in; echo x > in/file; git -C in init -q; git -C in add -A; "
    "git -C in -c user.name=a -c user.email=a commit -qm x; git -c protocol.file.allow=always submodule add -q ./in in",
    "attributes in the tree": "printf '* text eol=crlf\\n*.py -diff\\n' > .gitattributes; echo x >> app.py",
    "file to folder": "rm app.py; mkdir app.py; echo x > app.py/inner",
    "folder to file": "rm -r bin; echo x > bin",
    "folder to link": "rm -r bin; ln -s /tmp bin",
    "file to link": "rm app.py; ln -s notes.txt app.py",
    "link to file": "rm link; echo x > link",
    "mode only": "chmod +x app.py; chmod -x bin/run",
    "rename with an edit": "mkdir -p d/e; mv app.py d/e/app.py; echo more >> d/e/app.py; mv bin d/",
    "folder to file among its likes": "rm -r bin; echo x > bin; echo y > bin-; mkdir bin.d; echo z > bin.d/f",
    "case": "mv app.py App.py; echo x > APP.PY",
    "deep": "d=$(printf 'd/%.0s' $(seq 400)); mkdir -p $d; echo x > $d/f",
    "binary": "head -c 3000 /dev/urandom > logo.bin; printf '\\0\\1' > new.bin",
    "empty file": "> empty; > app.py",
    "everything deleted": "rm -rf -- * .gitattributes",
    "odd names": "echo 1 > $'a\\nb'; echo 2 > $'\\xff'; echo 3 > 'q\"t'; echo 4 > 'b\\s'; echo 5 > ' s '; echo 6 > ä",
    "line feeds": "printf 'a\\r\\nb\\rc\\n' > mixed; printf '\\r' > cr",
}


@pytest.mark.parametrize("name", SHAPES)
async def test_every_shape_of_change_applies_back_exactly(bwrap: Bubblewrap, task: Task, name: str) -> None:
    """Tricks that hide changes from git are in the red team's family ``diff``."""
    patch = await round_trip(bwrap, task, SHAPES[name])
    if EDIT in SHAPES[name]:
        for part in (b"+    return a + b\n", b"-two\r\n+2\r\n", b"b/added\n", b"deleted file mode 120000"):
            assert part in patch
    assert patch


async def test_pipes_and_caches_of_tools_are_left_out_of_the_diff(bwrap: Bubblewrap, task: Task, folder: Path) -> None:
    """Except files that the task tracks."""
    script = "mkfifo pipe; mkdir -p a/__pycache__ .pytest_cache empty; touch a/__pycache__/x.pyc .pytest_cache/y b.pyc"
    async with bwrap.open(task) as box:
        assert (await box.exec(["bash", "-c", script])).ok
        assert await box.diff() == b""
    (folder / "a/__pycache__").mkdir(parents=True)
    (folder / "a/__pycache__/x.pyc").write_text("1\n")
    async with bwrap.open(replace(task, workspace=f"dir:{folder}/a")) as box:
        await box.write("__pycache__/x.pyc", b"2\n")
        assert b"-1\n+2\n" in await box.diff()


async def test_equal_changes_share_a_diff_and_others_do_not(bwrap: Bubblewrap, task: Task) -> None:
    diffs = []
    for end in ("1 > new", "1 > new", "2 > new", "1 > new; chmod +x new", "1 > other"):
        async with bwrap.open(task) as box:
            assert (await box.exec(["bash", "-c", f"echo {end}"])).ok
            diffs.append(await box.diff())
    assert diffs[0] == diffs[1] and len(set(diffs)) == len(box.prepared.diffs) == 4


async def test_a_diff_that_is_too_large_keeps_tracked_files(task: Task, bwrap: Bubblewrap, make: Make) -> None:
    async with make("bwrap", diff_bytes=100_000, diff_files=3).open(task) as box:
        await box.exec(["bash", "-c", "head -c 300000 /dev/zero > aaa; for i in 1 2 3 4 5; do echo > f$i; done"])
        await box.write("app.py", b"fixed\n")
        patch = await box.diff()
    assert b"+fixed" in patch and b"b/aaa" not in patch
    assert patch.count(b"new file mode") == 3


async def test_a_patch_that_does_not_fit_changes_nothing(bwrap: Bubblewrap, task: Task) -> None:
    async with bwrap.open(task) as box:
        await box.write("app.py", b"other\n")
        patch = await box.diff()
        before = await snapshot(box)
        assert await grading.apply_patch(box, patch)
        assert await grading.apply_patch(box, b"garbage\n")
        assert await snapshot(box) == before


# -- any change at all

TAMPERING = (
    *("a commit", "another HEAD", "no repository", "no HEAD", "a repository elsewhere", "a worktree elsewhere"),
    *("a broken index", "unchanged by declaration", "the exclude file", "a hook", "fsmonitor", "a clean filter"),
    *("textconv", "an external diff"),
)
names = st.sampled_from(["app.py", "notes.txt", "bin/run", "logo.bin", "new", "bin/new", "d/e/f", "ü", "a b"])
lines = st.lists(st.sampled_from([b"a\n", b"b\r\n", b"\n", b"return a - b\n", b"c", b"\x00\xff", b"\r"]), max_size=8)
contents = st.one_of(lines.map(b"".join), st.binary(max_size=40))
edits = st.lists(
    st.one_of(
        *(st.tuples(st.just(what), names, contents) for what in ("write", "append", "nest")),
        *(st.tuples(st.just(what), names, st.just(b"")) for what in ("delete", "mode", "link", "plain")),
        st.tuples(st.just("rename"), names, names.map(str.encode)),
        st.tuples(st.sampled_from(["stage", "commit"]), st.just("."), st.just(b"")),
        st.tuples(st.just("tamper"), st.sampled_from(TAMPERING), st.just(b"")),
    ),
    max_size=8,
)


def as_shell(what: str, name: str, data: bytes) -> str:
    other = shlex.quote(os.fsdecode(data))
    path, text = shlex.quote(name), "".join(f"\\x{byte:02x}" for byte in data)
    return {
        "write": f"mkdir -p $(dirname {path}); rm -rf {path}; printf '{text}' > {path}",
        "append": f"mkdir -p $(dirname {path}); printf '{text}' >> {path}",
        "delete": f"rm -rf {path}",
        "mode": f"test -f {path} && chmod +x {path}",
        "plain": f"test -f {path} && chmod a-x {path}",
        "rename": f"mkdir -p $(dirname {other}); mv -fT {path} {other}",
        "nest": f"rm -rf {path}; git init -q {path}; printf '{text}' > {path}/inner; git -C {path} add -A",
        "link": f"mkdir -p $(dirname {path}); ln -sfn somewhere {path}",
        "stage": "git add -A",
        "commit": "git add -A; git commit -qm x",
        "tamper": probes.DIFF.get(name, ""),
    }[what]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits)
@pytest.mark.parametrize("name", ["bwrap", "overlay"])
def test_any_change_applies_back_exactly(
    request: pytest.FixtureRequest,
    name: str,
    task: Task,
    runner: asyncio.Runner,
    changes: list[tuple[str, str, bytes]],
) -> None:
    script = "\n".join(f"({as_shell(*change)}) > /dev/null 2>&1" for change in changes) + "\ntrue"
    runner.run(round_trip(request.getfixturevalue(name), task, script))
