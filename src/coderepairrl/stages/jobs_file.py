"""Jobs from one file: commands, their needs, and arms that run for each seed.

Folders are DIR/NAME/JOB, for arms DIR/NAME/ARM/seed-N/JOB.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from coderepairrl import config as configs
from coderepairrl.config import Config
from coderepairrl.config.schema import Section
from coderepairrl.errors import CodeRepairError, ConfigError, combine_errors
from coderepairrl.plan import EVALUATION
from coderepairrl.registry import suggest_nearest
from coderepairrl.report.arms import ArmQuestion
from coderepairrl.report.jobs import job_record_path
from coderepairrl.stages.evaluation import COLLECTING, PRESETS

Kind = Literal["train", "sft", "collect", "eval", "command"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TRAIN, ATTEMPT = ("train", "sft"), ("collect", "eval")
"""Kinds that make a policy, and kinds that attempt tasks."""
_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
_PLACEHOLDER = re.compile(r"\{([A-Za-z0-9][\w-]*(?:\.[A-Za-z0-9][\w-]*)?)\}")  # {JOB} or {ARM.JOB}
_FOLDER_SETTINGS = ("run.name", "run.dir")  # The job's name decides them.
# Placeholders that are filled when the job runs, and so cannot be names of jobs.
_FILLED_LATER = ("port", "python", "folder")
_GUIDE = "docs/guides/jobs.md has every key"


class JobSection(Section):
    """``[jobs.NAME]``, or ``NAME`` in ``[arms.ARM]``: command and settings.

    ``{JOB}`` in `set`, `policy`, `serve` or `run` is the folder of another job, which then runs first.
    """

    kind: Kind | None = None
    """Command; default: the job's name."""
    about: str = ""
    """Note for the table."""
    config: str = ""
    """Replaces the file's `config`, and the common settings."""
    set: tuple[str, ...] = ()
    """Settings, as on the command line."""
    policy: str = ""
    """Policy to train further (`train`, `sft`), or to attempt tasks with."""
    preset: str = ""
    """Sampling and limits of an `eval`."""
    serve: str = ""
    """Command that serves the policy; ``{port}``, also in `policy`, is a free port, ``{python}`` crrl's Python."""
    run: str = ""
    """Program of a `command`, which makes ``{folder}``."""
    needs: tuple[str, ...] = ()
    """Further needed jobs."""


class ArmSection(Section):
    """``[arms.NAME]``: jobs for each seed; the last `eval` is compared."""

    about: str = ""
    set: tuple[str, ...] = ()
    """Settings of its jobs that begin with the file's `config`."""
    jobs: dict[_NAME, JobSection] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _others_are_jobs(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            **{key: value for key, value in data.items() if key in ("about", "set")},
            "jobs": {key: value for key, value in data.items() if key not in ("about", "set")},
        }


class QuestionSection(Section):
    """``[questions.NAME]``: comparison of arms."""

    asks: str = ""
    arms: tuple[str, ...] = Field(min_length=2)
    """Baseline first."""
    metric: str = "resolved"
    evaluation: str = "eval"
    """``eval``, or a name in ``eval.also``."""
    at_least: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Gain to be shown over the baseline: points of a share, else the metric's unit."""


class DefaultsSection(Section):
    """``[defaults.KIND]``: common settings of a kind."""

    set: tuple[str, ...] = ()
    preset: str = ""


