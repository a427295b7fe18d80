"""A pipeline: stages in a chain, as a file says, each a command that anybody could type. `pipeline_run` starts it.

A stage begins with the policy that the last one before it trained, unless it names another, and has a run folder of its
own, PIPELINE/STAGE (of an evaluation PIPELINE/STAGE/POLICY, for each policy that it measures).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from coderepairrl import config as configs
from coderepairrl.assembly.imitation import OF_ATTEMPTS
from coderepairrl.assembly.tasks import COLLECTED
from coderepairrl.config import Config
from coderepairrl.config.sections.base import Section
from coderepairrl.errors import CodeRepairError, ConfigError, several
from coderepairrl.learn.settings import OF_SAMPLES
from coderepairrl.registry import nearest
from coderepairrl.runs import examples
from coderepairrl.stages import evaluation, probe
from coderepairrl.stages.jobs import State, state_of

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Kind = Literal["probe", "collect", "sft", "rl", "eval"]
KINDS: tuple[Kind, ...] = ("probe", "collect", "sft", "rl", "eval")
TRAIN: tuple[Kind, ...] = ("sft", "rl")
"""The kinds of stages that make a policy."""
BASE = "base"
"""What the policy is called with which the pipeline begins."""
_OWN = {
    "run.name": "a stage is called as its table",
    "run.dir": "dir in [pipeline] says where stages lie",
    "model.path": 'policy = "..." says what a stage begins with, and the settings of the pipeline say it for all',
    "model.init": "only the policy that the pipeline begins with can be drawn at random: set it in [pipeline]",
    "data.paths": 'examples = ["..."] says what is learned from',
}
"""Settings that are not a stage's to make."""
_ONLY = {"examples": ("sft",), "policies": ("eval",), "preset": ("eval",), "anyway": ("probe",)}
"""Keys that mean something to some kinds alone."""
_LAST: dict[Kind, str] = {"probe": probe.VERDICT, "collect": examples.NAME}
"""What a command writes once its log has ended."""
_NOT_OF_SFT = (*OF_ATTEMPTS, *(f"train.{name}" for name in OF_SAMPLES))
"""Settings that `crrl sft` refuses, since it learns from no attempts: what is said of them in common is for others."""
PORT, PYTHON = "{port}", "{python}"


class Header(Section):
    """``[pipeline]``: what all stages have in common."""

    name: str = Field(pattern=_NAME)
    """Its folder below `dir`."""
    config: str
    """A shipped config, or a TOML file (beside this one, or from the current folder): what all stages begin with."""
    dir: str = "pipelines"
    """Where pipelines live."""
    set: tuple[str, ...] = ()
    """Settings of every stage, as they would stand on the command line."""


class StageFile(Section):
    """``[stages.NAME]``: a stage. They run in the order of the file."""

    kind: Kind | None = None
    """What it does; not needed where its name says it."""
    about: str = ""
    """For the table."""
    set: tuple[str, ...] = ()
    """Its settings."""
    policy: str = ""
    """What it begins with, or whose attempts are collected: a stage that trains, `base`, or any policy of `crrl eval`;
    empty is what the last stage before it has trained, else `base`."""
    serve: str = ""
    """A command that serves the policy while the stage runs. ``{port}`` in it and in `policy` is a free port of this
    machine, ``{python}`` the Python that runs `crrl`."""
    examples: tuple[str, ...] = ()
    """Of `sft`: stages that collect, runs, and files of examples; empty is all that was collected before it."""
    policies: tuple[str, ...] = ()
    """Of `eval`: as `policy`, each, or a stage that collects, for the policy that it collects from; empty is `base`,
    if that has weights, and what each stage before it has trained."""
    preset: str = ""
    """Of `eval`: how it samples, and what it may spend."""
    anyway: bool = False
    """Of `probe`: go on after a no-go."""


