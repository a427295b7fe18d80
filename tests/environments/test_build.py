"""An environment is built in a sandbox, from what is specified, and a hostile build writes nothing outside of it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import inspect
import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from coderepairrl import grading, sandbox, tasks
from coderepairrl.checks.task_source import verify_tasks
from coderepairrl.environments.build import (
    CondaFile,
    Specification,
    _unpack,
    build_environment,
    parse_conda_file,
    prepare_environments,
)
from coderepairrl.environments.pythons import _copy_interpreter
from coderepairrl.environments.verify import check_unchanged, digest_tree, share_equal_files, verify_states
from coderepairrl.errors import PrerequisiteError, TaskError, UnjudgedPatch
from coderepairrl.plan.tasks import check_workspaces
from coderepairrl.processes import caches
from coderepairrl.processes.installs import lock_installation
from coderepairrl.rewards import TestsReward
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.sandbox.workspace import find_environment
from coderepairrl.tasks.jsonl import write_jsonl
from coderepairrl.types import Checks, Command, Ending, Episode, Task
from projects import SHOP, build_wheel, cache, system_python, write
from rewards.folder import git

from .made import Made, archive, entry, folder, hard_link, link

__all__ = ["cache"]
builds = import_module("coderepairrl.environments.build")


def project(folder: Path, files: dict[str, str] = SHOP) -> str:
    """Commit `files` to a repository in `folder`; return the commit as a workspace."""
    write(folder, files)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        git(folder, *words)
    return f"git:{folder}@{git(folder, 'rev-parse', 'HEAD').decode().strip()}"


async def test_an_environment_serves_the_workspace_and_not_the_project_it_was_built_from(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    """Extras, edits that tasks do not have, a file that only the build makes, and the workspace's own modules."""
    workspace = project(tmp_path / "shop")
    asked = Specification(
        workspace=workspace,
        python=system_python(),
        requirements=("crrl_test_helper",),
        edits=("sed -i 's/Provides-Extra: tests/Provides-Extra: other/' backend.py",),
        extras="[other]",
    )
    made = await build_environment(asked)
    assert made.packages["shop"] == "1.0" and made.packages["crrl_test_helper"] == "1.0"
    assert (await build_environment(asked)) == made, "from the cache"
    task = Task("shop", "p", "python", workspace, b"", environment=f"venv:{made.folder}")
    assert find_environment(task) == made.folder
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    async with backend.open(task) as box:
        code = "import shop, importlib.metadata as m; print(shop.__file__, shop.version, m.version('shop'))"
        said = (await box.exec(["python", "-c", code], cwd="/tmp")).output.decode().split()
        assert said == [f"{box.workdir}/src/shop/__init__.py", "1.0", "1.0"]
        assert await box.diff() == b"", "what the build makes is not a change of the agent's"
        assert "Provides-Extra: tests" in (await box.read("backend.py")).decode()
    backend.close()


