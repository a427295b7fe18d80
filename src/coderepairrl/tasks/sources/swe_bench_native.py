"""SWE-bench and similar instances in environments built on this machine.

Specifications are from swebench 4.1.0, the last version that has them; the harness of `grading.harness` judges logs.
Both are MIT-licensed and installed on demand.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from coderepairrl.environments.build import CondaFile, Specification
from coderepairrl.errors import TaskError
from coderepairrl.processes.installs import install_tool
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command

PACKAGES = ("swebench==4.1.0",)
BEFORE = "2024-12-01"
"""Date of the published images' packages."""
TIMEOUT = 1800.0
"""The harness's test limit per instance, in seconds."""
_PROGRAMS = resources.files(__package__) / "programs"
_SPECIFICATIONS = (_PROGRAMS / "swebench_specifications.py").read_text()
_LEFT_OUT = re.compile(
    r"^(source \S+/activate|conda activate \S+|cd /testbed|(python -m )?pip install .*|python setup\.py install"
    r"|git (config|status|show|-c core\.fileMode=false diff)\b.*|.* /etc/locale\.gen .*)$"
)
"""Script lines that prepare a container or log its repository."""
_TOX = re.compile(r"^tox --current-env -epy3\d+ -v --", re.MULTILINE)
"""Command that leaves the current virtual environment."""
_PYTEST = "python -X dev -m pytest -rA"
_PIN = re.compile(r"^([^=<>!~;]+)==[^;]*")
"""Requirement of an exact version; a marker may follow."""
_EXTRAS = re.compile(r"pip install (?:-e )?\.(\[[\w,-]+\])?")
_HTTPBIN = {"psf/requests": ("httpbin==0.10.2", "trustme==1.2.0", "werkzeug==3.1.3")}
"""Replacements of httpbin.org, by repository whose tests use that site."""
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
"""Preparation of tests that read the site's address from the environment."""
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
"""Script after the test patch that changes addresses in tests.

A reserved address, refused offline, becomes a port of localhost that does not answer. Another site that redirects to
httpbin becomes the local one under another host name.
"""
# steps of pre_install that are left out: changes of the system, and downloads
_SYSTEM = re.compile(r"\b(apt-get|apt|wget|curl|make|locale-gen)\b|/etc/")
_BY_VERSION = ("django/django",)
"""Repositories that compile nothing: a version has one environment, built at its ``environment_setup_commit``.

The harness takes requirements from this commit, too.
"""
_PYTHONS = {"3.5": "3.6"}
"""Replaced Python versions: uv cannot install packages for 3.5."""
_KEEP_BYTECODE = "unset PYTHONDONTWRITEBYTECODE; export PYTHONPYCACHEPREFIX=$(mktemp -d)"
"""Django's tests start ``manage.py`` often, which otherwise compiles Django each time (2.5 times slower)."""
_LOCALE = "en_US.UTF-8"
"""Locale of the harness's containers, which few machines have; Python treats ``C.UTF-8`` alike."""
_COMPILE = """\
export CFLAGS="-g0 -O1" CXXFLAGS="-g0 -O1" LDFLAGS=-s SETUPTOOLS_SCM_PRETEND_VERSION={version} MPLLOCALFREETYPE=1
pip install --no-build-isolation .{extras}"""
"""Installation of a project with compiled modules, for small size and a quick build."""
_FREETYPE = """\
make -C build/freetype-2.6.1 setup ansi
make -j 4 -C build/freetype-2.6.1 CFLAGS="-c -g0 -O2 -fPIC"
(cd build/freetype-2.6.1 && mkdir objs/.libs && mv objs/libfreetype.a objs/.libs && rm -r docs src objs/*.o)
"""
"""Compiles the FreeType that drew matplotlib's expected images; the project would download its archive."""


_NO_DOWNLOAD = r"sed -i 's/^def _download_jquery_to(dest):/&\n    return/' setup.py" + "\n"
"""Leaves out jQuery, which matplotlib's installation would download for its browser backend."""


class _Recipe(NamedTuple):
    """Needs of a project with compiled modules beyond its specification."""

    requirements: tuple[str, ...]
    """Build requirements, which stay so that agents can compile, and packages that replace `without`."""
    without: tuple[str, ...] = ()
    """Specified packages that have no wheel, or belong to a conda environment."""
    sources: dict[str, str] = {}  # noqa: RUF012 - never changed
    """``REPOSITORY@COMMIT`` by folder: files of other projects to compile with."""
    prepare: str = ""
    """Bash commands before the project is compiled."""
    programs: tuple[str, ...] = ("gcc", "g++")


