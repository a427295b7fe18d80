"""Conda environment files as requirements of the Python Package Index.

Names are the same there, except `RENAMED`. Other packages than Python's (compilers, C libraries), builds, channels and
hashes are omitted.
"""

from __future__ import annotations

import re

RENAMED = {
    "blas": "",
    "cdms2": "",
    "dask-core": "dask",
    "eccodes": "",
    "gdal": "",
    "graphviz": "",
    "hdf5": "",
    "iris": "scitools-iris",
    "libnetcdf": "",
    "matplotlib-base": "matplotlib",
    "msgpack-python": "msgpack",
    "nodejs": "",
    "openjdk": "",
    "pip": "",
    "pynio": "",
    "pytables": "tables",
    "python": "",
    "python-graphviz": "graphviz",
    "python-xxhash": "xxhash",
    "pytorch": "torch",
    "tiledb": "",
    "tiledb-py": "tiledb",
}
_PACKAGE = re.compile(r"(?:[\w.-]+::)?(?P<name>[\w.-]+)\s*(?P<version>[^\[]*)")
_ITEM = re.compile(r"(?P<indent>\s*)-\s+(?P<text>[^#]*?)\s*(\s#.*)?$")


def requirements(text: str) -> tuple[str, list[str]]:
    """Python version (``MAJOR.MINOR``, or "") and requirements of an environment file.

    >>> requirements("dependencies:\\n  - python=3.10\\n  - iris\\n  - numpy=1.2\\n  - pip:\\n    - numbagg")
    ('3.10', ['scitools-iris', 'numpy==1.2.*', 'numbagg'])
    """
    python, packages = "", list[str]()
    listed, pip = False, -1  # within `dependencies`; how deep the list of pip is indented
    for line in text.splitlines():
        if re.match(r"\w", line):
            listed, pip = line.startswith("dependencies:"), -1
        item = _ITEM.match(line)
        if not listed or item is None:
            continue
        indent, entry = len(item["indent"]), item["text"].strip("\"'")
        if entry == "pip:":
            pip = indent
        elif 0 <= pip < indent:
            packages.append(entry)
        elif package := _PACKAGE.match(entry):
            name, version = package["name"].lower(), _version(package["version"])
            if name == "python":
                python = ".".join(re.findall(r"\d+", version)[:2])
            if name := RENAMED.get(name, name):
                packages.append(name + version)
    return python, packages


def _version(asked: str) -> str:
    # with one sign of equality, or none, conda means all versions with that beginning
    parts = []
    for each in filter(None, asked.replace(" ", "").split(",")):
        if each[:2] in ("==", "!=", ">=", "<=", "~=") or each[0] in "<>":
            parts.append(each)
        else:
            parts.append(f"=={each.lstrip('=').partition('=')[0].removesuffix('*').rstrip('.')}.*")
    return ",".join(parts)