class JobsFile(Section):
    """Jobs file."""

    name: _NAME
    config: str = ""
    """Shipped config or TOML file, here or in the current folder."""
    dir: str = "jobs"
    """Parent of the folder `name`."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Seeds of arms, as ``run.seed``."""
    set: tuple[str, ...] = ()
    """Settings of jobs that begin with `config`, where the kind reads them."""
    metrics: tuple[str, ...] = ("resolved",)
    """Metrics for comparing arms without questions."""
    baseline: str = ""
    """Baseline arm without questions; empty: the first."""
    defaults: dict[Kind, DefaultsSection] = Field(default_factory=dict)
    jobs: dict[_NAME, JobSection] = Field(default_factory=dict)
    arms: dict[_NAME, ArmSection] = Field(default_factory=dict)
    questions: dict[str, QuestionSection] = Field(default_factory=dict)
    criteria: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Questions with `at_least` whose gains must all be shown."""


@dataclass(frozen=True, slots=True)
class Job:
    """Command with placeholders filled in."""

    name: str
    """Folder below DIR/NAME."""
    kind: Kind
    about: str
    folder: Path
    source: str
    """Initial configuration."""
    settings: tuple[str, ...]
    policy: str = ""
    preset: str = ""
    serve: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    arm: str = ""
    seed: int = 0

    @property
    def record(self) -> Path:
        """File that records its inputs and end."""
        return job_record_path(self.folder)

    @property
    def log(self) -> Path:
        """Output of its processes."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def overrides(self) -> tuple[str, ...]:
        """Settings of a training job."""
        model = (f"model.path={configs.to_inline(self.policy)}", "model.init=weights") if self.policy else ()
        # evaluations are separate jobs
        options = ("eval.before=false", "eval.after=false", *self.settings, *model)
        return (*options, f'run.name="{self.folder.name}"', f"run.dir={configs.to_inline(str(self.folder.parent))}")

    def command_line(self, port: int | str = "{port}") -> list[str]:
        """Words of the command; `port` is the policy server's."""
        if self.kind == "command":
            return [word.replace("{folder}", str(self.folder)).replace("{python}", sys.executable) for word in self.run]
        if self.kind in TRAIN:
            return ["crrl", self.kind, self.source, *self.overrides()]
        preset = ["--preset", self.preset] if self.preset else []
        policy = self.policy.replace("{port}", str(port))
        return ["crrl", self.kind, self.source, *self.settings, "--policy", policy, *preset, "-o", str(self.folder)]

    def server_command_line(self, port: int) -> list[str]:
        """Words of the command that serves the policy."""
        return [word.replace("{port}", str(port)).replace("{python}", sys.executable) for word in self.serve]

    def config(self) -> Config:
        """Configuration. Raises `ConfigError`."""
        return configs.load_config(self.source, self.overrides() if self.kind in TRAIN else self.attempt_settings())

    def attempt_settings(self) -> tuple[str, ...]:
        """Settings of an attempting job."""
        first = COLLECTING if self.kind == "collect" else PRESETS[self.preset] if self.preset else ()
        return (f"run.name={self.kind}", *first, *self.settings)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Checked jobs file, jobs in runnable order."""

    named: str
    """Path or shipped name."""
    file: JobsFile
    jobs: tuple[Job, ...]

    @property
    def folder(self) -> Path:
        """Folder of the jobs."""
        return Path(self.file.dir) / self.file.name

    def arms(self) -> dict[str, dict[int, Job]]:
        """Compared evaluations by arm and seed; without arms, each evaluation is an arm."""
        jobs_by_arm: dict[str, dict[int, Job]] = {}
        for job in self.jobs:
            if job.kind == "eval" and bool(job.arm) == bool(self.file.arms):
                jobs_by_arm.setdefault(job.arm or job.name, {})[job.seed] = job
        return {arm: jobs_by_arm[arm] for arm in (self.file.arms or jobs_by_arm) if arm in jobs_by_arm}

    def about(self, arm: str) -> str:
        """Describe `arm`."""
        if arm not in self.file.arms:
            return self.file.jobs[arm].about
        settings = self.file.arms[arm]
        chain = " -> ".join(" ".join([name, *job.set]) for name, job in settings.jobs.items())
        return "; ".join(filter(None, [settings.about, " ".join(settings.set), chain]))

    def questions(self) -> list[ArmQuestion]:
        """Questions; default: each arm against the baseline, in each metric."""
        if self.file.questions:
            return [ArmQuestion(name, **each.model_dump()) for name, each in self.file.questions.items()]
        arms = list(self.arms())
        first = self.file.baseline or next(iter(arms), "")
        compared = [arm for arm in arms if arm != first]
        return [ArmQuestion(metric, "", (first, *compared), metric, "eval") for metric in self.file.metrics if compared]


def shipped_jobs_files() -> dict[str, Path]:
    """Shipped jobs files by name."""
    folder = Path(str(resources.files("coderepairrl"))) / "stages" / "shipped"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_jobs_file(source: str, overrides: Sequence[str] = ()) -> Jobs:
    """Read the jobs of a file or shipped name, with ``JOB.KEY=VALUE`` overrides.

    Raises `ConfigError`, or `CombinedError` with all mistakes of the file; `plan_jobs` finds those of single jobs.
    """
    path = Path(source)
    if not path.is_file():
        if source not in shipped_jobs_files():
            nearest = suggest_nearest(source, shipped_jobs_files())
            fix = f"name a TOML file (examples/jobs/ in the repository), or a shipped one; {nearest}"
            raise ConfigError(f"there is no jobs file {source}", fix=fix)
        path = shipped_jobs_files()[source]
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", fix="the file must be readable TOML") from None
    _validate_file(path, data)  # before overrides, which rely on its form
    _apply_job_overrides(data, overrides)
    file = _validate_file(path, data)
    problems = _find_contradictions(file)
    jobs = Jobs(source, file, tuple(_sort_by_needs(_expand_jobs(path, file, problems), problems)))
    if not problems:
        problems += _check_arms(jobs)
    if problems:
        raise combine_errors(problems)
    return jobs


def _validate_file(path: Path, data: Mapping[str, Any]) -> JobsFile:
    try:
        return JobsFile.model_validate(data)
    except ValidationError as error:
        raise combine_errors([_convert_error(path, dict(each)) for each in error.errors()]) from None


def _apply_job_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    everywhere = [data.get("jobs", {}), *data.get("arms", {}).values()]
    for text in overrides:
        key, value = configs.parse_override(text, "write JOB.KEY=VALUE: train.run.steps=5, say")
        name, _, rest = key.partition(".")
        jobs = [group[name] for group in everywhere if isinstance(group.get(name), dict)]
        if not jobs or not rest:
            names = [each for group in everywhere for each, job in group.items() if isinstance(job, dict)]
            raise ConfigError(f"override {text!r}: there is no job {name!r}", fix=suggest_nearest(name, names))
        for job in jobs:
            if rest in JobSection.model_fields:
                job[rest] = value
            else:
                job["set"] = [*job.get("set", ()), f"{rest}={text.partition('=')[2]}"]


def _convert_error(path: Path, error: Mapping[str, Any]) -> CodeRepairError:
    place = [str(each) for each in error["loc"]]
    if place[0] == "arms":
        del place[2:3]  # the key `jobs`, which only `ArmSection` has
    where = ".".join(place)
    if error["type"] != "extra_forbidden":
        return ConfigError(f"{path}: {where}: {error['msg']}", fix=_GUIDE)
    sections: dict[str, type[Section]] = {"questions": QuestionSection, "defaults": DefaultsSection}
    keys = (sections.get(place[0], JobSection) if place[1:] else JobsFile).model_fields
    return ConfigError(f"{path}: unknown key {where!r}", fix=suggest_nearest(place[-1], keys))


def _find_contradictions(file: JobsFile) -> list[CodeRepairError]:
    mistakes = list[CodeRepairError]()
    if len(set(file.seeds)) < len(file.seeds) or not file.seeds:
        mistakes.append(ConfigError("seeds are replicates: name at least one, and each once", fix="seeds = [0, 1, 2]"))
    if shared_names := [arm for arm in file.arms if arm in file.jobs]:
        mistakes.append(ConfigError(f"{shared_names[0]} is an arm and a job", fix="give one of them another name"))
    names = [*file.arms, *file.jobs, *(name for arm in file.arms.values() for name in arm.jobs)]
    if reserved := [name for name in names if name in (*_FILLED_LATER, "report")]:
        mistakes.append(ConfigError(f"no job or arm can be called {reserved[0]!r}", fix="give it another name"))
    if not names:
        mistakes.append(ConfigError("there are no jobs", fix=_GUIDE))
    settings: dict[str, Sequence[str]] = {"the file": file.set}
    settings |= {f"defaults.{kind}": each.set for kind, each in file.defaults.items()}
    settings |= {f"arms.{name}": arm.set for name, arm in file.arms.items()}
    settings |= {f"jobs.{name}": job.set for name, job in file.jobs.items()}
    settings |= {f"arms.{arm}.{name}": job.set for arm, each in file.arms.items() for name, job in each.jobs.items()}
    for where, overrides in settings.items():
        for each in overrides:
            try:
                key, _ = configs.parse_override(each)
            except ConfigError as error:
                mistakes.append(ConfigError(f"{where}: {error}", fix=error.fix))
                continue
            if key in _FOLDER_SETTINGS or (key == "run.seed" and where.startswith("arms.")):
                fix = "leave it out: name, dir and seeds of the file set the folders of jobs and the seeds of arms"
                mistakes.append(ConfigError(f"{where}: {key} cannot be set", fix=fix))
    return mistakes


def _expand_jobs(path: Path, file: JobsFile, problems: list[CodeRepairError]) -> list[Job]:
    """Make all jobs in file order; collect mistakes in `problems`."""
    sections = [("", 0, name, job) for name, job in file.jobs.items()]
    for arm, arm_section in file.arms.items():
        sections += [(arm, seed, name, job) for seed in file.seeds for name, job in arm_section.jobs.items()]
    expanded = []
    for section in sections:
        try:
            expanded.append(_expand_job(path, file, *section))
        except ConfigError as error:
            problems.append(error)
    return expanded


def _expand_job(path: Path, file: JobsFile, arm: str, seed: int, name: str, job: JobSection) -> Job:
    where = f"arms.{arm}.{name}" if arm else f"jobs.{name}"
    kind = job.kind or next((each for each in KINDS if each == name), None)
    if kind is None:
        raise ConfigError(f"{where} does not say its kind", fix=f'kind = "{" | ".join(KINDS)}"')
    defaults = file.defaults.get(kind, DefaultsSection())
    job = job.model_copy(update={"set": (*defaults.set, *job.set), "preset": job.preset or defaults.preset})
    _check_keys(where, kind, job)
    config = job.config or file.config
    if kind != "command" and not config:
        raise ConfigError(f"{where} has no config to begin with", fix='config = "hello"')
    visible = _list_visible_jobs(file, arm, seed)

    def find(reference: str) -> str:
        if reference not in visible:
            message = f"{where} needs {reference!r}, which is not a job that it can name"
            raise ConfigError(message, fix=suggest_nearest(reference, visible))
        return visible[reference]

    needs = dict.fromkeys(find(each) for each in job.needs)
    home = Path(file.dir) / file.name

    def fill(text: str, *, strict: bool = False) -> str:
        def replace_placeholder(match: re.Match[str]) -> str:
            # without `strict`, other braces stay: settings use them for tables
            if match[1] in _FILLED_LATER or (match[1] not in visible and not strict):
                return match[0]
            needs[find(match[1])] = None
            return str(home / visible[match[1]])

        return _PLACEHOLDER.sub(replace_placeholder, text)

    common = () if job.config else (*file.set, *(file.arms[arm].set if arm else ()))
    assignments = [
        *_select_common_settings(kind, common, job.policy),
        *job.set,
        *([f"run.seed={seed}"] if arm else []),
    ]
    local = path.parent / config
    return Job(
        name=visible[name],
        kind=kind,
        about=job.about,
        folder=home / visible[name],
        source=str(local) if local.suffix == ".toml" and local.is_file() else config,
        settings=() if kind == "command" else tuple(map(fill, assignments)),
        policy=fill(job.policy, strict=True),
        preset=job.preset,
        serve=tuple(map(fill, _split_command(f"{where}.serve", job.serve))),
        run=tuple(map(fill, _split_command(f"{where}.run", job.run))),
        needs=tuple(needs),
        arm=arm,
        seed=seed,
    )


def _list_visible_jobs(file: JobsFile, arm: str, seed: int) -> dict[str, str]:
    """Folders below DIR/NAME of the jobs that a job of `arm` can name, by ``JOB`` or ``ARM.JOB``."""
    without_arm = {name: name for name in file.jobs}
    if not arm:
        return without_arm
    seeded = {
        f"{other}.{name}": f"{other}/seed-{seed}/{name}" for other, each in file.arms.items() for name in each.jobs
    }
    in_arm = {name: seeded[f"{arm}.{name}"] for name in file.arms[arm].jobs}
    return without_arm | in_arm | seeded


def _split_command(where: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", fix="close the quotation, as in a shell") from None


def _check_keys(where: str, kind: Kind, job: JobSection) -> None:
    kinds_of_key = {"preset": ("eval",), "run": ("command",), "serve": ATTEMPT}
    kinds_of_key |= dict.fromkeys(("policy", "set", "config"), (*TRAIN, *ATTEMPT))
    for key, kinds in kinds_of_key.items():
        if getattr(job, key) and kind not in kinds:
            fix = f"leave it out there and in defaults.{kind}"
            raise ConfigError(f"{where}.{key} means nothing to a job of kind {kind}", fix=fix)
    if job.preset and job.preset not in PRESETS:
        raise ConfigError(f"{where}: there is no preset {job.preset!r}", fix=suggest_nearest(job.preset, PRESETS))
    if kind in ATTEMPT and not job.policy:
        raise ConfigError(f"{where} has no policy to attempt tasks with", fix='policy = "{train}", say')
    if kind == "command" and not job.run:
        raise ConfigError(f"{where} runs nothing", fix='run = "PROGRAM {folder}"')
    if ("{port}" in job.policy) != bool(job.serve) or ("{port}" in job.serve) != bool(job.serve):
        raise ConfigError(f"{where}: serve and policy both need {{port}}", fix='policy = "http://127.0.0.1:{port}/v1"')
    if kind in TRAIN and job.policy.startswith(("http://", "https://")):
        raise ConfigError(f"{where} cannot train a policy behind a URL", fix="name a model folder")


def _select_common_settings(kind: Kind, common: Sequence[str], policy: str) -> list[str]:
    if kind in TRAIN:
        return list(common)
    unread = Config.model_fields.keys() - {*EVALUATION.used, *(["keep"] if kind == "collect" else [])}
    unread |= {"eval"} if kind == "collect" else set()  # it is about held-out tasks, not those to collect from
    unread |= {"model"} if "://" in policy else set()
    keys = {each: each.partition("=")[0].strip() for each in common}
    return [
        each
        for each, key in keys.items()
        if key.partition(".")[0] not in unread and key not in ("model.path", "model.init")
    ]


def _sort_by_needs(jobs: Sequence[Job], problems: list[CodeRepairError]) -> list[Job]:
    """Sort `jobs` by needs; cycles go to `problems`."""
    by_name, ordered = {job.name: job for job in jobs}, dict[str, Job]()

    def visit(job: Job, path: tuple[str, ...]) -> None:
        if job.name in path:
            circle = " -> ".join([*path[path.index(job.name) :], job.name])
            problems.append(ConfigError(f"jobs need each other in a circle: {circle}", fix="leave one of them out"))
        elif job.name not in ordered:
            for each in job.needs:
                if each in by_name:  # else its mistake is among `problems`
                    visit(by_name[each], (*path, job.name))
            ordered[job.name] = job

    for job in jobs:
        visit(job, ())
    return list(ordered.values())


def _check_arms(jobs: Jobs) -> list[CodeRepairError]:
    arms, file, mistakes = list(jobs.arms()), jobs.file, list[CodeRepairError]()
    named = {f"questions.{name}": each.arms for name, each in file.questions.items()}
    for where, names in {**named, "baseline": (file.baseline,) if file.baseline else ()}.items():
        for name in names:
            if name not in arms:
                message = f"{where}: no arm with an evaluation is called {name!r}"
                mistakes.append(ConfigError(message, fix=suggest_nearest(name, arms)))
        if len(set(names)) < len(names):
            mistakes.append(ConfigError(f"{where} names an arm twice", fix="name it once"))
    measured = [name for name, each in file.questions.items() if each.at_least is not None]
    for criterion, names in file.criteria.items():
        for name in set(names).difference(measured):
            message = f"criteria.{criterion}: no question with at_least is called {name!r}"
            mistakes.append(ConfigError(message, fix=suggest_nearest(name, measured)))
    return mistakes