_TEST_TOOLS = ("pytest<8", "pytest-rerunfailures", "pytest-timeout", "pytest-xdist", "tornado", "psutil", "certifi")
_MATPLOTLIB = _Recipe(
    ("pybind11<2.12", "pandas<2.1", *_TEST_TOOLS),
    ("ghostscript",),
    {
        "build/freetype-2.6.1": "freetype/freetype@8cabd919ca63f0e6c12e8405e8542a45d910fa62",
        "build/qhull-2020.2": "qhull/qhull@613debeaea72ee66626dace9ba1a2eff11b5d37d",
    },
    _FREETYPE,
    ("gcc", "g++", "make", "gs"),
)
_OLD_BUILD = ("setuptools<66", "setuptools_scm>=4,<8", "setuptools_scm_git_archive", "numpy<1.25")
_HELPERS = "astropy/astropy-helpers@"
_OFFLINE = "sed -i 's/^auto_use = True/&\\noffline = True/' setup.cfg\n"
_IN_SETUP = "sed -i '1a import builtins; builtins._ASTROPY_SETUP_ = True' setup.py\n"
"""Sets what astropy otherwise infers from the name of the running script, which is not setup.py here."""
_RECIPES: dict[str, dict[str, _Recipe]] = {
    "scikit-learn/scikit-learn": {
        "0.20 0.21 0.22": _Recipe(("cython==0.29.24", "pytest<7"), ("cython",)),
        "1.3": _Recipe(("numpy==1.19.3", "scipy==1.5.4"), ("numpy==1.19.2", "scipy==1.5.2")),
    },
    "matplotlib/matplotlib": {
        "3.0 3.1": _MATPLOTLIB._replace(
            requirements=("pandas", *_OLD_BUILD, *_TEST_TOOLS),
            prepare=_NO_DOWNLOAD + _FREETYPE,
            programs=(*_MATPLOTLIB.programs, "libpng-config"),
        ),
        "3.4": _MATPLOTLIB._replace(requirements=("pandas", *_OLD_BUILD, *_TEST_TOOLS)),
        "3.5 3.6 3.7": _MATPLOTLIB,
    },
    "astropy/astropy": {
        "1.3": _Recipe(
            ("setuptools>=40.8,<46", "MarkupSafe==1.1.1"),
            ("setuptools==38.2.4", "MarkupSafe==1.0"),
            {"astropy_helpers": f"{_HELPERS}ca630405b54d40695b7bbd2824cb0f142b5811b6"},
            _OFFLINE + _IN_SETUP,
        ),
        "3.1": _Recipe(
            ("cython<3", "jinja2", "pytest<7.2"),  # the harness installs this pytest before it runs the tests
            ("pytest==7.4.0",),
            {"astropy_helpers": f"{_HELPERS}d2a6304a3e801bc2cb053ccf1cf09a9f1e62036c"},
            _OFFLINE,
        ),
        "4.3 5.0 5.1 5.2": _Recipe(("cython==0.29.34", "extension-helpers", "setuptools_scm>=6.2,<8")),
    },
}
"""Recipes by repository and versions."""


@cache
def _load_specifications() -> dict[str, Any]:
    installed = install_tool("swebench-specifications", PACKAGES)
    [package] = installed.glob("lib/python3*/site-packages/swebench")
    return read_specifications(installed / "bin/python", package / "harness/constants/python.py")


