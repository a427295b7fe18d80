"""Images of Dockerfiles, built without root and without a daemon.

Supported: ``FROM`` with stages (not ``scratch``), ``COPY`` and ``ADD`` of files, ``COPY --from``, ``RUN``, ``SHELL``,
``WORKDIR``, ``ENV``, ``ARG``, ``USER``, here-documents. ``CMD``, ``ENTRYPOINT`` and descriptions are ignored. Commands
run in a sandbox (`commands`), except ``RUN rm -rf`` of absolute paths, which needs no unpacked image. All files belong
to one user: one line of the log says which lines would change owners.

``PATCH FILE``, our extension, patches the working folder at the end and makes the result its repository's only commit.

Source: docs.docker.com/reference/dockerfile, as of 2025.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.environments import fetch, layers
from coderepairrl.environments.commands import BuildCommand, BuildCopy, LayerBuilder, match_files
from coderepairrl.environments.fetch import Say
from coderepairrl.environments.manifests import ARCHITECTURE, FoundImage, Reference, digest_bytes
from coderepairrl.errors import TaskError
from coderepairrl.sandbox.rootfs import PATH

TRANSPORT = "dockerfile"
NAME = "Dockerfile"
_LEFT_OUT = {"CMD", "ENTRYPOINT", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
_SHELL = ("/bin/sh", "-c")
# the start of a here-document: `<<NAME`, `<<-NAME` or `<<"NAME"`, perhaps after the number of a descriptor
_HERE = re.compile(r"(?<!\S)\d?<<(?P<dash>-?)(?P<quote>[\"']?)(?P<name>[A-Za-z_][\w.-]*)(?P=quote)(?!\S)")
# an option of an instruction: `--name=value` or `--name`
_OPTION = re.compile(r"--([\w-]+)(?:=(\S+))?\s+")
# `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`, and `\$`, a plain dollar sign
_VARIABLE = re.compile(r"\\(?P<plain>\$)|\$(?:\{(?P<braced>\w+)(?:(?P<how>:[-+])(?P<word>[^}]*))?\}|(?P<bare>\w+))")
# `rm -rf` of absolute paths without patterns, and nothing else
_REMOVE = re.compile(r"rm\s+-r?fr?\s+(?P<paths>(/[^\s;&|<>$`*?\\]+\s*)+)")
# commands that usually change owners or make devices
_OWNERS = re.compile(r"\b(chown|chgrp|mknod|setcap|useradd|adduser|apt-get|apt|dpkg|apk)\b|\binstall\s(.*\s)?-o\s")
_FIX = "name the image that it builds, prebuilt (docker_image), or take out what is not needed"


def dockerfile_image_name(folder: Path) -> str:
    """Image name, after ``image:``, of the Dockerfile in `folder` with its current files. Raises `TaskError`."""
    return f"{TRANSPORT}:{folder.absolute()}:{_digest_folder(folder)}"


def look_up_image(name: str, store: Path, offered: Path | None, *, user: int | None, work: Path) -> fetch.Offer:
    """Look up an image, or the base images of a Dockerfile, whose image is built as `user`.

    A build uses temporary folders named like `work`. Raises `TaskError`, also for a folder changed since its naming,
    and `PrerequisiteError`; getting the offer, also `SandboxFault`.
    """
    reference = Reference.parse(name)
    if reference.transport != TRANSPORT:
        return fetch.look_up_image(name, store, offered)
    _require_unchanged(reference, name)
    bases = {base: fetch.look_up_image(base, store, offered) for base in Recipe(Path(reference.name)).images}
    missing = {digest: size for base in bases.values() for digest, size in base.missing.items()}
    sizes = {digest: size for base in bases.values() for digest, size in base.layers.items()}
    get = partial(_build_image, name, bases, user, work)
    return fetch.Offer(missing, sizes, get, any(base.hub for base in bases.values()))


def _build_image(name: str, bases: Mapping[str, fetch.Offer], user: int | None, work: Path, say: Say) -> FoundImage:
    reference = Reference.parse(name)
    _require_unchanged(reference, name)
    folder = Path(reference.name)
    recipe = Recipe(folder)
    builders: dict[str, LayerBuilder] = {}
    with contextlib.ExitStack() as stack:

        def build(source: str) -> LayerBuilder:
            """Build a stage, or fetch an image."""
            if source in builders:
                return builders[source]
            stage = recipe.stages.get(source)
            base = build(stage.base).image if stage else bases[source].get(say)
            build_folder = work.with_name(f"{work.name}-{len(builders)}")
            builder = builders[source] = stack.enter_context(LayerBuilder(base, build_folder, user, say))
            if stage:
                settings = stage.interpret(base.config.get("config") or {})
                for part in stage.parts:
                    if isinstance(part, BuildCommand):
                        builder.run(part)
                    elif isinstance(part, BuildCopy):
                        builder.copy(part, build(part.origin) if part.origin else folder)
                    else:
                        builder.add(part)
                builder.image = _describe_image(builder.image, settings, stage.patches)
            return builder

        image = build(recipe.last).image
    if lines := [line for stage in recipe.stages.values() for line in stage.owners]:
        say(
            f"{folder / NAME}: all files belong to one user: no effect of owners, devices, set-id bits and extended "
            f"attributes in line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
        )
    digest = f"sha256:{image.id}"
    if reference.digest not in ("", digest):
        raise TaskError(f"{folder} builds a different image here than {name}: {digest}", fix="read its tasks again")
    pinned = f"{TRANSPORT}:{folder}:{reference.tag}@{digest}"
    return replace(image, name=name, pinned=pinned, digests={"asked": digest})


def _describe_image(built: FoundImage, settings: Mapping[str, Any], patches: list[bytes]) -> FoundImage:
    fields = {key: built.config[key] for key in ("os", "architecture", "variant") if key in built.config}
    config: dict[str, Any] = fields | {
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in built.layers]},
    }
    if patches:  # they are not a layer, but make a different image
        config["patches"] = [digest_bytes(patch) for patch in patches]
    digest = digest_bytes(json.dumps(config, sort_keys=True).encode())
    return replace(built, id=digest.removeprefix("sha256:"), config=config, patches=tuple(patches))


def _require_unchanged(reference: Reference, name: str) -> None:
    folder = Path(reference.name)
    if _digest_folder(folder) != reference.tag:
        raise TaskError(f"{folder} has changed since {name} was named", fix="read its tasks again")


class _Document(NamedTuple):
    """A here-document: its text, and its `raw` lines with the closing one; `literal` if its name is quoted."""

    name: str
    text: str
    raw: str
    literal: bool


class _Step(NamedTuple):
    where: str
    """File and line."""
    line: int
    instruction: str
    rest: str
    documents: list[_Document]


class Recipe:
    """The Dockerfile in `folder`, which needs `images`. Raises `TaskError` with file, line and instruction."""

    def __init__(self, folder: Path) -> None:
        if (folder / ".dockerignore").exists():
            raise TaskError(f"{folder} has a .dockerignore, which is not read", fix="remove what it leaves out")
        machine = {"OS": "linux", "ARCH": ARCHITECTURE, "PLATFORM": f"linux/{ARCHITECTURE}"}
        declared = {f"{prefix}{name}": value for prefix in ("TARGET", "BUILD") for name, value in machine.items()}
        self.stages: dict[str, Stage] = {}
        """By name: ``#`` and number."""
        self.last = ""
        names: dict[str, str] = {}
        for step in _read_steps(folder / NAME):
            if step.instruction == "FROM":
                stage = Stage(folder, step, declared, names, self.stages)
                self.last = f"#{len(self.stages)}"
                names |= {str(len(self.stages)): self.last} | ({stage.name: self.last} if stage.name else {})
                self.stages[self.last] = stage
            elif self.stages:
                self.stages[self.last].add(step)
            elif step.instruction == "ARG":
                declared |= _parse_arg_values(step, declared, declared)
            else:
                raise _make_dockerfile_error(step, f"{step.instruction} before FROM")
        if not self.stages:
            raise TaskError(f"{folder / NAME}, line 1: no FROM", fix=_FIX)
        for stage in self.stages.values():  # report errors before fetching anything
            stage.interpret({})
        needed = [self.last]
        for name in needed:  # which grows meanwhile
            if name in self.stages:
                needed += [each for each in self.stages[name].needs if each not in needed]
        self.stages = {name: stage for name, stage in self.stages.items() if name in needed}
        self.images = [name for name in needed if name not in self.stages]


