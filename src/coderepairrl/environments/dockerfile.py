"""Images of Dockerfiles without a daemon.

Supported: one ``FROM`` (not ``scratch``), ``COPY`` and ``ADD`` of files, ``RUN``, ``SHELL``, ``WORKDIR``, ``ENV``,
``ARG``, ``USER``. ``CMD``, ``ENTRYPOINT`` and descriptions are ignored. Commands run in a sandbox (`commands`), except
``RUN rm -rf`` and ``RUN ln -sfT`` of absolute paths. Package tools of distributions are refused: they need several
owners and a network. ``--chown`` has no effect.

``PATCH FILE``, our extension, finally patches the working folder and makes that its repository's only commit.

Source: docs.docker.com/reference/dockerfile, as of 2025.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from coderepairrl.environments import fetch, layers
from coderepairrl.environments.commands import BuildCommand, LayerBuilder
from coderepairrl.environments.fetch import Say
from coderepairrl.environments.manifests import Found, Reference, digest_bytes
from coderepairrl.errors import TaskError
from coderepairrl.sandbox.rootfs import PATH

TRANSPORT = "dockerfile"
NAME = "Dockerfile"
_LEFT_OUT = {"CMD", "ENTRYPOINT", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
_SHELL = ("/bin/sh", "-c")
_PACKAGES = re.compile(r"(?<![\w./-])(apt-get|apt|aptitude|dpkg|apk|yum|dnf|microdnf|zypper|pacman)\s")
"""Package tools of distributions."""
_HERE = re.compile(r"(?<!<)<<-?[\"']?[A-Za-z_]")
_OPTION = re.compile(r"--(\w+)=(\S+)\s+")
_FOLDERS = {
    *("/", "/bin", "/etc", "/home", "/lib", "/mnt", "/opt", "/root", "/sbin", "/srv", "/tmp", "/usr", "/var"),
    *("/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/usr/sbin", "/usr/share", "/var/lib"),
}
_VARIABLE = re.compile(r"\\(?P<plain>\$)|\$(?:\{(?P<braced>\w+)(?:(?P<how>:[-+])(?P<word>[^}]*))?\}|(?P<bare>\w+))")
_MKDIR = re.compile(r"mkdir\s+(?:-p\s+)?(?P<folders>[^;&|<>$`*?\\]+)")
_REMOVE = re.compile(r"rm\s+-r?fr?\s+(?P<paths>(/[^\s;&|<>$`*?\\]+\s*)+)")
_LINK = re.compile(r"ln\s+-sfT\s+(?P<to>/[^\s;&|<>$`*?\\]+)\s+(?P<where>/[^\s;&|<>$`*?\\]+)")
_THEN = 946_684_800
"""Time of copied files: 2000-01-01, in seconds since 1970."""
_FIX = "name the image that it builds, prebuilt (docker_image), or take out what is not needed"


def dockerfile_image_name(folder: Path) -> str:
    """Image name, after ``image:``, of the Dockerfile in `folder` with its current files. Raises `TaskError`."""
    return f"{TRANSPORT}:{folder.absolute()}:{_state(folder)}"


def look_up_base(where: str, store: Path, offered: Path | None = None) -> fetch.Offer:
    """Look a Dockerfile's base image, or another image, up with `look_up_image`.

    Raises `TaskError`, also for a folder changed since its naming, and `PrerequisiteError`.
    """
    reference = Reference.parse(where)
    if reference.transport != TRANSPORT:
        return fetch.look_up_image(where, store, offered)
    _require_unchanged(reference, where)
    return fetch.look_up_image(find_base_image(Path(reference.name)), store, offered)


def fetch_or_build_image(
    where: str, store: Path, say: Say, offer: fetch.Offer, *, user: int | None = None, work: Path | None = None
) -> Found:
    """Fetch the `offer`; for a Dockerfile, build its image as `user` in the temporary folder `work`.

    Raises `TaskError`, `SandboxFault`, `PrerequisiteError`.
    """
    reference = Reference.parse(where)
    if reference.transport != TRANSPORT:
        return offer.get(say)
    _require_unchanged(reference, where)
    folder = Path(reference.name)
    recipe = Recipe(folder)
    base = offer.get(say)
    settings = recipe.run(base.config.get("config") or {})
    with LayerBuilder(base, work or store / ".building", user, say) as builder:
        for part in recipe.parts:
            if isinstance(part, BuildCommand):
                builder.run(part)
            elif part:
                builder.add(_layer(part))
    fields = {key: base.config[key] for key in ("os", "architecture", "variant") if key in base.config}
    config: dict[str, Any] = fields | {
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in builder.found.layers]},
    }
    if recipe.patches:  # they are not a layer, but make a different image
        config["patches"] = [digest_bytes(patch) for patch in recipe.patches]
    digest = digest_bytes(json.dumps(config, sort_keys=True).encode())
    if reference.digest not in ("", digest):
        raise TaskError(f"{folder} makes another image than {where} here, {digest}", fix="read its tasks again")
    pinned = f"{TRANSPORT}:{folder}:{reference.tag}@{digest}"
    fields = {"name": where, "id": digest.removeprefix("sha256:"), "pinned": pinned, "digests": {"asked": digest}}
    return replace(builder.found, **fields, config=config, patches=tuple(recipe.patches))


def _require_unchanged(reference: Reference, where: str) -> None:
    folder = Path(reference.name)
    if _state(folder) != reference.tag:
        raise TaskError(f"{folder} has changed since {where} was named", fix="read its tasks again")


def find_base_image(folder: Path) -> str:
    """Base image of the Dockerfile in `folder`. Raises `TaskError`."""
    return Recipe(folder).base


@dataclass
class _Entry:
    """File content, link target, or existing folder (None)."""

    data: bytes | None
    mode: int = 0o644
    link: bool = False


@dataclass
class Recipe:
    """The Dockerfile in `folder`. Raises `TaskError` with file, line and instruction."""

    folder: Path
    base: str = field(init=False)
    parts: list[dict[str, _Entry] | BuildCommand] = field(init=False, default_factory=list)
    """Layers above the base, in order: files by their path from the root, and commands."""
    patches: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if (self.folder / ".dockerignore").exists():
            raise TaskError(f"{self.folder} has a .dockerignore, which is not read", fix="remove what it leaves out")
        self._arguments: dict[str, str] = {}
        self._steps: list[tuple[int, str, str]] = []
        self.base = ""
        for line, instruction, rest in _instructions(self.folder / NAME):
            if instruction == "FROM":
                self._from(line, rest)
            elif instruction == "ARG" and not self.base:
                self._argument(line, rest, {})
            elif not self.base:
                raise self._wrong(line, f"{instruction} before FROM")
            elif instruction in ("RUN", "COPY", "ADD") and rest[:1] != "[" and _HERE.search(rest):
                raise self._wrong(line, f"{instruction} {rest}: here-documents are not read")
            elif instruction in _STEPS:
                self._steps.append((line, instruction, rest))
            elif instruction not in _LEFT_OUT:
                raise self._wrong(line, f"{instruction} is not understood")
        if not self.base:
            raise self._wrong(1, "no FROM")
        self.run({})  # report errors before fetching anything

    def run(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Fill `parts` for the base's `settings` (``Env``, ``WorkingDir``, ``User``); returns the new ones."""
        self.parts, self.patches = [], []
        self._shell: tuple[str, ...] = _SHELL
        self._env = dict(pair.partition("=")[::2] for pair in settings.get("Env") or ())
        self._env.setdefault("PATH", PATH)
        self._workdir = str(settings.get("WorkingDir") or "/")
        self._user = str(settings.get("User") or "")
        declared = dict(self._arguments)
        self._arguments = {}
        for line, instruction, rest in self._steps:
            if instruction == "ARG":
                self._argument(line, rest, declared)
            else:
                _STEPS[instruction](self, line, rest)
        self._arguments = declared
        inherited = {key: value for key, value in settings.items() if key not in ("Cmd", "Entrypoint", "OnBuild")}
        env = [f"{name}={value}" for name, value in self._env.items()]
        return inherited | {"Env": env, "WorkingDir": self._workdir, "User": self._user}

    def _from(self, line: int, rest: str) -> None:
        if self.base:
            raise self._wrong(line, "a second FROM (several stages)")
        words = [word for word in self._words(line, rest) if not word.startswith("--platform=")]
        if not words or words[0].startswith("-") or words[0] == "scratch":
            raise self._wrong(line, f"FROM {rest}")
        self.base = words[0]

    def _argument(self, line: int, rest: str, declared: Mapping[str, str]) -> None:
        for word in self._words(line, rest):
            name, separator, value = word.partition("=")
            self._arguments[name] = value if separator else declared.get(name, "")

    def _set(self, line: int, rest: str) -> None:
        if "=" not in rest.split(None, 1)[0]:
            name, _, value = rest.partition(" ")
            self._env[name] = self._expanded(value.strip())
            return
        words = self._words(line, rest)
        self._env |= dict(word.partition("=")[::2] for word in words)

    def _go(self, line: int, rest: str) -> None:
        self._workdir = self._inside(self._expanded(rest.strip()))
        self._made(self._workdir)

    def _become(self, line: int, rest: str) -> None:
        self._user = self._expanded(rest.strip())

    def _choose(self, line: int, rest: str) -> None:
        if (words := _json_list(rest)) is None:
            raise self._wrong(line, f"SHELL {rest}")
        self._shell = tuple(words)

    def _run(self, line: int, rest: str) -> None:
        if self._shell == _SHELL and (folders := _folders_made(rest)):
            for name in folders:
                self._made(self._inside(name))
            return
        if self._shell == _SHELL and (match := _REMOVE.fullmatch(rest.strip())):
            for path in match["paths"].split():
                self._remove(self._inside(path))
            return
        if self._shell == _SHELL and (match := _LINK.fullmatch(rest.strip())):
            self._entries[self._inside(match["where"])] = _Entry(match["to"].encode(), 0o777, link=True)
            return
        network, command = True, rest
        while option := _OPTION.match(command):
            name, value = option.groups()
            if (name, value) in (("network", "none"), ("network", "default")):
                network = value != "none"
            elif name != "mount" or "type=cache" not in value.split(","):  # a cache only saves time
                raise self._wrong(line, f"RUN {option[0].strip()}")
            command = command[option.end() :]
        if tool := _PACKAGES.search(f" {command} "):
            raise self._wrong(
                line, f"RUN {rest}: {tool[1]} needs several owners and a distribution's servers, which a build has not"
            )
        words = _json_list(command)
        argv = (*self._shell, command) if words is None else tuple(words)
        env = tuple(sorted((self._arguments | self._env).items()))
        where = f"{self.folder / NAME}, line {line}"
        self.parts.append(BuildCommand(argv, env, self._workdir, self._user, network, where))

    def _remove(self, where: str) -> None:
        for each in [each for each in self._entries if f"{each}/".startswith(f"{where}/")]:
            del self._entries[each]
        folder, _, name = where.rpartition("/")
        self._entries[f"{folder}/{layers.HIDDEN}{name}"] = _Entry(b"")

    def _patch(self, line: int, rest: str) -> None:
        self.patches += [path.read_bytes() for path in self._matching(line, rest)]

    @property
    def _entries(self) -> dict[str, _Entry]:
        if not self.parts or not isinstance(self.parts[-1], dict):
            self.parts.append({})
        last = self.parts[-1]
        assert isinstance(last, dict)
        return last

    def _copy(self, line: int, rest: str) -> None:
        try:
            words = json.loads(rest) if rest.startswith("[") else self._words(line, rest)
        except (ValueError, RecursionError):
            raise self._wrong(line, f"COPY {rest}") from None
        options = [word for word in words if word.startswith("--")]
        mode = None
        for option in options:
            name, _, value = option.partition("=")
            if name == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                mode = int(value, 8)
            elif name not in ("--chown", "--link"):
                raise self._wrong(line, f"COPY {option}")
        words = [word for word in words if not word.startswith("--")]
        if len(words) < 2:
            raise self._wrong(line, f"COPY {rest}")
        *sources, target = words
        paths = [path for name in sources for path in self._matching(line, name)]
        where = self._inside(target)
        several = len(paths) > 1 or target.endswith("/") or target in (".", "./")
        into = several or where in _FOLDERS or self._is_folder(where)
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                self._made(where)
                self._copy_folder(path, where, mode)
            elif into:
                self._copy_file(path, f"{where.rstrip('/')}/{path.name}", mode)
            elif PurePosixPath(where).name == path.name or PurePosixPath(where).suffix:
                self._copy_file(path, where, mode)
            else:
                raise self._wrong(line, f"COPY {rest}: is {target} a folder? Write {target}/")

    def _add(self, line: int, rest: str) -> None:
        if re.search(r"(^|\s|\")(https?|git|ssh)(://|@)|\.git\b", rest):
            raise self._wrong(line, f"ADD {rest}: nothing is fetched")
        if re.search(r"\.(tar|tgz|tar\.\w+|tbz2?|txz)\b", rest):
            raise self._wrong(line, f"ADD {rest}: archives are not unpacked")
        self._copy(line, rest)

    def _copy_folder(self, source: Path, target: str, mode: int | None) -> None:
        for path in sorted(source.iterdir()):
            where = f"{target.rstrip('/')}/{path.name}"
            if path.is_dir() and not path.is_symlink():
                self._made(where)
                self._copy_folder(path, where, mode)
            else:
                self._copy_file(path, where, mode)

    def _copy_file(self, path: Path, where: str, mode: int | None) -> None:
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            self._entries[where] = _Entry(str(path.readlink()).encode("utf-8", "surrogateescape"), 0o777, link=True)
        elif stat.S_ISREG(kind):
            self._entries[where] = _Entry(path.read_bytes(), stat.S_IMODE(kind) if mode is None else mode)
        else:
            raise TaskError(f"{path} is neither a file nor a folder")

    def _matching(self, line: int, name: str) -> list[Path]:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._wrong(line, f"COPY {name}: outside of the folder")
        matches = [self.folder]
        for part in parts:
            within = [each for folder in matches if folder.is_dir() for each in sorted(folder.iterdir())]
            matches = [each for each in within if fnmatchcase(each.name, part)]
            if any(each.is_symlink() for each in matches):
                raise self._wrong(line, f"COPY {name}: a link is on the way")
        if not matches:
            raise self._wrong(line, f"COPY {name}: there is no such file")
        return matches

    def _is_folder(self, where: str) -> bool:
        for part in reversed(self.parts):
            if isinstance(part, dict) and (where in part or any(each.startswith(f"{where}/") for each in part)):
                return where not in part or part[where].data is None
        return False

    def _made(self, where: str) -> None:
        for each in (where, *map(str, PurePosixPath(where).parents)):
            self._entries.setdefault(each, _Entry(None))

    def _inside(self, path: str) -> str:
        resolved: list[str] = []
        for part in f"{'' if path.startswith('/') else self._workdir}/{path}".split("/"):
            if part == "..":
                del resolved[-1:]
            elif part not in ("", "."):
                resolved.append(part)
        return "/" + "/".join(resolved)

    def _words(self, line: int, rest: str) -> list[str]:
        try:
            return shlex.split(self._expanded(rest))
        except ValueError as error:
            raise self._wrong(line, f"{rest}: {error}") from None

    def _expanded(self, text: str) -> str:
        variables = self._arguments | getattr(self, "_env", {})

        def value(match: re.Match[str]) -> str:
            if match["plain"]:
                return "$"
            setting = variables.get(match["braced"] or match["bare"], "")
            if match["how"] == ":-":
                return setting or match["word"]
            return match["word"] if match["how"] == ":+" and setting else "" if match["how"] else setting

        return _VARIABLE.sub(value, text)

    def _wrong(self, line: int, problem: str) -> TaskError:
        shortened = problem if len(problem) <= 200 else f"{problem[:200]}..."
        return TaskError(f"{self.folder / NAME}, line {line}: {shortened}", fix=_FIX)


