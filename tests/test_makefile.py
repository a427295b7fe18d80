"""The two commands of the README say what is missing, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_setup(tmp_path: Path, *programs: str, extra: str = "dev", **scripts: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup.sh in a copy of the tree's top with only `programs` and the fake `scripts` on the PATH."""
    tree, tools = tmp_path / "tree", tmp_path / "bin"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", tree / "scripts")
    shutil.copy(ROOT / "constraints.txt", tree)
    tools.mkdir()
    for program in ("dirname", "sh", *programs):
        found = shutil.which(program)
        assert found, program
        (tools / program).symlink_to(found)
    for name, body in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    command = [str(tools / "sh"), str(tree / "scripts" / "setup.sh"), *extra.split()]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools), "HOME": str(tmp_path)})


def test_no_python(tmp_path: Path) -> None:
    done = run_setup(tmp_path)
    assert done.returncode == 3
    assert "Python 3.11 or newer" in done.stderr


PYTHON = """case "$1" in -m) mkdir -p .venv/bin; cat > .venv/bin/python; chmod +x .venv/bin/python;; esac <<'END'
#!/bin/sh
[ "$1" = -c ] && exit 1  # torch is not there
echo ran $@ >&2; echo ran $@ >> log
case "$*" in %s) exit 1;; esac
END
"""
"""A Python whose environments' pip fails where its arguments are like the pattern."""


@pytest.mark.parametrize("fails, asked", [("never", 1), ("*+cpu", 2), ("*+cpu*", 3)])
def test_pip_takes_the_cpu_build_without_a_gpu(tmp_path: Path, fails: str, asked: int) -> None:
    """Pip looks in its usual index, then in PyTorch's; else a message announces the CUDA build."""
    needed = ("mkdir", "chmod", "cat", "sed", "uname")
    done = run_setup(tmp_path, *needed, python3=PYTHON % fails)
    assert done.returncode == 0, done.stderr
    assert "300 MB" in done.stderr and ("takes about 3 GB" in done.stderr) == (asked == 3)
    *torch, project = (tmp_path / "tree" / "log").read_text().splitlines()
    assert ["+cpu" in line for line in torch] == [True] * min(asked, 2)
    assert ["download.pytorch.org" in line for line in torch] == [False, True][: len(torch)]
    assert project.endswith("-c constraints.txt -e .[dev]") and "+cpu" not in project


def test_uv_takes_the_cpu_build_without_a_gpu(tmp_path: Path) -> None:
    done = run_setup(tmp_path, python3="exit 0", uv="echo uv $@ >&2")
    assert done.returncode == 0, done.stderr
    assert "300 MB" in done.stderr
    assert "--torch-backend cpu -c constraints.txt -e .[dev]" in done.stderr
    with_gpu = run_setup(tmp_path / "gpu", python3="exit 0", uv="echo uv $@ >&2", **{"nvidia-smi": "exit 0"})
    assert "--torch-backend auto" in with_gpu.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None and not os.environ.get("CI"), reason="shellcheck not installed")
def test_shell_scripts_are_clean() -> None:
    shipped = [path for path in (ROOT / "src").rglob("*.sh") if "handmade" not in path.parts]
    jobs = [*(ROOT / "scripts" / "slurm").glob("*.sh")]
    assert shipped and jobs
    scripts = [ROOT / "scripts" / "setup.sh", ROOT / ".ci" / "run", *shipped, *jobs]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