class File(Section):
    """A whole pipeline file."""

    pipeline: Header
    stages: dict[Annotated[str, Field(pattern=_NAME)], StageFile] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Policy:
    """Who acts in a stage, or what it begins to train."""

    name: str
    """As the file calls it: a stage, `base`, or a path or URL."""
    path: str
    """A model as commands take it; with ``{port}`` where it is served for the stage alone."""
    stage: str = ""
    """The stage that trained it."""
    serve: str = ""

    def at(self, port: int) -> str:
        """`path`, served at `port`."""
        return self.path.replace(PORT, str(port))


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the pipeline: a stage, or one policy's part of an evaluation."""

    name: str
    """Its folder below that of the pipeline."""
    stage: str
    kind: Kind
    folder: Path
    source: str
    """The configuration that it begins with."""
    given: tuple[str, ...]
    """Settings, but for those that say where it lies and what it begins with."""
    policy: Policy
    examples: tuple[Path, ...] = ()
    needs: frozenset[str] = frozenset()
    """The stages whose outputs it reads."""
    preset: str = ""
    anyway: bool = False

    @property
    def record(self) -> Path:
        """What it was made by."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return self.name

    def overrides(self, policy: str) -> tuple[str, ...]:
        """All settings of a stage that trains, beginning with `policy`."""
        model = [f"model.path={json.dumps(policy)}"] if policy else []
        model += ["model.init=weights"] if self.policy.stage else []
        data = [f"data.paths={json.dumps([str(each) for each in self.examples])}"] if self.kind == "sft" else []
        before = ["eval.before=false", "eval.after=false"]  # its evaluation is a stage of its own
        before += self._not_of_sft() if self.kind == "sft" else []
        return (*before, *self.given, *model, *data, f"run.name={self.folder.name}", f"run.dir={self.folder.parent}")

    def _not_of_sft(self) -> list[str]:
        """Settings that take back what the common configuration says of attempts, of which there are none."""
        found, base = ["train.algorithm=sft"], configs.load(self.source, [f"run.name={self.name}"])
        for key in _NOT_OF_SFT:
            section, _, name = key.partition(".")
            there = getattr(base, section)
            value, default = getattr(there, name), type(there).model_fields[name].get_default(call_default_factory=True)
            if value == default:
                continue
            if default is not None:
                plain = default.model_dump() if isinstance(default, BaseModel) else default
                found.append(f"{key}={configs.inline(plain)}")
            elif isinstance(value, BaseModel):
                found.append(f"{key}=false")
        return found

    def words(self, port: int = 0) -> tuple[str, ...]:
        """The command after ``crrl``, without ``--resume``; what is served for it is at `port`."""
        policy = self.policy.at(port)
        if self.kind in TRAIN:
            return "train" if self.kind == "rl" else "sft", self.source, *self.overrides(policy)
        more = ("--anyway",) if self.kind == "probe" else ("--preset", self.preset) if self.preset else ()
        return self.kind, self.source, *self.given, "--policy", policy, *more, "-o", str(self.folder)

    def config(self, policy: str | None = None) -> Config:
        """Its settings, with `policy` in place of its own. Raises `ConfigError`."""
        if self.kind in TRAIN:
            return configs.load(self.source, self.overrides(self.policy.path if policy is None else policy))
        preset = evaluation.PRESETS[self.preset] if self.preset else ()
        return configs.load(self.source, [f"run.name={self.kind}", *preset, *self.given])

    def state(self) -> State:
        """How far it is, by its log and by what is made of that at its end. Raises what `state_of` raises."""
        state = state_of(self.folder, (lambda: self.config().run.steps) if self.kind == "rl" else None)
        last = self.folder / _LAST.get(self.kind, "log.jsonl")
        return "begun" if state == "done" and not last.exists() else state


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline file, read and checked."""

    named: str
    """As it was asked for: a path."""
    path: Path
    file: File
    base: Config
    """The settings of all stages."""
    steps: tuple[Step, ...] = field(default=())

    @property
    def folder(self) -> Path:
        """Where its stages are."""
        return Path(self.file.pipeline.dir) / self.file.pipeline.name

    def kind(self, stage: str) -> Kind:
        """What a stage does."""
        return kind_of(stage, self.file.stages[stage])