def read_specifications(python: Path, file: Path) -> dict[str, Any]:
    """Specifications in the harness's `file`, read by `python` (`swebench_specifications.py`)."""
    command = [str(python), "-I", "-c", _SPECIFICATIONS, str(file)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    published: dict[str, Any] = json.loads(done.stdout)
    return published


def is_specified(row: Row) -> bool:
    """Whether `specify_instance_environment` can build the instance's specification."""
    spec = _load_specifications()["specifications"].get(row.text("repo"), {}).get(row.text("version"))
    return spec is not None and (row.text("repo") not in _RECIPES or _find_recipe(row) is not None)


def _find_recipe(row: Row) -> _Recipe | None:
    recipes = _RECIPES.get(row.text("repo"), {})
    return next((each for versions, each in recipes.items() if row.text("version") in versions.split()), None)


def specify_instance_environment(row: Row, clone: str, *, newest: bool = False) -> str:
    """`Task.environment` of an instance; repositories are at `clone`, a URL with ``{repository}``.

    With `newest`, packages are the newest, whatever date and exact versions the benchmark specifies; pins in the
    project's own files stay. Raises `PrerequisiteError`, and `TaskError` unless Python packages suffice.
    """
    published = _load_specifications()
    version, url = row.text("version"), clone.format(repository=row.text("repo"))
    if not is_specified(row):
        raise TaskError(
            f"{row.text('instance_id')} has no specification that can be built here",
            fix="use its image: workspace=image",
        )
    spec = published["specifications"][row.text("repo")][version]
    packages = spec.get("packages", "")  # the name of a file, or requirements
    listed = [] if packages in ("requirements.txt", "environment.yml") else shlex.split(packages)
    conda_paths = published["environments"].get(row.text("repo"), ())
    setup_commit = row.text_or_empty("environment_setup_commit")
    extras = _EXTRAS.search(spec["install"])
    built_at = row.text("environment_setup_commit" if row.text("repo") in _BY_VERSION else "base_commit")
    specification = Specification(
        workspace=f"git:{url}@{built_at}",  # most projects' needs change within a version
        python=_PYTHONS.get(spec["python"], spec["python"]),
        conda=CondaFile(paths=conda_paths, workspace=f"git:{url}@{setup_commit}" if setup_commit else "")
        if packages == "environment.yml"
        else None,
        requirements=(*listed, *spec.get("pip_packages", ()), *_HTTPBIN.get(row.text("repo"), ())),
        files=tuple(published["requirements"].get(row.text("repo"), ())) if packages == "requirements.txt" else (),
        extras=(extras and extras[1]) or "",
        before=BEFORE,
        edits=tuple(step for step in spec.get("pre_install", ()) if not _SYSTEM.search(step)),
        version=f"{version}.0.dev0",
    )
    if recipe := _find_recipe(row):
        specification = _add_recipe(specification, recipe, clone)
    if newest:
        pinned = {*_HTTPBIN.get(row.text("repo"), ()), *(recipe.requirements if recipe else ())}
        unpinned = tuple(each if each in pinned else _PIN.sub(r"\1", each) for each in specification.requirements)
        specification = specification.model_copy(update={"before": "", "requirements": unpinned})
    return str(specification)


def _add_recipe(specification: Specification, recipe: _Recipe, clone: str) -> Specification:
    specified = [each for each in specification.requirements if each not in recipe.without]
    sources = {folder: source.split("@") for folder, source in recipe.sources.items()}
    changed = {
        "requirements": (*specified, *recipe.requirements),
        "conda": None,
        "files": (),
        "edits": (),
        "sources": {folder: f"git:{clone.format(repository=name)}@{sha}" for folder, (name, sha) in sources.items()},
        "programs": recipe.programs,
        "install": recipe.prepare + _COMPILE.format(version=specification.version, extras=specification.extras),
        "extras": "",
        "version": "",
    }
    return specification.model_copy(update=changed)


def make_native_checks(row: Row, *, image: bool) -> Checks:
    """Make checks from the instance's script, adapted unless it runs in its `image`; empty without a script."""
    if "eval_script" not in row:
        return Checks()
    query = urlencode({name: row.text(name) for name in ("eval_type", "instance_id", "version")})
    text = row.text("eval_script") if image else adapt_script(row)
    command = Command(("bash", "-c", text), TIMEOUT, f"swebench:{row.text('log_parser')}?{query}")
    return Checks((command,), {}, *row.tests())


def adapt_script(row: Row) -> str:
    """Adapt ``eval_script`` to a workspace with one commit.

    It applies the test patch, runs its tests, and writes the harness's marks.
    """
    text = row.text("eval_script").replace(row.text("base_commit"), "HEAD").replace(_LOCALE, "C.UTF-8")
    lines = [line for line in text.splitlines() if not _LEFT_OUT.match(line)]
    if row.text("repo") in _BY_VERSION:
        lines[1:1] = [_KEEP_BYTECODE]
    if row.text("repo") in _HTTPBIN:
        lines[1:1] = [_SERVE]
        lines.insert(lines.index(": '>>>>> Start Test Output'"), _ADDRESSES)
    return _TOX.sub(_PYTEST, "\n".join(lines))
