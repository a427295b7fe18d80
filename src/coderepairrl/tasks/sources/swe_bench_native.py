"""Instances of SWE-bench and its kin without images: their environments are built on this machine from the benchmark's
own specifications, and their tests run in any sandbox that shows folders.

Source: the specifications are those of swebench 4.1.0, the last version that has them; the harness that judges the log
of the tests is the one that `grading.packages` pins. Both have the MIT licence, and are installed when they are needed.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from coderepairrl.environments import CondaFile, Specification
from coderepairrl.errors import TaskError
from coderepairrl.processes.installs import tool
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command

PACKAGES = ("swebench==4.1.0",)
BEFORE = "2024-12-01"
"""The published images have the packages of that time."""
TIMEOUT = 1800.0
"""The harness's own limit on the tests of an instance, in seconds."""
_PROGRAMS = resources.files(__package__) / "programs"
_SPECIFICATIONS = (_PROGRAMS / "swebench_specifications.py").read_text()
_IMAGE = "use its image: workspace=image"
_FILES = ("requirements.txt", "environment.yml")
"""What ``packages`` may say instead of requirements."""
_LEFT_OUT = re.compile(
    r"^(source \S+/activate|conda activate \S+|cd /testbed|(python -m )?pip install .*"
    r"|git (config|status|show|-c core\.fileMode=false diff)\b.*)$"
)
"""Lines of a script that prepare a container, and what it logs of its repository."""
_TOX = re.compile(r"^tox --current-env -epy3\d+ -v --", re.MULTILINE)
"""It leaves the virtual environment that it is started in."""
_PYTEST = "python -X dev -m pytest -rA"
"""What tox runs for sphinx."""
_EXTRAS = re.compile(r"pip install (?:-e )?\.(\[[\w,-]+\])?")
_HTTPBIN = {"psf/requests": ("httpbin==0.10.2", "trustme==1.2.0", "werkzeug==3.1.3")}
"""What serves as httpbin.org, for repositories whose tests ask that web site."""
_SERVE = f"""\
if grep -rqs HTTPBIN_URL --include='*.py' .; then
    exec 3< <(exec python -I /dev/stdin /tmp/authority.pem 2>/dev/null <<'END_OF_SERVER'
{(_PROGRAMS / "serve_httpbin.py").read_text()}END_OF_SERVER
    )
    servers+=($!); trap 'kill "${{servers[@]}}"' EXIT
    read -r -u 3 port
    export HTTPBIN_URL=http://localhost:$port/ https_proxy=http://localhost:$port
    cat /tmp/authority.pem >>requests/cacert.pem
fi"""
"""What comes before the tests of a version that takes the site's address from the environment."""
_SILENT, _OTHER = "http://10.255.255.1", "http://www.google.co.uk"
_ADDRESSES = f"""\
change() {{ grep -rlZF "$1" --include='test_*.py' . | xargs -0 -r sed -i "s#$1#$2#"; }}
if grep -rqsF {_SILENT} --include='test_*.py' .; then
    exec 4< <(exec python -I /dev/stdin 2>/dev/null <<'END_OF_SERVER'
{(_PROGRAMS / "never_answer.py").read_text()}END_OF_SERVER
    )
    servers+=($!); trap 'kill "${{servers[@]}}"' EXIT
    read -r -u 4 silent
    change {_SILENT} "http://127.0.0.1:$silent"
fi
if [[ ${{HTTPBIN_URL-}} ]]; then
    change {_OTHER} "http://127.0.0.1:$port"
fi"""
"""What comes after the test patch, and changes addresses in the tests. The one is of nobody: without a network it is
refused, and a port of localhost that does not answer stands for it. The other is another site than httpbin's, to which
that redirects: by another name for the same host, it is httpbin again."""
_SYSTEM = re.compile(r"\b(apt-get|apt|wget|curl|make|locale-gen)\b")
"""In preparations that change the machine or fetch from elsewhere."""


@cache
def _published() -> dict[str, Any]:
    """The benchmark's ``specifications`` by repository and version, and its ``requirements`` files by repository."""
    inside = tool("swebench-specifications", PACKAGES)
    [package] = inside.glob("lib/python3*/site-packages/swebench")
    return constants(inside / "bin/python", package / "harness/constants/python.py")


def constants(python: Path, file: Path) -> dict[str, Any]:
    """What `swebench_specifications.py` prints of a harness's `file`, which the interpreter `python` runs."""
    command = [str(python), "-I", "-c", _SPECIFICATIONS, str(file)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    published: dict[str, Any] = json.loads(done.stdout)
    return published


def specified(row: Row) -> bool:
    """Whether the benchmark specifies an environment for the instance that `environment` can build."""
    spec = _published()["specifications"].get(row.text("repo"), {}).get(row.text("version"))
    return spec is not None and "no-build-isolation" not in spec["install"]


def environment(row: Row, url: str) -> str:
    """`Task.environment` of the instance `row`, whose repository is at `url`.

    Raises `TaskError` where the benchmark specifies no environment of Python, or one that takes more than packages,
    and `PrerequisiteError` where the specifications cannot be installed.
    """
    published = _published()
    instance, version = row.text("instance_id"), row.text("version")
    if not specified(row):
        raise TaskError(f"{instance} has no specification of an environment that needs packages alone", fix=_IMAGE)
    spec = published["specifications"][row.text("repo")][version]
    listed = spec.get("packages", "")
    conda, setup = published["environments"].get(row.text("repo"), ()), row.maybe("environment_setup_commit")
    found = _EXTRAS.search(spec["install"])
    asked = Specification(
        workspace=f"git:{url}@{row.text('base_commit')}",  # what the project needs changes within a version
        python=spec["python"],
        conda=CondaFile(paths=conda, workspace=f"git:{url}@{setup}" if setup else "")
        if listed == "environment.yml"
        else None,
        requirements=(*_words(listed), *spec.get("pip_packages", ()), *_HTTPBIN.get(row.text("repo"), ())),
        files=tuple(published["requirements"].get(row.text("repo"), ())) if listed == "requirements.txt" else (),
        extras=(found and found[1]) or "",
        before=BEFORE,
        edits=tuple(step for step in spec.get("pre_install", ()) if not _SYSTEM.search(step)),
        version=f"{version}.0.dev0",
    )
    return str(asked)


def _words(packages: str) -> list[str]:
    """Requirements among the ``packages`` of a specification, which may also name a kind of file."""
    return [] if packages in _FILES else shlex.split(packages)


def checks(row: Row, *, image: bool) -> Checks:
    """The instance's own script, judged by the harness: as it is in its `image`, else as `script` has it.

    There are none where the row has no script, as older tables of SWE-bench.
    """
    if "eval_script" not in row:
        return Checks()
    query = urlencode({name: row.text(name) for name in ("eval_type", "instance_id", "version")})
    text = row.text("eval_script") if image else script(row)
    command = Command(("bash", "-c", text), TIMEOUT, f"swebench:{row.text('log_parser')}?{query}")
    return Checks((command,), {}, *row.tests())


def script(row: Row) -> str:
    """The row's ``eval_script`` for a workspace whose only commit is the instance's.

    Its test patch is applied, its tests run, and its marks stand in the log, as in a container.
    """
    text = row.text("eval_script").replace(row.text("base_commit"), "HEAD")
    kept = [line for line in text.splitlines() if not _LEFT_OUT.match(line)]
    if row.text("repo") in _HTTPBIN:
        kept[1:1] = [_SERVE]
        kept.insert(kept.index(": '>>>>> Start Test Output'"), _ADDRESSES)
    return _TOX.sub(_PYTEST, "\n".join(kept))
