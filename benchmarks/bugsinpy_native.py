"""Do bugs of BugsInPy hold in environments that this machine builds? (docs/measurements/benchmarks.md)

    python benchmarks/bugsinpy_native.py bugs --path BugsInPy --out bugs.jsonl
    python benchmarks/bugsinpy_native.py table bugs.jsonl
    python benchmarks/bugsinpy_native.py held bugs.jsonl >src/coderepairrl/tasks/sources/bugsinpy_native.txt

`bugs`: each bug of ``--project``, its reference and no patch at all, with ``workspace=native``. What is in ``--out``
already is not run again. Commits come from ``--clone``.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from coderepairrl import sandbox, tasks
from swe_bench_native import ROOM, held, hold_each, table

PROJECTS = "PySnooper,cookiecutter,tqdm,thefuck,youtube-dl,tornado,black,luigi"
"""Those that need Python packages alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bugs", "table", "held"))
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--project", default=PROJECTS)
    parser.add_argument("--clone", default="https://github.com/{repository}.git")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "bugs":
        backend = sandbox.make_backend("bwrap", **ROOM)
        options = {"workspace": "native", "all_native": True, "clone": given.clone}
        bugs = list(tasks.make_source("bugsinpy", path=str(given.path), project=given.project, **options))
        first = {bug.environment: bug.id for bug in reversed(bugs)}  # environments are built side by side
        bugs.sort(key=lambda bug: bug.id != first[bug.environment])
        asyncio.run(hold_each(bugs, backend, given.out, given.jobs))
    else:
        {"table": table, "held": held}[given.what](given)


if __name__ == "__main__":
    main()
