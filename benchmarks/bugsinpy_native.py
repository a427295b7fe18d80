"""Do bugs of BugsInPy hold in environments that this machine builds? (docs/measurements/benchmarks.md)

    python benchmarks/bugsinpy_native.py bugs --path BugsInPy --out bugs.jsonl
    python benchmarks/bugsinpy_native.py table bugs.jsonl
    python benchmarks/bugsinpy_native.py held bugs.jsonl >src/coderepairrl/tasks/sources/bugsinpy_native.txt

`bugs`: grades each bug of ``--project`` with its reference and with no patch, with ``workspace=native``. Bugs already
in ``--out`` are not run again. Commits come from ``--clone``.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from coderepairrl import sandbox, tasks
from swe_bench_native import ROOM, held, hold_each, table

PROJECTS = "PySnooper,cookiecutter,tqdm,thefuck,youtube-dl,tornado,black,luigi"
"""Projects that need nothing but Python packages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bugs", "table", "held"))
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--project", default=PROJECTS)
    parser.add_argument("--clone", default="https://github.com/{repository}.git")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "bugs":
        backend = sandbox.make_backend("bwrap", **ROOM)
        settings = {"workspace": "native", "all_native": True, "clone": options.clone}
        bugs = list(tasks.make_source("bugsinpy", path=str(options.path), project=options.project, **settings))
        first = {bug.environment: bug.id for bug in reversed(bugs)}  # so that environments are built in parallel
        bugs.sort(key=lambda bug: bug.id != first[bug.environment])
        asyncio.run(hold_each(bugs, backend, options.out, options.jobs))
    else:
        {"table": table, "held": held}[options.what](options)


if __name__ == "__main__":
    main()
