"""Removes the project's modules from its virtual environment, so that Python imports them from the workspace.

Runs in the project's folder with the environment's interpreter (Python 3.6 or later). Arguments: the workspace's path
in sandboxes, then folders of other projects' files. Prints JSON: ``imports``, the project folder to put on the path;
``modules``, its installed Python files; ``built``, files that only the build has (``_version.py``, extensions, those of
the folders), in base64 by path; ``made``, paths that the build made in the project's folder; ``packages``, versions by
name; ``left_out``, requirements that could not be installed.
"""

import base64
import compileall
import json
import os
import py_compile
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

FUTURE_IMPORT = re.compile(rb"^from __future__ ", re.MULTILINE)
RELOCATABLE_HEAD = re.compile(rb"\A#!/bin/sh\n(#.*\n)?'''exec' .*\n' '''\n")
"""First lines of a relocatable environment's script: a shell command in a string, so no future import may follow."""
NO_MODULE = re.compile(r"(\.\./|[^/]+\.(dist-info|data)/)|.*\.pyc$")


def find_distributions(packages):
    """Yield name, version and metadata folder of each distribution, and whether it is the project."""
    for record in sorted(packages.glob("*.dist-info")):
        name, _, version = record.stem.rpartition("-")
        origin = record / "direct_url.json"
        url = json.loads(origin.read_text(encoding="utf-8")).get("url", "") if origin.exists() else ""
        yield name, version, record, url.startswith(Path.cwd().as_uri())


def list_files(record):
    """List modules and data of a distribution, relative to the package folder."""
    lines = (record / "RECORD").read_text(encoding="utf-8").splitlines()
    names = [line.rsplit(",", 2)[0].strip('"') for line in lines]
    return [name for name in names if not NO_MODULE.match(name)]


def find_folder(name, project_files):
    """Shortest project folder that contains the installed file `name`, or None."""
    if name in project_files:
        return ""
    prefixes = [path[: -len(name) - 1] for path in project_files if path.endswith("/" + name)]
    return min(prefixes, key=len) if prefixes else None


def remove_file(packages, name):
    """Delete a file and the folders that this leaves empty."""
    path = packages / name
    if path.exists():
        path.unlink()
    for folder in path.parents:
        if folder == packages or not folder.is_dir() or any(folder.iterdir()):
            break
        folder.rmdir()


def repair_script(script):
    """Replace `RELOCATABLE_HEAD` by ``/usr/bin/env python`` in scripts with future imports."""
    content = script.read_bytes()
    if FUTURE_IMPORT.search(content):
        script.write_bytes(RELOCATABLE_HEAD.sub(b"#!/usr/bin/env python\n", content))


def remove_metadata(record, name):
    """Delete a metadata file and its line in ``RECORD``."""
    path, listing = record / name, record / "RECORD"
    if path.exists():
        path.unlink()
    lines = listing.read_text(encoding="utf-8").splitlines(True)
    listing.write_text(
        "".join(line for line in lines if not line.startswith(record.name + "/" + name)), encoding="utf-8"
    )


def encode_file(path):
    """Read a file as base64."""
    return base64.b64encode(path.read_bytes()).decode()


def main(workspace, *sources):
    """Remove the project, and print JSON."""
    packages = Path(sysconfig.get_paths()["purelib"])
    left_out = Path("/tmp/left-out")
    missing = left_out.read_text(encoding="utf-8").splitlines() if left_out.exists() else []
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--directory"], stdout=subprocess.PIPE, check=True
    ).stdout
    made = [os.fsdecode(path).rstrip("/") for path in listing.split(b"\0") if path]
    facts = {"imports": "", "modules": [], "built": {}, "made": made, "packages": {}, "left_out": missing}
    for path in (each for folder in sources for each in Path(folder).rglob("*") if each.is_file()):
        facts["built"][str(path)] = encode_file(path)
    # committed files, without those that the build wrote
    project_files = {os.fsdecode(name) for name in Path("/tmp/project-files").read_bytes().split(b"\0") if name}
    for name, version, record, from_project in find_distributions(packages):
        facts["packages"][name] = version
        if not from_project:
            continue
        folders = {file_name: find_folder(file_name, project_files) for file_name in list_files(record)}
        folder_counts = Counter(folder for folder in folders.values() if folder is not None)
        facts["imports"] = folder_counts.most_common(1)[0][0] if folder_counts else ""
        for file_name, folder in folders.items():
            if folder is not None and file_name.endswith(".py"):
                facts["modules"].append(str(Path(folder, file_name)))
            if folder is None and file_name.endswith("-nspkg.pth"):  # works only in a folder of packages
                where = repr(str(Path(workspace, facts["imports"])))
                text = (packages / file_name).read_text(encoding="utf-8")
                text = text.replace("sys._getframe(1).f_locals['sitedir']", where)
                (packages / ("workspace-" + file_name)).write_text(text, encoding="utf-8")
            elif folder is None:
                facts["built"][str(Path(facts["imports"], file_name))] = encode_file(packages / file_name)
            remove_file(packages, file_name)
        for name in ("direct_url.json", "uv_cache.json"):  # they hold paths of this sandbox and times of this build
            remove_metadata(record, name)
    (packages / "workspace.pth").write_text(str(Path(workspace, facts["imports"])) + "\n", encoding="utf-8")
    for script in Path(sys.executable).parent.iterdir():
        if script.is_file() and not script.is_symlink():
            repair_script(script)
    # where possible, bytecode that ignores source times, which sharing files between environments changes
    mode = getattr(getattr(py_compile, "PycInvalidationMode", None), "UNCHECKED_HASH", None)
    options = {"invalidation_mode": mode} if mode else {}
    # force: replaces what imports cached
    compileall.compile_dir(str(packages), quiet=2, maxlevels=20, force=True, **options)
    print("\n" + json.dumps(facts))  # on a line by itself, after whatever compiling printed


main(*sys.argv[1:])
