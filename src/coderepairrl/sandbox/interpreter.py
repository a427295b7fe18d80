"""The Python that runs the guest, and install commands of this distribution.

Images may have no Python: there the guest runs in a relocated copy of this machine's, with what the guest loads:
interpreter, modules, shared libraries, and the dynamic loader, which is called by path, since the image's may be older
or different. The copy takes some 10 MB and 10 ms.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coderepairrl.errors import PrerequisiteError
from coderepairrl.sandbox import guest
from coderepairrl.sandbox.privileges import command_as


def find_python(work: Path, user: int | None) -> Path:
    """Find a Python that `user` can run, by compiling the guest to ``work/guest.pyc``. Raises `PrerequisiteError`."""
    compile_guest = "import py_compile,sys; py_compile.compile(sys.argv[1], sys.argv[2], doraise=True)"
    work.mkdir(exist_ok=True)
    (work / "guest.py").write_text(guest.join_guest_source(), "utf-8")
    (work / "guest.py").chmod(0o644)
    if user is not None:
        os.chown(work, user, user)
    python, _ = find_first_python(user, ["-ISc", compile_guest, f"{work}/guest.py", f"{work}/guest.pyc"])
    if user is not None:
        os.chown(work, 0, 0)
    work.chmod(0o755)
    (work / "guest.pyc").chmod(0o644)
    return python


def find_first_python(user: int | None, arguments: Sequence[str]) -> tuple[Path, bytes]:
    """Return the first Python that `user` can run with `arguments`, and its output. Raises `PrerequisiteError`."""
    failures = []
    for python in dict.fromkeys((Path(sys.executable).resolve(), Path("/usr/bin/python3").resolve())):
        argv = command_as(user, ["/usr/bin/env", str(python), *arguments])
        try:
            result = subprocess.run(argv, check=True, capture_output=True, cwd="/", timeout=60, env={})
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{python} ({error})")
            continue
        return python, result.stdout
    raise PrerequisiteError(
        f"no Python that an unprivileged user can run: {'; '.join(failures)}", fix=install_command("python3")
    )


def find_prefix(python: Path) -> Path | None:
    """Folder outside ``/usr`` that `python` needs, or None. Raises `PrerequisiteError` if it is ``/`` or the home."""
    prefix = python.parent.parent
    if prefix.is_relative_to("/usr"):
        return None
    if prefix in (Path("/"), Path.home()):
        raise PrerequisiteError(f"{python} lies in {prefix}, which a sandbox must not see", fix="use a venv")
    return prefix


def make_search_path(python: Path) -> str:
    """``PATH`` for commands: the folder of `python`, then the usual ones."""
    return ":".join(dict.fromkeys((str(python.parent), "/usr/local/bin", "/usr/bin", "/bin")))


_INSTALLERS = {
    **dict.fromkeys(("fedora", "rhel", "centos"), "dnf install"),
    **dict.fromkeys(("suse", "opensuse"), "zypper install"),
    "arch": "pacman -S",
    "alpine": "apk add",
}
"""Package managers by distribution; others have apt."""


def install_command(package: str) -> str:
    """Install command of this distribution; root gets no ``sudo``, which containers lack."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    family = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()
    installer = next((_INSTALLERS[name] for name in family if name in _INSTALLERS), "apt-get install")
    package = package.replace("python3", "python") if installer == "pacman -S" else package
    return f"{sudo}{installer} {package}"


_LIST_LOADED = """
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
"""Imports what the guest imports; prints modules and mapped files of that process."""


def copy_python(guest: Path, target: Path, inside: str, user: int | None) -> list[str]:
    """Copy Python to `target`, whose path in the sandbox is `inside`; return the start of a command that runs it there.

    `user` must be able to read the module `guest`. Raises `PrerequisiteError`.
    """
    _, printed = find_first_python(user, ["-ISBc", _LIST_LOADED, str(guest.parent)])
    loaded = json.loads(printed)
    program = Path(loaded["program"]).resolve()
    for source, cached in loaded["modules"]:
        for path in (Path(name) for name in (source, cached) if name):
            if path.exists():
                _copy_file(path, target / str(path).lstrip("/"))
    _copy_file(program, target / str(program).lstrip("/"))
    modules = {source for source, _ in loaded["modules"]}
    loader = ""
    for library in (Path(name) for name in loaded["mapped"] if name not in modules and name != str(program)):
        if ".so" not in library.name or not library.is_file():
            continue
        # programs load a library by its interface version (libz.so.1), which is a link to it
        links = [path.name for path in library.parent.iterdir() if path.is_symlink() and path.resolve() == library]
        for name in (library.name, *links):
            _copy_file(library, target / "lib" / name)
        if library.name.startswith("ld-"):
            loader = library.name
    if not loader:
        raise PrerequisiteError(
            f"{program} loads no dynamic loader (ld-*.so), so it cannot run in an image", fix=install_command("python3")
        )
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return [f"{inside}/lib/{loader}", "--library-path", f"{inside}/lib", f"{inside}{program}"]


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
