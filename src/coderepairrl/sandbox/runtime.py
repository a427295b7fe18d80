"""A relocated copy of this machine's Python that runs the guest in images, which may have none.

It has what the guest loads: interpreter, modules, shared libraries, and the loader, which is started directly, as the
image's may be older or different. Some 10 MB, copied in 10 ms.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from coderepairrl.errors import PrerequisiteError
from coderepairrl.sandbox.interpreter import first_python, install_command

_LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
import guest, ctypes, encodings.ascii, encodings.latin_1, encodings.idna
try:
    import _sha1
except ImportError:
    import hashlib
modules = [[module.__file__, getattr(module, "__cached__", None)] for module in list(sys.modules.values())
           if getattr(module, "__file__", None) and module.__name__ != "guest"]
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line})
import json
print(json.dumps({"modules": modules, "mapped": mapped, "prefix": sys.base_prefix, "program": sys.executable}))
"""


def gather(guest: Path, target: Path, seen: str, user: int | None) -> list[str]:
    """Copy Python to `target`, seen inside as `seen`; return the start of a command line that runs it.

    `user` must be able to read the module `guest`. Raises `PrerequisiteError`.
    """
    _, printed = first_python(user, ["-ISBc", _LOAD, str(guest.parent)])
    loaded = json.loads(printed)
    program = Path(loaded["program"]).resolve()
    for source, cached in loaded["modules"]:
        for path in (Path(name) for name in (source, cached) if name):
            if path.exists():
                _copy(path, target / str(path).lstrip("/"))
    _copy(program, target / str(program).lstrip("/"))
    modules = {source for source, _ in loaded["modules"]}
    loader = ""
    for library in (Path(name) for name in loaded["mapped"] if name not in modules and name != str(program)):
        if ".so" not in library.name or not library.is_file():
            continue
        for name in (library.name, *_names(library)):
            _copy(library, target / "lib" / name)
        if library.name.startswith("ld-"):
            loader = library.name
    if not loader:
        raise PrerequisiteError(f"{program} is linked in a way that images cannot use", fix=install_command("python3"))
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return [f"{seen}/lib/{loader}", "--library-path", f"{seen}/lib", f"{seen}{program}"]


def _names(library: Path) -> list[str]:
    # programs load a library by its interface version, which is a link
    return [path.name for path in library.parent.iterdir() if path.is_symlink() and path.resolve() == library]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
