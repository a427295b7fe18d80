"""Removes the project's modules from its environment, so that those of the workspace are imported.

Runs in the project's folder with the environment's interpreter (Python 3.6 or later). Argument: the workspace's path in
sandboxes. Prints JSON: ``imports``, the module folder; ``modules``, installed Python files; ``built``, generated files
(``_version.py``), in base64 by path; ``packages``, versions by name; ``left_out``, missing requirements.
"""

import base64
import compileall
import json
import os
import py_compile
import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

FUTURE = re.compile(rb"^from __future__ ", re.MULTILINE)
HEAD = re.compile(rb"\A#!/bin/sh\n(#.*\n)?'''exec' .*\n' '''\n")
"""Head of a relocatable environment's script; as a module it allows no `from __future__` after it."""
NO_MODULE = re.compile(r"(\.\./|[^/]+\.(dist-info|data)/)|.*\.pyc$")


def records(packages):
    """Name, version and folder of each distribution, and whether it is the project."""
    for record in sorted(packages.glob("*.dist-info")):
        name, _, version = record.stem.rpartition("-")
        origin = record / "direct_url.json"
        url = json.loads(origin.read_text(encoding="utf-8")).get("url", "") if origin.exists() else ""
        yield name, version, record, url.startswith(Path.cwd().as_uri())


def files(record):
    """Modules and data of a distribution, relative to the package folder."""
    lines = (record / "RECORD").read_text(encoding="utf-8").splitlines()
    names = [line.rsplit(",", 2)[0].strip('"') for line in lines]
    return [name for name in names if not NO_MODULE.match(name)]


def place(name, known):
    """Shortest project folder that contains `name`, or None."""
    if name in known:
        return ""
    prefixes = [path[: -len(name) - 1] for path in known if path.endswith("/" + name)]
    return min(prefixes, key=len) if prefixes else None


def remove(packages, name):
    """Delete a file and folders left empty."""
    path = packages / name
    if path.exists():
        path.unlink()
    for folder in path.parents:
        if folder == packages or not folder.is_dir() or any(folder.iterdir()):
            break
        folder.rmdir()


def mend(script):
    """Use ``/usr/bin/env python`` in scripts with future imports."""
    content = script.read_bytes()
    if FUTURE.search(content):
        script.write_bytes(HEAD.sub(b"#!/usr/bin/env python\n", content))


def forget(record, name):
    """Delete a metadata file and its record."""
    path, listed = record / name, record / "RECORD"
    if path.exists():
        path.unlink()
    lines = listed.read_text(encoding="utf-8").splitlines(True)
    listed.write_text(
        "".join(line for line in lines if not line.startswith(record.name + "/" + name)), encoding="utf-8"
    )


def main(workspace):
    """Strip the environment and print the facts."""
    packages = Path(sysconfig.get_paths()["purelib"])
    left_out = Path("/tmp/left-out")
    listed = left_out.read_text(encoding="utf-8").splitlines() if left_out.exists() else []
    facts = {"imports": "", "modules": [], "built": {}, "packages": {}, "left_out": listed}
    # committed files only, without those the build wrote
    project_files = {os.fsdecode(name) for name in Path("/tmp/project-files").read_bytes().split(b"\0") if name}
    for name, version, record, from_project in records(packages):
        facts["packages"][name] = version
        if not from_project:
            continue
        places = {file_name: place(file_name, project_files) for file_name in files(record)}
        prefix_counts = Counter(prefix for prefix in places.values() if prefix is not None)
        facts["imports"] = prefix_counts.most_common(1)[0][0] if prefix_counts else ""
        for file_name, prefix in places.items():
            if prefix is not None and file_name.endswith(".py"):
                facts["modules"].append(str(Path(prefix, file_name)))
            if prefix is None:
                content = (packages / file_name).read_bytes()
                facts["built"][str(Path(facts["imports"], file_name))] = base64.b64encode(content).decode()
            remove(packages, file_name)
        for name in ("direct_url.json", "uv_cache.json"):  # a path of this sandbox, times of this build
            forget(record, name)
    (packages / "workspace.pth").write_text(str(Path(workspace, facts["imports"])) + "\n", encoding="utf-8")
    for script in Path(sys.executable).parent.iterdir():
        if script.is_file() and not script.is_symlink():
            mend(script)
    # by content where Python can: times of files change when environments share them
    mode = getattr(getattr(py_compile, "PycInvalidationMode", None), "UNCHECKED_HASH", None)
    how = {"invalidation_mode": mode} if mode else {}
    compileall.compile_dir(str(packages), quiet=2, maxlevels=20, force=True, **how)  # force: imports have cached some
    print("\n" + json.dumps(facts))  # on the last line, whatever compiling printed


main(sys.argv[1])