class Stage:
    """A stage of the Dockerfile in `folder`, which begins with `step`, a ``FROM``.

    `declared` holds arguments above it, `names` keys of earlier `stages`.
    """

    def __init__(
        self,
        folder: Path,
        step: _Step,
        declared: Mapping[str, str],
        names: Mapping[str, str],
        stages: Mapping[str, Stage],
    ) -> None:
        self.folder, self._declared, self._names = folder, dict(declared), dict(names)
        words = _split_words(step, step.rest, declared)
        words = [word for word in words if not word.startswith("--platform=")]  # IMAGE, or IMAGE AS NAME
        self.name = words[2].lower() if len(words) == 3 and words[1].lower() == "as" else ""
        if len(words) != (3 if self.name else 1) or words[0].startswith("-") or words[0] in ("", "scratch"):
            raise _make_dockerfile_error(step, f"FROM {step.rest}")
        self.base = names.get(words[0].lower(), words[0])
        self._base_stage = stages.get(self.base)
        self._steps: list[_Step] = []

    def add(self, step: _Step) -> None:
        """Add an instruction."""
        if hasattr(self, f"_interpret_{step.instruction.lower()}"):
            self._steps.append(step)
        elif step.instruction not in _LEFT_OUT:
            raise _make_dockerfile_error(step, f"{step.instruction} is not understood")

    def interpret(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Fill `parts` for the base's `settings` (``Env``, ``WorkingDir``, ``User``); returns the new settings."""
        self.parts: list[BuildCommand | BuildCopy | bytes] = []
        """Layers above the base, in order."""
        self.patches: list[bytes] = []
        self.owners: list[int] = []
        """Lines that would make files of other owners, or devices."""
        self._shell: tuple[str, ...] = _SHELL
        self._env = dict(pair.partition("=")[::2] for pair in settings.get("Env") or ())
        self._env.setdefault("PATH", PATH)
        self._workdir = str(settings.get("WorkingDir") or "/")
        self._user = str(settings.get("User") or "")
        self._arguments: dict[str, str] = dict(self._base_stage._arguments) if self._base_stage else {}
        for step in self._steps:
            getattr(self, f"_interpret_{step.instruction.lower()}")(step)
        inherited = {key: value for key, value in settings.items() if key not in ("Cmd", "Entrypoint", "OnBuild")}
        env = [f"{name}={value}" for name, value in self._env.items()]
        return inherited | {"Env": env, "WorkingDir": self._workdir, "User": self._user}

    @property
    def needs(self) -> list[str]:
        """Stages and images that it is made of."""
        origins = [part.origin for part in self.parts if isinstance(part, BuildCopy) and part.origin]
        return [self.base, *origins]

    def _interpret_arg(self, step: _Step) -> None:
        self._arguments |= _parse_arg_values(step, self._variables, self._declared)

    def _interpret_env(self, step: _Step) -> None:
        if "=" not in step.rest.split(None, 1)[0]:
            name, _, value = step.rest.partition(" ")
            self._env[name] = _expand(value.strip(), self._variables)
            return
        words = _split_words(step, step.rest, self._variables)
        self._env |= dict(word.partition("=")[::2] for word in words)

    def _interpret_workdir(self, step: _Step) -> None:
        self._workdir = self._resolve_path(_expand(step.rest, self._variables))
        self.parts.append(BuildCopy((), f"{self._workdir}/", step.where))

    def _interpret_user(self, step: _Step) -> None:
        self._user = _expand(step.rest, self._variables)

    def _interpret_shell(self, step: _Step) -> None:
        if (words := _parse_json_list(step.rest)) is None:
            raise _make_dockerfile_error(step, f"SHELL {step.rest}")
        self._shell = tuple(words)

    def _interpret_run(self, step: _Step) -> None:
        options, command = _split_options(step.rest)
        network = True
        for name, value in options:
            if (name, value) in (("network", "none"), ("network", "default")):
                network = value != "none"
            elif name != "mount" or "type=cache" not in value.split(","):  # a cache only saves time
                raise _make_dockerfile_error(step, f"RUN --{name}={value}")
        if step.documents and _HERE.fullmatch(command):
            command = step.documents[0].text
            if command.startswith("#!"):
                raise _make_dockerfile_error(step, "RUN of a here-document for a program other than the shell")
        else:
            command = "\n".join([command, *(document.raw for document in step.documents)])
        if self._shell == _SHELL and (match := _REMOVE.fullmatch(command.strip())):
            self.parts.append(_hide_files([self._resolve_path(path) for path in match["paths"].split()]))
            return
        if _OWNERS.search(command):
            self.owners.append(step.line)
        words = _parse_json_list(command)
        argv = (*self._shell, command) if words is None else tuple(words)
        env = tuple(sorted(self._variables.items()))
        self.parts.append(BuildCommand(argv, env, self._workdir, self._user, network, step.where))

    def _interpret_patch(self, step: _Step) -> None:
        self.patches += [path.read_bytes() for _, path in match_files(self.folder, step.rest, step.where)]

    def _interpret_copy(self, step: _Step) -> None:
        options, rest = _split_options(step.rest)
        mode, origin = None, ""
        for name, value in options:
            if name == "chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                mode = int(value, 8)
            elif name == "from" and value:
                value = _expand(value, self._variables)
                origin = self._names.get(value.lower(), value)
            elif name == "chown":
                self.owners.append(step.line)
            elif name != "link":
                raise _make_dockerfile_error(step, f"COPY --{name}={value}")
        words = _parse_json_list(rest) or _split_words(step, rest, self._variables)
        if len(words) < 2:
            raise _make_dockerfile_error(step, f"COPY {rest}")
        *sources, target = words
        names = tuple(name for name in sources if not name.startswith("<<"))
        texts = tuple(
            (each.name, each.text if each.literal else _expand(each.text, self._variables)) for each in step.documents
        )
        for name in names if not origin else ():
            match_files(self.folder, name, step.where)
        path = self._resolve_path(target).rstrip("/")
        # the root and the working folder are known to be folders
        path += "/" if target.endswith("/") or path in ("", self._workdir.rstrip("/")) else ""
        self.parts.append(BuildCopy(names, path, step.where, mode, origin, texts))

    def _interpret_add(self, step: _Step) -> None:
        if re.search(r"(^|\s|\")(https?|git|ssh)(://|@)|\.git\b", step.rest):
            raise _make_dockerfile_error(step, f"ADD {step.rest}: nothing is fetched")
        if re.search(r"\.(tar|tgz|tar\.\w+|tbz2?|txz)\b", step.rest):
            raise _make_dockerfile_error(step, f"ADD {step.rest}: archives are not unpacked")
        self._interpret_copy(step)

    def _resolve_path(self, path: str) -> str:
        resolved: list[str] = []
        for part in f"{'' if path.startswith('/') else self._workdir}/{path}".split("/"):
            if part == "..":
                del resolved[-1:]
            elif part not in ("", "."):
                resolved.append(part)
        return "/" + "/".join(resolved)

    @property
    def _variables(self) -> dict[str, str]:
        return self._arguments | self._env


def _make_dockerfile_error(step: _Step, problem: str) -> TaskError:
    shortened = problem if len(problem) <= 200 else f"{problem[:200]}..."
    return TaskError(f"{step.where}: {shortened}", fix=_FIX)


def _parse_arg_values(step: _Step, variables: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    words = [word.partition("=") for word in _split_words(step, step.rest, variables)]
    return {name: value if separator else declared.get(name, "") for name, separator, value in words}


def _split_words(step: _Step, text: str, variables: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(_expand(text, variables))
    except ValueError as error:
        raise _make_dockerfile_error(step, f"{text}: {error}") from None


def _split_options(text: str) -> tuple[list[tuple[str, str]], str]:
    options = []
    while option := _OPTION.match(text):
        options.append((option[1], option[2] or ""))
        text = text[option.end() :]
    return options, text


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match["plain"]:
            return "$"
        setting = variables.get(match["braced"] or match["bare"], "")
        if match["how"] == ":-":
            return setting or match["word"]
        if match["how"] == ":+":
            return match["word"] if setting else ""
        return setting

    return _VARIABLE.sub(value, text)


def _parse_json_list(text: str) -> list[str] | None:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def _read_steps(path: Path) -> Iterator[_Step]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", fix="write a Dockerfile in UTF-8") from error
    joined, first = "", 0
    numbered = iter(enumerate(lines, start=1))
    for number, line in numbered:
        if re.match(r"#\s*escape\s*=", line) and not joined:
            raise TaskError(f"{path}, line {number}: an escape character other than a backslash")
        if line.lstrip().startswith("#") or not line.strip():
            continue
        first = first or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1]
            continue
        instruction, _, rest = (joined + line).strip().partition(" ")
        starts = _HERE.finditer(rest) if instruction.upper() in ("RUN", "COPY", "ADD") else ()
        documents = [_read_document(path, start, (text for _, text in numbered)) for start in starts]
        yield _Step(f"{path}, line {first}", first, instruction.upper(), rest.strip(), documents)
        joined, first = "", 0
    if joined:
        raise TaskError(f"{path}: it ends in the middle of an instruction")


def _read_document(path: Path, start: re.Match[str], lines: Iterator[str]) -> _Document:
    text = raw = ""
    for line in lines:
        raw += line
        line = line.lstrip("\t") if start["dash"] else line
        if line == start["name"]:
            return _Document(start["name"], text, raw, bool(start["quote"]))
        raw, text = f"{raw}\n", f"{text}{line}\n"
    raise TaskError(f"{path}: it ends in the here-document {start['name']}")


def _hide_files(paths: list[str]) -> bytes:
    # a layer of whiteouts
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder, _, name in (path.rpartition("/") for path in sorted(paths)):
            archive.addfile(tarfile.TarInfo(f"{folder}/{layers.HIDDEN}{name}".lstrip("/")))
    return buffer.getvalue()


def _digest_folder(folder: Path) -> str:
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
