"""A study: a grid of arms and seeds, as a file says, and what of it has been run. Starting it is `study_run`'s.

Every run of it is a `crrl train` or `crrl eval` that anybody could type, in STUDY/ARM/seed-N and STUDY/ARM/seed-N-eval.
What is done is read from these folders, so there is no other state that a crash could leave behind.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.assembly.numerics import resolved
from coderepairrl.config import Config
from coderepairrl.config.sections.base import Section
from coderepairrl.errors import CodeRepairError, ConfigError, several
from coderepairrl.registry import nearest
from coderepairrl.report.study import Question
from coderepairrl.report.verdict import Table
from coderepairrl.runs import RunFolder
from coderepairrl.stages import evaluation
from coderepairrl.stages.jobs import State, flat, state_of

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_ELSEWHERE = ("run.name", "run.dir", "model.path", "train.learner", "train.devices")
"""Settings that a run may have other than its study: where it lies, a policy that is pinned to a checkpoint, and where
it learns, which changes no bit of it."""


class Header(Section):
    """``[study]``: what all arms have in common."""

    name: str = Field(pattern=_NAME)
    """Folder of the study below `dir`."""
    config: str
    """A shipped config, or a TOML file (beside this one, or from the current folder)."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Each arm is run once for each, as ``run.seed``."""
    dir: str = "studies"
    """Where studies live."""
    set: tuple[str, ...] = ()
    """Settings of every arm, as they would stand on the command line."""
    at_evaluation: tuple[str, ...] = ()
    """Settings of every arm's evaluation alone."""
    preset: str = ""
    """Of `crrl eval`: how evaluations sample, and what they may spend."""
    metric: str = "resolved"
    """What questions are about that name no other: as for `crrl compare`."""
    baseline: str = ""
    """The arm that the others are compared with, where there are no questions; empty is the first."""
    learner: Literal["own", "shared"] = "own"
    """Who trains: a learner of each run, or one that the study starts, which has the frozen model once for all."""


class ArmFile(Section):
    """``[arms.NAME]``: one way to train, or to evaluate what another arm trained."""

    about: str = ""
    """For the table."""
    set: tuple[str, ...] = ()
    """Its settings, of training and of evaluation."""
    at_evaluation: tuple[str, ...] = ()
    """Those of its evaluation alone."""
    policy: str = ""
    """Nothing is trained: the arm whose policies are evaluated, seed by seed, or any policy of `crrl eval`."""


class QuestionFile(Section):
    """``[questions.NAME]``: what is asked of which arms."""

    asks: str = ""
    arms: tuple[str, ...] = Field(min_length=2)
    """The first is the baseline of the others."""
    metric: str = ""
    """Empty: that of the study."""
    evaluation: str = "eval"
    """One of the evaluations: ``eval``, or a name in ``eval.also``."""