async def test_built_files_are_in_no_diff_and_changed_sources_of_compiled_files_are_not_judged(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    """With files of another project to compile with, and a namespace package's hook for the folder of its packages."""
    text = """\
    pathlib.Path("build").mkdir(exist_ok=True)
    pathlib.Path("build/fast.o").write_text("")
    files["shop/_fast.so"] = pathlib.Path("lib/fast.h").read_bytes()
    files["shop-nspkg.pth"] = b"import sys; sys.shop = sys._getframe(1).f_locals['sitedir']\\n"
    about ="""
    workspace = project(tmp_path / "shop", SHOP | {"backend.py": SHOP["backend.py"].replace("    about =", text)})
    library = project(tmp_path / "library", {"fast.h": "fast"})
    asked = Specification(
        workspace=workspace, python=system_python(), requirements=("crrl_test_helper",), sources={"lib": library}
    )
    with pytest.raises(PrerequisiteError, match="this machine has no crrl-none, which the environment of git:"):
        await build_environment(asked.model_copy(update={"programs": ("sh", "crrl-none")}))
    made = await build_environment(asked)
    task = Task("shop", "p", "python", workspace, b"", environment=f"venv:{made.folder}")
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    async with backend.open(task) as box:
        said = await box.exec(["sh", "-c", "cat src/shop/_fast.so lib/fast.h; python -c 'import sys; print(sys.shop)'"])
        assert said.output.decode() == f"fastfast{box.workdir}/src\n"
        again = "echo 2 >src/shop/_fast.so; rm src/shop/_version.py; mkdir build; echo 2 >build/other.o; git status -s"
        assert (await box.exec(["sh", "-c", again])).output == b"" == await box.diff()
        await box.write("src/shop/new.py", b"\n")
        assert b"new.py" in await box.diff()
    for name in ("src/fast.pyx", "src/fast.pxd.tp", "fast/a.cpp", "setupext.py"):
        with pytest.raises(UnjudgedPatch, match=f"compiled without its change of {name}"):
            async with backend.open(task) as box:
                await grading.grade_patch(box, task, f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+a\n".encode())
    patch = b"--- /dev/null\n+++ b/setup.py\n@@ -0,0 +1 @@\n+a\n"
    attempt = Episode("e", "shop", "train", 0, "g", 0, Ending.DONE, patch=patch)
    checked = replace(task, checks=Checks((Command(("true",)),)))
    score = await TestsReward()(checked, attempt, backend)
    assert score.value == 0 and not score.passed and "cannot be judged natively" in score.note
    backend.close()


async def test_commands_of_a_benchmark_install_what_they_say(cache: Path, tmp_path: Path, isolating: None) -> None:
    """With make, pip in both spellings, requirement files, and editable installations, which are none here."""
    files = {
        "Makefile": "init:\n\t@pip install -e .\n\t@python -m pip install -r requirements-dev.txt\n",
        "requirements-dev.txt": "-e .[tests]\ncrrl_test_helper\n",
    }
    workspace = project(tmp_path / "shop", SHOP | files)
    missing = "pip install --no-index no-such-package-anywhere"
    asked = Specification(workspace=workspace, python=system_python(), install=f"{missing} || true\nmake init")
    made = await build_environment(asked)
    assert made.packages["shop"] == "1.0" and made.packages["crrl_test_helper"] == "1.0"
    task = Task("shop", "p", "python", workspace, b"", environment=f"venv:{made.folder}")
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    async with backend.open(task) as box:
        said = await box.exec(["python", "-c", "import shop; print(shop.__file__, shop.version)"], cwd="/tmp")
        assert said.output.decode().split() == [f"{box.workdir}/src/shop/__init__.py", "1.0"]
        tool = await box.exec(["sh", "-c", "crrl_tool.py"])
        assert tool.output.startswith(b"0.5"), "a script that is a module, too"
        assert await box.diff() == b""
    backend.close()
    with pytest.raises(TaskError, match="no-such-package-anywhere"):
        await build_environment(asked.model_copy(update={"install": f"{missing}\nmake init"}))


@pytest.mark.skipif(not builds._CCACHE.is_dir(), reason="ccache is not installed")
async def test_builds_of_a_repository_share_compiled_files_and_leave_the_same_without(
    cache: Path, tmp_path: Path, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SHOP["backend.py"].replace(
        "    about =",
        """\
    import subprocess
    subprocess.run(["gcc", "-c", "a.c", "-o", "a.o"], check=True)
    files["shop/_fast.so"] = pathlib.Path("a.o").read_bytes()
    about =""",
    )
    first = project(tmp_path / "shop", SHOP | {"backend.py": backend, "a.c": "int a;"})
    second = project(tmp_path / "shop", {"b.c": "int b;"})
    asked = Specification(workspace=first, python=system_python(), programs=("gcc",), install="pip install .")
    other = asked.model_copy(update={"workspace": second})
    await build_environment(asked)
    with_cache = await build_environment(other)
    [archive] = (cache / "environments/compiled").glob("*.tar")
    (tmp_path / "ccache").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "ccache"], check=True)
    counted = subprocess.run(
        ["ccache", "--print-stats"],
        env={**os.environ, "CCACHE_DIR": str(tmp_path / "ccache")},
        check=True,
        capture_output=True,
    )
    assert {b"cache_miss\t1", b"direct_cache_hit\t1"} <= set(counted.stdout.splitlines())
    shutil.rmtree(with_cache.folder)
    archive.write_bytes(b"damaged")
    assert await build_environment(other) == with_cache
    shutil.rmtree(with_cache.folder)
    archive.unlink()
    monkeypatch.setattr(builds, "_CCACHE", tmp_path / "nowhere")
    assert await build_environment(other) == with_cache and not archive.exists()


async def test_an_environment_has_what_a_conda_file_asks_for(cache: Path, tmp_path: Path, isolating: None) -> None:
    """From the commit that the benchmark names, with its edits, and with the Python that the file names."""
    text = f"dependencies:\n  - python={system_python()}\n  - crrl_test_helper=1\n  - no-such-package-anywhere\n"
    before = project(tmp_path / "shop", SHOP | {"ci/environment.yml": text})
    (tmp_path / "shop/ci/environment.yml").unlink()
    after = project(tmp_path / "shop")
    edits = ("sed -i /no-such/d environment.yml",)
    there = CondaFile(paths=("environment.yml", "ci/environment.yml"), workspace=before, edits=edits)
    made = await build_environment(Specification(workspace=after, python="", conda=there))
    assert made.packages["crrl_test_helper"] == "1.0" and made.packages["shop"] == "1.0"
    with pytest.raises(TaskError, match=r"has none of environment\.yml, ci/environment\.yml"):
        await build_environment(
            Specification(workspace=after, python="", conda=there.model_copy(update={"workspace": ""}))
        )


async def test_a_frozen_list_holds_whatever_else_is_asked_for_and_loses_what_cannot_be_had(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    build_wheel(cache / "wheels", version="2.0")
    build_wheel(cache / "wheels", name="crrl_test_asking", requires="crrl-test-helper>=2")
    frozen = ("crrl-test-nowhere==1.0", "crrl-test-helper==1.0", "crrl-test-nothing==0.0.0")
    asked = Specification(
        workspace=project(tmp_path / "plain", {"a.py": ""}),
        python=system_python(),
        frozen=frozen,
        requirements=("crrl-test-asking",),
    )
    made = await build_environment(asked)
    assert (made.packages["crrl_test_helper"], made.packages["crrl_test_asking"]) == ("1.0", "1.0")
    assert made.left_out == (frozen[0], frozen[2])
    assert (await build_environment(asked)) == made, "from the cache"


def test_a_change_of_the_build_raises_its_number() -> None:
    """Folders of environments are named by a number. After a change of this code, write the new digest here; raise the
    number, too, if builds now have other results."""
    code = [builds._install, builds._unpack, builds._relocate_entry, build_environment]
    matter = [builds._BUILD, builds._STRIP, *map(inspect.getsource, code)]
    digest = hashlib.sha256("\0".join(matter).encode()).hexdigest()[:12]
    assert (caches._BUILDS, digest) == (1, "405dd89d58d5"), "does a build have another result now? See above"


async def test_one_flipped_byte_is_noticed(cache: Path, tmp_path: Path, isolating: None) -> None:
    asked = Specification(workspace=project(tmp_path / "shop"), python=system_python())
    left, used = (cache / f"environments/{name}.partial/lib" for name in ("killed", "used"))
    left.mkdir(parents=True)
    used.mkdir(parents=True)
    with lock_installation(used.parent.with_suffix("")):
        made = await build_environment(asked)
    assert not left.parent.exists() and used.exists(), "what a killed build of another environment left is removed"
    task = Task("shop", "p", "python", asked.workspace, b"", environment=str(asked))
    check_workspaces([task, task])
    assert verify_states([task, task]) == [(made.folder.name, "as built", 2, "")]
    path = next(made.folder.rglob("METADATA"))
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(TaskError, match="has changed since it was built"):
        await build_environment(asked)
    with pytest.raises(TaskError) as refused:
        check_workspaces([task])
    assert str(refused.value) == f"the environment {made.folder} has changed since it was built"
    assert [each.state for each in verify_states([task])] == ["changed"]
    write_jsonl([task], tmp_path / "tasks.jsonl")
    with pytest.raises(TaskError, match="has changed since it was built") as caught:
        await verify_tasks(tasks.make_source("jsonl", path=str(tmp_path / "tasks.jsonl")), ScriptedBackend())
    assert "delete that folder" in caught.value.fix
    (made.folder / "environment.json").unlink()
    with pytest.raises(TaskError, match="not a complete environment"):
        check_unchanged(made.folder)
    assert [each.state for each in verify_states([task])] == ["missing"]
    await build_environment(asked)  # again, from the beginning
    check_unchanged(made.folder)


async def test_a_full_disk_leaves_nothing_half_built(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """A file that cannot be written stands for the full disk."""
    asked = Specification(workspace=project(tmp_path / "shop"), python=system_python())
    extract = tarfile.TarFile.extract

    def full(self: tarfile.TarFile, member: tarfile.TarInfo, *more: object, **options: object) -> None:
        if member.name.endswith("/METADATA"):
            raise OSError(errno.ENOSPC, "No space left on device")
        extract(self, member, *more, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(PrerequisiteError, match="No space left") as caught:
        patched.setattr(tarfile.TarFile, "extract", full)
        await build_environment(asked)
    assert "CRRL_CACHE" in caught.value.fix and "TMPDIR" in caught.value.fix
    left = [path.name for path in (cache / "environments").iterdir() if path.suffix != ".lock"]
    assert all(name.startswith("uv-") for name in left), left
    check_unchanged((await build_environment(asked)).folder)


async def test_a_build_reaches_the_index_alone_and_nothing_of_the_host(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    """The proxy refuses a build that looks around, and it sees no file of the host."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    curious = SHOP | {
        "backend.py": f"""
import os, urllib.request
seen = os.path.exists({str(secret)!r})
try:
    urllib.request.urlopen("https://example.org/", timeout=5)
except OSError as error:
    raise SystemExit(f"secret seen: {{seen}}; {{error}}")
raise SystemExit("reached")
"""
    }
    with pytest.raises(TaskError, match="secret seen: False") as caught:
        await build_environment(Specification(workspace=project(tmp_path / "curious", curious), python=system_python()))
    assert "it wanted example.org:443, which a build may not reach" in str(caught.value)
    assert "reached" not in str(caught.value).replace("not reach", "")
    assert not list((cache / "environments").glob("*/environment.json")), "nothing half built is kept as built"


async def test_without_bubblewrap_a_build_names_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weaker = sandbox.BackendChoice("sandlock", "bubblewrap is not installed", "apt-get install bubblewrap")
    monkeypatch.setattr(sandbox, "choose_backend", lambda: weaker)
    with pytest.raises(PrerequisiteError, match="bubblewrap is not installed") as refused:
        await build_environment(Specification(python=system_python(), requirements=("six",)))
    assert refused.value.fix == "apt-get install bubblewrap"


async def test_a_python_that_is_not_here_is_named(cache: Path, tmp_path: Path, isolating: None) -> None:
    with pytest.raises(PrerequisiteError, match=r"no Python 3\.2") as caught:
        await build_environment(Specification(workspace=project(tmp_path / "shop"), python="3.2"))
    assert "uv python install 3.2" in caught.value.fix


def test_a_copied_interpreter_runs_elsewhere(cache: Path) -> None:
    """With its shared library, and without the original: so does code that is compiled for it."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if own.is_relative_to("/usr"):
        pytest.skip("the Python of these tests is the distribution's")
    copy = _copy_interpreter(own)
    assert copy.is_relative_to(cache)
    code = """if True:
        import json, ssl, sqlite3, sys, sysconfig
        print(sys.base_prefix, open('/proc/self/maps').read(), *sysconfig.get_config_vars("LIBDIR", "LDSHARED"))
    """
    done = subprocess.run([copy, "-I", "-c", code], capture_output=True, text=True, check=True, env={})
    assert str(own.parent.parent) not in done.stdout
    assert os.access(copy, os.X_OK)


FILE = """\
name: tests
channels:
  - conda-forge
dependencies:
  # required
  - python=3.10.4
  - numpy=1.21   # a comment
  - pandas >=1.1, <2
  - conda-forge::matplotlib-base==3.7.2
  - h5py=2=py37_0
  - fsspec!=2021.7.0
  - scipy 1.11.*
  # - pynio
  - iris
  - hdf5
  - pip=20.2
  - pip:
      - numbagg
      - extra[all] @ https://example.org/extra.whl
  - "zarr"
variables:
  - none
"""


def test_conda_packages_become_requirements_of_pip() -> None:
    python, found = parse_conda_file(FILE)
    assert python == "3.10"
    assert found == [
        *("numpy==1.21.*", "pandas>=1.1,<2", "matplotlib==3.7.2", "h5py==2.*", "fsspec!=2021.7.0", "scipy==1.11.*"),
        *("scitools-iris", "numbagg", "extra[all] @ https://example.org/extra.whl", "zarr"),
    ]
    assert parse_conda_file("dependencies:\n- numpy\n- pip:\n  - numbagg\n- scipy\n") == (
        "",
        ["numpy", "numbagg", "scipy"],
    )
    assert parse_conda_file("# nothing\n") == ("", [])


_PYTHON = Path("/usr/bin/python3")


async def test_the_printed_report_of_a_build_names_no_file_outside(
    cache: Path, tmp_path: Path, isolating: None
) -> None:
    """The project lets the environment's Python print another account of what was built, as its last line."""
    said = '{"imports": "", "modules": [], "built": {"../../../escaped": "eA=="}, "made": [], "packages": {}, '
    said += '"left_out": []}'
    line = f"import atexit; atexit.register(print, {said!r})\n"
    act = f"""
[packages] = pathlib.Path("/tmp/env/lib").glob("python3*/site-packages")
(packages / "zz.pth").write_text({line!r})
"""
    workspace = project(tmp_path / "shop", SHOP | {"backend.py": f"{SHOP['backend.py']}{act}"})
    with pytest.raises(TaskError, match="escaped"):
        await build_environment(Specification(workspace=workspace, python=system_python()))
    assert not list(cache.rglob("escaped")) and not (cache.parent / "escaped").exists()


@pytest.mark.parametrize(
    "entries",
    [
        [link("environment.json", "/etc/passwd")],
        [entry("environment.json", b"{}")],
        [link("built", "/etc"), entry("built/x", b"x")],
        [folder("built"), entry("built/x", b"x")],
        [entry("../x", b"x")],
        [entry("/x", b"x")],
        [link("a", "/etc"), entry("a/x", b"x")],
        [link("a", "b"), folder("b"), entry("a/x", b"x")],
        [link("a", "../..")],
        [link("pyvenv.cfg", "/dev/zero")],
        [link("a", "/usr/../etc")],
        [link("a", "."), hard_link("b", "./a"), entry("b/environment.json", b"{}")],
        [hard_link("a", "../../x")],
        [hard_link("a", "missing")],
        [hard_link("a", "/etc/passwd")],
        [entry("a", type=tarfile.FIFOTYPE)],
        [entry("a", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    ],
    ids=lambda entries: ",".join(about.name for about, _ in entries),
)
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, entries: list[Made]) -> None:
    target = tmp_path / "one/two/target"
    target.mkdir(parents=True)
    with pytest.raises(TaskError, match="environment"):
        _unpack(io.BytesIO(archive(entries)), target, _PYTHON)
    assert not [path for path in tmp_path.rglob("x") if not path.is_relative_to(target)]


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"no archive" * 200, archive([entry("a", b"x" * 5000)])[:3000]):
        with pytest.raises(TaskError, match="environment"):
            _unpack(io.BytesIO(data), tmp_path, _PYTHON)


def test_an_environment_keeps_the_links_that_it_has(tmp_path: Path) -> None:
    made = [link("bin/python", str(_PYTHON)), link("bin/python3", "python"), folder("lib"), link("lib64", "lib")]
    _unpack(io.BytesIO(archive([*made, entry("lib/a.py", b"a"), hard_link("lib/b.py", "lib/a.py")])), tmp_path, _PYTHON)
    assert (tmp_path / "lib64/b.py").read_bytes() == b"a" and (tmp_path / "bin/python3").resolve().exists()


def test_files_are_shared_with_modes_that_everybody_may_read(tmp_path: Path) -> None:
    """A file that one environment keeps to itself is not taken from another one that has the same."""
    for name, mode in (("mine", 0o600), ("other", 0o644)):
        place = tmp_path / name
        place.mkdir()
        _unpack(io.BytesIO(archive([entry("six.py", b"#" * 1000, mode=mode)])), place, _PYTHON)
        share_equal_files(place)
    assert (tmp_path / "other/six.py").stat().st_mode & 0o777 == 0o644


def test_a_damaged_file_of_the_pool_is_not_shared(tmp_path: Path) -> None:
    """The digest is taken after sharing: it would vouch for the damage, in every environment that is built later."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "six.py").write_bytes(b"#" * 1000)
        built = digest_tree(tmp_path / name)
        share_equal_files(tmp_path / name)
        assert digest_tree(tmp_path / name) == built
        with (tmp_path / name / "six.py").open("r+b") as file:
            file.write(b"!")


async def test_two_at_once_of_the_same_wait_for_each_other(cache: Path, tmp_path: Path, isolating: None) -> None:
    """In one process, waiting for a lock must not stop its holder; and the umask stays."""
    asked = Specification(workspace=project(tmp_path / "shop"), python=system_python())
    plain = f'python:{{"python": "{asked.python}", "workspace": "{asked.workspace}"}}'
    tasks = [
        Task(f"{n}", "p", "python", asked.workspace, b"", environment=e) for n, e in enumerate([str(asked), plain])
    ]
    before = os.umask(0o077)
    try:
        async with asyncio.timeout(120):
            first, second = await prepare_environments(tasks, jobs=2)
        assert first == second
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_links_to_one_file_are_shared_as_they_are(tmp_path: Path) -> None:
    """Hashes collected while sharing give the digest of reading every file."""
    place = tmp_path / "mine"
    place.mkdir()
    (place / "a.py").write_bytes(b"#" * 1000)
    for name in ("b.py", "c.py"):
        (place / name).hardlink_to(place / "a.py")
    assert digest_tree(place, share_equal_files(place)) == digest_tree(place)
    assert sorted(path.name for path in place.iterdir()) == ["a.py", "b.py", "c.py"]