def kind_of(name: str, stage: StageFile) -> Kind:
    """What the stage `name` does. Raises `ConfigError` where neither key nor name say it."""
    if stage.kind is not None:
        return stage.kind
    if name in KINDS:
        return name
    raise ConfigError(f"stages.{name} says nothing of its kind", fix=f'kind = "{" | ".join(KINDS)}"')


def read(source: str, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline in the file `source`, with ``STAGE.KEY=VALUE`` overrides: keys of the stage, or settings of its
    command.

    Raises `ConfigError`, or `Several` with everything that is wrong with the file and between its stages; what is wrong
    with each stage by itself `pipeline_run.check` says.
    """
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"there is no pipeline {source}",
            fix="name a TOML file with stages; examples/pipeline/ in the repository has some, and "
            "docs/guides/pipeline.md every key",
        )
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", fix="the file must be readable TOML") from None
    _override(data, overrides)
    try:
        file = File.model_validate(data)
    except ValidationError as error:
        raise several([_mistake(path, dict(each)) for each in error.errors()]) from None
    problems = list[CodeRepairError]()
    problems += _settings("pipeline", file.pipeline.set)
    for name, stage in file.stages.items():
        problems += _settings(f"stages.{name}", stage.set)
    beside = path.parent / file.pipeline.config
    config = str(beside) if beside.suffix == ".toml" and beside.is_file() else file.pipeline.config
    try:
        base = configs.load(config, [f"run.name={file.pipeline.name}", *([] if problems else file.pipeline.set)])
    except CodeRepairError as error:
        raise several([*problems, error]) from None
    made = Pipeline(source, path, file, base)
    steps = _Chain(made, config).steps(problems)
    if problems:
        raise several(problems)
    return Pipeline(source, path, file, base, tuple(steps))


def _override(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``STAGE.KEY=VALUE`` to a file's `data`, later ones over earlier ones."""
    for text in overrides:
        key, value = configs.parse_override(text, "write STAGE.KEY=VALUE: rl.train.lr=3e-6, say")
        where, _, rest = key.partition(".")
        stages = data.get("stages", {})
        section = data.get("pipeline") if where == "pipeline" else stages.get(where)
        if not isinstance(section, dict) or not rest:
            fix = nearest(where, [*stages, "pipeline"]) if rest else "write STAGE.KEY=VALUE: rl.train.lr=3e-6, say"
            raise ConfigError(f"override {text!r}: there is no stage {where!r}", fix=fix)
        if rest in (Header if where == "pipeline" else StageFile).model_fields:
            section[rest] = value
        else:
            section["set"] = [*section.get("set", ()), f"{rest}={text.partition('=')[2]}"]


def _mistake(path: Path, error: Mapping[str, Any]) -> CodeRepairError:
    place = [str(each) for each in error["loc"]]
    where = ".".join(place)
    if error["type"] != "extra_forbidden":
        return ConfigError(f"{path}: {where}: {error['msg']}", fix="docs/guides/pipeline.md has every key")
    sections: dict[str, type[Section]] = {"pipeline": Header, "stages": StageFile}
    known = sections.get(place[0] if place[1:] else "", File).model_fields
    return ConfigError(f"{path}: unknown key {where!r}", fix=nearest(place[-1], known))


def _settings(where: str, given: Sequence[str]) -> list[CodeRepairError]:
    found = list[CodeRepairError]()
    for each in given:
        try:
            key, _ = configs.parse_override(each)
        except ConfigError as error:
            found.append(ConfigError(f"{where}: {error}", fix=error.fix))
            continue
        if key in _OWN and not (where == "pipeline" and key.startswith("model.")):
            found.append(ConfigError(f"{where}: {key} is the pipeline's own", fix=_OWN[key]))
    return found


class _Chain:
    """Goes through the stages in their order, and knows at each what came before."""

    def __init__(self, pipeline: Pipeline, config: str) -> None:
        self.file, self.folder, self.config, self.base = pipeline.file, pipeline.folder, config, pipeline.base
        self.kinds: dict[str, Kind] = {}
        """Of the stages so far."""
        self.acted: dict[str, Policy] = {}
        """Whom the stages so far collect from."""

    def steps(self, problems: list[CodeRepairError]) -> list[Step]:
        """The commands; `problems` gets what makes no sense between stages."""
        found = list[Step]()
        for name, stage in self.file.stages.items():
            try:
                kind = kind_of(name, stage)
                for key, kinds in _ONLY.items():
                    if getattr(stage, key) and kind not in kinds:
                        fix = f"leave it out, or make it a stage of kind {kinds[0]}"
                        raise ConfigError(f"stages.{name}.{key} means nothing to a stage of kind {kind}", fix=fix)
                found += self._stage(name, kind, stage)
                self.kinds[name] = kind
            except CodeRepairError as error:
                problems.append(error)
                if stage.kind or name in KINDS:  # what follows is checked as if it were right
                    self.kinds[name] = kind_of(name, stage)
        return found

    def _stage(self, name: str, kind: Kind, stage: StageFile) -> list[Step]:
        if kind == "eval":
            if stage.preset and stage.preset not in evaluation.PRESETS:
                raise ConfigError(
                    f"stages.{name}: there is no preset {stage.preset!r}",
                    fix=nearest(stage.preset, evaluation.PRESETS),
                )
            if stage.policy:
                raise ConfigError(f"stages.{name} is of kind eval", fix=f'policies = ["{stage.policy}"]')
            measured = stage.policies or self._trained()
            if not measured:
                raise ConfigError(f"stages.{name} has no policy to measure", fix='policies = ["..."]')
            policies = [self._policy(name, kind, each, stage.serve) for each in measured]
            labels = [_label(each) for each in measured]
            if twice := next((label for label in labels if labels.count(label) > 1), None):
                raise ConfigError(f"stages.{name}.policies has two that are called {twice}", fix="name each once")
            return [
                self._step(f"{name}/{label}", name, kind, stage, policy, preset=stage.preset)
                for label, policy in zip(labels, policies, strict=True)
            ]
        policy = self._policy(name, kind, stage.policy or self._newest(), stage.serve)
        self.acted |= {name: policy} if kind == "collect" else {}
        learned = [self._examples(name, each) for each in stage.examples or self._of("collect")]
        if kind == "sft" and not learned:
            raise ConfigError(
                f"stages.{name} has nothing to learn from",
                fix='a stage of kind collect before it, or examples = ["runs/NAME"]',
            )
        return [self._step(name, name, kind, stage, policy, learned if kind == "sft" else (), anyway=stage.anyway)]

    def _step(
        self,
        name: str,
        stage: str,
        kind: Kind,
        own: StageFile,
        policy: Policy,
        examples: Sequence[tuple[Path, str]] = (),
        **more: Any,
    ) -> Step:
        given = (*self._common(kind, policy), *own.set)
        needs = frozenset({policy.stage, *(stage for _, stage in examples)} - {""})
        paths = tuple(path for path, _ in examples)
        return Step(name, stage, kind, self.folder / name, self.config, given, policy, paths, needs, **more)

    def _common(self, kind: Kind, policy: Policy) -> list[str]:
        """The settings of all stages for which the command of one has a use. What is said there of evaluations is said
        of those on held-out tasks."""
        given = list(self.file.pipeline.set)
        if "collect" in (kind, *self.kinds.values()) and kind != "eval" and self.base.tasks.holdout is None:
            given.append(f"tasks.holdout={COLLECTED}")  # what is learned from is not trained on once more
        if kind == "sft":
            of_attempts = tuple(f"{key}." for key in _NOT_OF_SFT)
            return [each for each in given if not f"{each.partition('=')[0].strip()}.".startswith(of_attempts)]
        if kind == "rl":
            return given
        used = {*evaluation.USE.used, *(["keep"] if kind == "collect" else [])}
        used -= {*([] if kind == "eval" else ["eval"]), *(["model"] if "://" in policy.path else [])}
        keys = {each: each.partition("=")[0].strip() for each in given}
        own = ("model.path", "model.init")  # of the policy that the pipeline begins with
        kept = [each for each, key in keys.items() if key.partition(".")[0] in used and key not in own]
        return [*(evaluation.COLLECTING if kind == "collect" else ()), *kept]

    def _of(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def _newest(self) -> str:
        return next(reversed(self._of(*TRAIN)), BASE)

    def _trained(self) -> list[str]:
        return [*([BASE] if self.base.model.init == "weights" else []), *self._of(*TRAIN)]

    def _policy(self, stage: str, kind: Kind, name: str, serve: str) -> Policy:
        if serve and not (PORT in serve and (PORT in name or kind == "eval")):
            raise ConfigError(
                f"stages.{stage}: serve needs {PORT} in the command and in the policy",
                fix='policy = "http://127.0.0.1:{port}/v1"',
            )
        if name == BASE:
            if self.base.model.init == "random" and kind not in TRAIN:
                raise ConfigError(
                    f"stages.{stage}: the pipeline begins with random weights, which can do nothing",
                    fix='a stage that trains before it, or policy = "..."',
                )
            return Policy(BASE, self.base.model.path)
        if name in self.kinds:
            if kind == "eval" and self.kinds[name] == "collect":
                if name not in self.acted:
                    raise ConfigError(f"stages.{stage}: whom {name} collects from is not known", fix="see above")
                return self.acted[name]
            if self.kinds[name] not in TRAIN:
                raise ConfigError(f"stages.{stage}: stage {name} trains no policy", fix="name one of kind sft or rl")
            return Policy(name, str(self.folder / name), stage=name)
        if name in self.file.stages:
            raise ConfigError(f"stages.{stage}: stage {name} comes later, or is itself", fix="put it before")
        url = name.startswith(("http://", "https://"))
        if url and kind in TRAIN:
            raise ConfigError(f"stages.{stage} cannot train what is behind a URL", fix="name a model folder")
        if PORT in name and not serve:
            raise ConfigError(f"stages.{stage}: nothing serves {name}", fix='serve = "... --port {port}"')
        return Policy(name, name, serve=serve if PORT in name else "")

    def _examples(self, stage: str, name: str) -> tuple[Path, str]:
        """Where examples are, and the stage that collects them."""
        if name in self.kinds:
            if self.kinds[name] != "collect":
                raise ConfigError(f"stages.{stage}: stage {name} collects nothing", fix="name one of kind collect")
            return self.folder / name, name
        if name in self.file.stages:
            raise ConfigError(f"stages.{stage}: stage {name} comes later, or is itself", fix="put it before")
        if not Path(name).exists():
            raise ConfigError(f"stages.{stage}: there are no examples {name}", fix=nearest(name, self._of("collect")))
        return Path(name), ""


def _label(policy: str) -> str:
    """What the folder of a policy's evaluation is called.

    >>> _label("sft"), _label("http://127.0.0.1:{port}/v1"), _label("runs/mine"), _label("builtin:tiny")
    ('sft', 'http-127-0-0-1-port-v1', 'mine', 'builtin-tiny')
    """
    last = policy if "://" in policy else Path(policy).name
    return "-".join("".join(char if char.isalnum() else " " for char in last).split()) or "policy"