class File(Section):
    """A whole study file."""

    study: Header
    arms: dict[Annotated[str, Field(pattern=_NAME)], ArmFile] = Field(min_length=1)
    questions: dict[str, QuestionFile] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the training, or the evaluation, of an arm with a seed."""

    kind: Literal["train", "eval"]
    arm: str
    seed: int
    folder: Path
    words: tuple[str, ...]
    """The command after ``crrl``, without ``--resume``."""
    source: str
    """The configuration that it begins with."""
    overrides: tuple[str, ...]
    policy: str = ""
    """What is evaluated."""
    joins: tuple[str, ...] = ()
    """Further settings, with which it joins the learner of its study."""

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}: {'training' if self.kind == 'train' else 'evaluation'}"

    def config(self) -> Config:
        """Its settings. Raises `ConfigError`."""
        return configs.load(self.source, (*self.overrides, *self.joins))

    def alone(self) -> Config:
        """Its settings if it had a learner of its own. Raises `ConfigError`."""
        return configs.load(self.source, self.overrides)

    def state(self) -> State:
        """How far it is, by its log. Raises what `state_of` raises."""
        return state_of(self.folder, (lambda: self.alone().run.steps) if self.kind == "train" else None)

    def changed(self) -> list[str]:
        """How what was run in its folder differs from what the study says now."""
        made = RunFolder(self.folder)
        expected = self.config() if self.kind == "eval" else resolved(self.config())
        old, new = (flat(each.model_dump(mode="json")) for each in (configs.load(made.config), expected))
        differ = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and key not in _ELSEWHERE]
        found = [f"{key} {old.get(key)} then, {new.get(key)} now" for key in differ]
        if self.kind == "eval" and (now := _pinned(self.policy)) != (then := made.about().get("policy")):
            found.append(f"policy {then} then, {now} now")
        return found


@dataclass(frozen=True, slots=True)
class Study:
    """A study file, read and checked."""

    named: str
    """As it was asked for: a path, or a shipped study's name."""
    path: Path
    file: File

    @property
    def folder(self) -> Path:
        """Where its runs are."""
        return Path(self.file.study.dir) / self.file.study.name

    @property
    def learner_address(self) -> Path:
        """Where its trainings join the learner that they share; the log of that is beside it."""
        return self.folder / ".server" / "learner"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The replicates."""
        return self.file.study.seeds

    @property
    def questions(self) -> list[Question]:
        """What is asked; where the file says nothing, how each arm differs from the baseline."""
        header, arms = self.file.study, list(self.file.arms)
        if not self.file.questions:
            first = header.baseline or arms[0]
            others = [arm for arm in arms if arm != first]
            return [Question(header.name, "", (first, *others), header.metric, "eval")]
        return [
            Question(name, each.asks, each.arms, each.metric or header.metric, each.evaluation)
            for name, each in self.file.questions.items()
        ]

    def units(self) -> list[list[Job]]:
        """The jobs, those of one policy together and in their order: its training, and every evaluation of it."""
        found = []
        for arm, own in self.file.arms.items():
            if own.policy in self.file.arms:
                continue
            users = [arm, *(name for name, other in self.file.arms.items() if other.policy == arm)]
            for seed in self.seeds:
                unit = [self._train(arm, seed)] if not own.policy else []
                policy = own.policy or str(unit[0].folder)
                found.append([*unit, *(self._eval(name, seed, policy) for name in users)])
        return found

    def runs(self) -> dict[str, dict[int, Path]]:
        """Folders of the finished evaluations, by arm and seed."""
        found: dict[str, dict[int, Path]] = {arm: {} for arm in self.file.arms}
        for job in self.evaluations():
            if job.state() == "done":
                found[job.arm][job.seed] = job.folder
        return found

    def jobs(self) -> list[Job]:
        """All of `units`."""
        return [job for unit in self.units() for job in unit]

    def evaluations(self) -> list[Job]:
        """The jobs that measure."""
        return [job for job in self.jobs() if job.kind == "eval"]

    def arms(self) -> Table:
        """What the arms are."""
        rows = []
        for name, own in self.file.arms.items():
            trained = f"not trained: {own.policy}" if own.policy else " ".join(own.set) or "as the study"
            measured = [*(own.set if own.policy else ()), *own.at_evaluation]
            rows.append((name, own.about, trained, " ".join(measured) or "-"))
        common = " ".join([*self.file.study.set, *self.file.study.at_evaluation])
        title = f"arms: {self.file.study.config} {common}".rstrip()
        return Table(title, ("arm", "what it is", "training", "at its evaluation alone"), rows)

    def _train(self, arm: str, seed: int) -> Job:
        folder = self.folder / arm / f"seed-{seed}"
        # its evaluation is a command of its own, the same for policies that were not trained
        given = ("eval.before=false", "eval.after=false", *self.file.study.set, *self.file.arms[arm].set)
        given += (f"run.seed={seed}", f"run.name={folder.name}", f"run.dir={folder.parent}")
        source = self._config()
        joins = self._joins(source, given, trains=True)
        return Job("train", arm, seed, folder, ("train", source, *given, *joins), source, given, joins=joins)

    def _eval(self, arm: str, seed: int, policy: str) -> Job:
        header, own, source = self.file.study, self.file.arms[arm], self._config()
        folder = self.folder / arm / f"seed-{seed}-eval"
        given = [each for each in (*header.set, *own.set) if _of_evaluations(each)]
        given += [*header.at_evaluation, *own.at_evaluation, f"run.seed={seed}"]
        preset = ("--preset", header.preset) if header.preset else ()
        overrides = ("run.name=eval", *(evaluation.PRESETS[header.preset] if header.preset else ()), *given)
        joins = () if policy.startswith(("http://", "https://")) else self._joins(source, overrides, trains=False)
        words = ("eval", source, *given, *joins, "--policy", policy, *preset, "-o", str(folder))
        return Job("eval", arm, seed, folder, words, source, overrides, policy, joins)

    def _joins(self, source: str, given: Sequence[str], *, trains: bool) -> tuple[str, ...]:
        """Settings with which a run joins the learner of the study, if there is one."""
        header, joins = self.file.study, list[str]()
        shares = trains and header.learner == "shared"
        if not shares:
            return ()
        try:
            alone = configs.load(source, given)
            joins += [f"train.learner={self.learner_address}"]
            joins += ["train.devices=[]"] if alone.train.devices else []
        except CodeRepairError:  # which `study_hosts` tells
            return ()
        return tuple(joins)

    def _config(self) -> str:
        named = self.file.study.config
        beside = self.path.parent / named
        return str(beside) if beside.suffix == ".toml" and beside.is_file() else named


def shipped() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    folder = Path(str(resources.files("coderepairrl"))) / "stages" / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read(source: str) -> Study:
    """The study in the file `source`, or the shipped one of that name.

    Raises `ConfigError`, or `Several` with everything that is wrong with the file itself; `study_run.check` asks about
    its arms.
    """
    known = shipped()
    path = Path(source)
    if not path.is_file():
        if source not in known:
            raise ConfigError(
                f"there is no study {source}", fix=f"name a TOML file, or a shipped study; {nearest(source, known)}"
            )
        path = known[source]
    try:
        file = File.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", fix="the file must be readable TOML") from None
    except ValidationError as error:
        raise several([_mistake(path, dict(each)) for each in error.errors()]) from None
    if problems := [ConfigError(f"{source}: {what}", fix=fix) for what, fix in _contradictions(file)]:
        raise several(problems)
    return Study(source, path, file)


def _mistake(path: Path, error: Mapping[str, Any]) -> CodeRepairError:
    *place, last = map(str, error["loc"])
    where = ".".join([*place, last])
    if error["type"] != "extra_forbidden":
        return ConfigError(f"{path}: {where}: {error['msg']}", fix="docs/guides/study.md has every key")
    sections: dict[str, type[Section]] = {"study": Header, "arms": ArmFile, "questions": QuestionFile}
    known = sections.get(place[0] if place else "", File).model_fields
    return ConfigError(f"{path}: unknown key {where!r}", fix=nearest(last, known))


def _contradictions(file: File) -> list[tuple[str, str]]:
    """What is wrong between the parts of a file, and what to do about it."""
    header, arms, found = file.study, file.arms, list[tuple[str, str]]()
    found += [
        (f"seed {seed} is there {count} times", "seeds are replicates: each once")
        for seed, count in Counter(header.seeds).items()
        if count > 1
    ]
    if header.preset and header.preset not in evaluation.PRESETS:
        found.append((f"there is no preset {header.preset!r}", nearest(header.preset, evaluation.PRESETS)))
    for arm, own in arms.items():
        if own.policy == arm:
            found.append((f"arm {arm} evaluates itself", "name another arm, or leave policy out to train it"))
        elif own.policy in arms and arms[own.policy].policy in arms:
            found.append(
                (
                    f"arm {arm} has no policy of its own, and {own.policy} neither",
                    f'policy = "{arms[own.policy].policy}"',
                )
            )
    named = {"study.baseline": [header.baseline] if header.baseline else []}
    named |= {f"questions.{name}": list(each.arms) for name, each in file.questions.items()}
    for where, used in named.items():
        found += [(f"{where}: there is no arm {arm!r}", nearest(arm, arms)) for arm in used if arm not in arms]
        found += [(f"{where}: {arm} is there twice", "name it once") for arm, n in Counter(used).items() if n > 1]
    settings = {"study": [*header.set, *header.at_evaluation]}
    settings |= {f"arms.{name}": [*own.set, *own.at_evaluation] for name, own in arms.items()}
    for where, given in settings.items():
        for each in given:
            try:
                key, _ = configs.parse_override(each)
            except ConfigError as error:
                found.append((f"{where}: {error}", error.fix))
                continue
            if key in ("run.seed", "run.name", "run.dir"):
                found.append((f"{where}: {key} is the study's own", "seeds, name and dir stand in [study]"))
    if not file.questions and len(arms) < 2:
        found.append(("there is one arm, and nothing to compare it with", "add [arms.base] with a policy, say"))
    return found


def _of_evaluations(override: str) -> bool:
    """Whether `crrl eval` has a use for a setting of an arm."""
    section = override.partition("=")[0].strip().partition(".")[0]
    return section in evaluation.USE.used or section not in Config.model_fields  # which is refused there


def _pinned(policy: str) -> str:
    """As run.json names a policy that is evaluated: a run by its newest checkpoint."""
    if policy.startswith(("builtin:", "http://", "https://")):
        return policy
    found = models.named(policy)
    return str(found.adapter or found.folder)