_STEPS: dict[str, Any] = {
    "ARG": None,
    "ENV": Recipe._set,
    "WORKDIR": Recipe._go,
    "USER": Recipe._become,
    "COPY": Recipe._copy,
    "ADD": Recipe._add,
    "RUN": Recipe._run,
    "SHELL": Recipe._choose,
    "PATCH": Recipe._patch,
}


def _json_list(text: str) -> list[str] | None:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def _folders_made(command: str) -> list[str]:
    match = _MKDIR.fullmatch(command.strip())
    words = match["folders"].split() if match else []
    return [] if any(word.startswith("-") for word in words) else words


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", fix="write a Dockerfile in UTF-8") from error
    joined, began = "", 0
    for number, line in enumerate(lines, start=1):
        if re.match(r"#\s*escape\s*=", line) and not joined:
            raise TaskError(f"{path}, line {number}: another escape than a backslash")
        if line.lstrip().startswith("#") or (not line.strip()):
            continue
        began = began or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1]
            continue
        instruction, _, rest = (joined + line).strip().partition(" ")
        yield began, instruction.upper(), rest.strip()
        joined, began = "", 0
    if joined:
        raise TaskError(f"{path}: it ends in the middle of an instruction")


def _layer(entries: Mapping[str, _Entry]) -> bytes:
    # independent of clock and user. A folder is created by a whiteout of a missing entry in it: its own entry would
    # change the base's folder
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for where, content in sorted(entries.items()):
            entry = tarfile.TarInfo(where.strip("/"))
            entry.mtime = _THEN
            if content.data is None:
                if where == "/":
                    continue
                entry.name += f"/{layers.HIDDEN}crrl"
                archive.addfile(entry)
            elif content.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, content.data.decode("utf-8", "surrogateescape")
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content.data), content.mode
                archive.addfile(entry, io.BytesIO(content.data))
    return buffer.getvalue()


def _state(folder: Path) -> str:
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*")):
            kind = path.lstat().st_mode
            data = str(path.readlink()).encode() if stat.S_ISLNK(kind) else path.read_bytes() if path.is_file() else b""
            fields = [str(path.relative_to(folder)), stat.S_IFMT(kind), kind & 0o111, hashlib.sha256(data).hexdigest()]
            digest.update(json.dumps(fields).encode())
    except OSError as error:
        raise TaskError(f"{folder} cannot be read: {error}", fix="check its permissions") from error
    return digest.hexdigest()[:16]
