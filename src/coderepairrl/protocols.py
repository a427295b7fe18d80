"""The five seams of the project: everything used of a part is here.

Each has a scripted fake and an exam, ``crrl check KIND NAME``. Your class derives from its protocol, which has defaults
for what is not abstract. The config names it by import path (``reward = "mine:Short"``), and it gets the section's
``options`` by keyword:

    class Short(Reward):
        name = "short"

        async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
            return Score(self.name, 1.0 if len(episode.patch) < 500 else 0.0)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.types import AgentReport, Checks, Endpoint, Episode, ExecResult, Sampling, Score, SideCalls, Task


@runtime_checkable
class TaskSource(Protocol):
    """Source of tasks."""

    name: str
    evaluation_set: str = ""
    """Name of the evaluation set, if it is for measuring and not for training."""

    def prepare(self) -> None:
        """Fetch and cache what the tasks need. Raises `TaskError`."""

    def __iter__(self) -> Iterator[Task]: ...

    def oracle(self, task_id: str) -> Checks | None:
        """Checks after the solution, a program, of a task without a reference; or None. Raises KeyError."""
        return None


@runtime_checkable
class Sandbox(Protocol):
    """Open, isolated workspace: a git repository at the task's commit.

    Methods raise `SandboxFault` if the sandbox fails; a failing command is a result.
    """

    workdir: str
    """Path of the repository inside."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_bytes: int = 1 << 20,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run `argv` (no shell) for at most `timeout` seconds; its process tree does not survive."""

    async def read(self, path: str) -> bytes:
        """Read a file, `path` relative to `workdir`.

        Raises OSError for anything an agent can cause: FileNotFoundError, PermissionError (outside), ...
        """

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file (and its folders), keeping its mode.

        With `follow` links are followed within the workspace. Without, links on the way are replaced by folders, and
        `path` becomes a separate file: its other names keep their content. Raises OSError as `read`, also for a full
        workspace (ENOSPC), with the file unchanged.
        """

    async def reach(self, address: str) -> str:
        """Bridge the host's Unix socket `address` to the guest's loopback; return ``http://127.0.0.1:PORT``."""

    async def diff(self) -> bytes:
        """Change since the task's commit, new, staged and committed files included, as git applies it.

        Runs no code of the agent, while no process of the guest is alive.
        """


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """Properties of a backend's sandboxes here, for exams and attacks.

    >>> SandboxInfo(isolates=True, limits={"memory": 1 << 30}).limits["memory"] >> 20
    1024
    """

    isolates: bool = False
    """Whether commands are isolated from the machine. Harmful attempts are made only then."""
    user: int | None = None
    """User id of the host that commands run as; None: ours."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of a sandbox: bytes of ``memory``, ``file_bytes`` of one file, ``disk_bytes``, ..."""
    limits_kept: str = "by means of its own"
    """How limits are enforced, in words."""
    workspaces: str = "by means of its own"
    """How workspaces are opened, in words."""
    slowdown: float = 3.0
    """Longest time of a short command, as a multiple of the host's."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Isolation by `bwrap`, `docker`, ..., or `unsafe-local`."""

    name: str

    def check_image(self, name: str) -> None:
        """Raise `TaskError` if ``image:NAME`` certainly cannot be opened. Fetches nothing."""
        return

    @abstractmethod
    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """Open a fresh sandbox; leaving the context destroys it. Raises `SandboxFault`, `TaskError`."""

    def show(self, folders: Sequence[str]) -> None:
        """Show host folders to commands, read-only; call before `open`. Raises `ConfigError`."""
        raise ConfigError(f"sandbox {self.name!r} cannot show {folders[0]}, which the agent needs", fix="another one")

    def require(self) -> None:
        """Raise `PrerequisiteError`, with the helping command, if it cannot work here. May take a second."""
        return

    def info(self) -> SandboxInfo:
        """Properties on this machine."""
        return SandboxInfo()

    def close(self) -> None:
        """Release resources; it may be used again."""
        return


class FirstRequest(NamedTuple):
    """First request of an agent to a model, in OpenAI's chat format."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@runtime_checkable
class Agent(Protocol):
    """Program that repairs code by calling a model."""

    name: str
    placement: Literal["host", "sandbox"]
    """In the controller, using the sandbox, or as a program within."""
    binds: Sequence[str] = ()
    """Host folders that it needs in the sandbox."""
    not_in: Mapping[str, str] = MappingProxyType({})
    """Reasons why it does not work, by sandbox backend."""
    side_calls: SideCalls = "mask"
    """How side conversations are trained."""
    dialect: str = ""
    """API that a program in the sandbox speaks; its exam asks."""

    @property
    def reads_reference(self) -> bool:
        """Whether it shows the model part of the reference: results are then upper bounds."""
        return False

    def first_request(self, task: Task) -> FirstRequest:
        """First request, as far as known without a sandbox, to refuse limits that leave no room for a reply."""
        return FirstRequest([{"role": "user", "content": task.prompt}])

    @abstractmethod
    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Work on `task` until done or out of budget. Raises `AgentFault` if the program breaks."""


class Chunk(NamedTuple):
    """Emitted tokens of one policy version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out, without text: stops on ids, the gateway on strings."""

    context: int
    """Longest sequence (prompt and output), in tokens."""

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """Sample until a stop id (emitted), `max_tokens`, or the context is full.

        Closing the generator aborts the request. Raises `EngineFault`, and ValueError for a prompt that leaves no room.
        """

    @abstractmethod
    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Serve the weights at `path` as `version`; return it once every later token is theirs.

        `path` is a safetensors file or a Hugging Face folder; with `EngineSpec.adapters` also a folder of peft
        adapters, with `EngineSpec.receives` also an offer (`coderepairrl.sync.weights`). `checksum` is the hex SHA-256
        of the safetensors files, concatenated in name order. Raises `EngineFault` if it differs or weights do not fit;
        the old version is then served, never a mixture. Prefixes computed by older weights are not reused.
        """

    def at(self, version: int) -> Engine:
        """Same engine for requests of a kept `version` (`EngineSpec.with_adapters`); closing it has no effect."""
        raise EngineFault("this engine serves one version at a time", fix="measure each policy in a call of its own")

    async def receivers(self) -> int:
        """Number of processes that receive an offer's weights; 0 if weights arrive as files."""
        return 0

    @property
    def patience(self) -> float:
        """Seconds that an offer's weights may take to arrive."""
        return 300.0

    async def sleep(self) -> None:
        """Release GPU memory until `wake` or `load`; no effect if asleep.

        Open requests continue afterwards, new ones wait. Raises `EngineFault`: it is dead, or cannot sleep.
        """
        raise EngineFault("this engine cannot sleep", fix="engine.share_devices=false, or engine=vllm")

    async def wake(self) -> None:
        """Serve as before, if asleep. Raises `EngineFault`, usually when it died."""
        return

    @abstractmethod
    async def health(self) -> Mapping[str, float]:
        """Counters: ``version``, ``running``, ``generated_tokens``, ... Raises `EngineFault` if dead."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving; release everything."""


@runtime_checkable
class EngineSpec(Protocol):
    """Engine with options, not started; named by ``engine`` in a config.

    Raises `ConfigError` for options impossible on any machine.
    """

    name: str
    receives: bool = False
    """Whether it takes full weights without a file."""
    exclusive: bool = False
    """Whether two at once would conflict: same GPUs, or each other's weights."""

    @property
    def adapters(self) -> bool:
        """Whether it loads adapters on its initial weights."""
        return False

    @property
    def takes_gpus(self) -> bool:
        """Whether `start` starts GPU processes; others use the CPU, or run already."""
        return False

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens by its options; None: the model's."""
        return None

    def with_adapters(self, rank: int, count: int = 1) -> EngineSpec:
        """Copy with room for adapters of this rank, or itself if it takes none. Raises `ConfigError`.

        Its engine keeps `count` of them, each served by `Engine.at`.
        """
        return self

    def on_gpus(self, visible: str) -> EngineSpec:
        """Copy on these GPUs (CUDA_VISIBLE_DEVICES). Called only if it `takes_gpus`."""
        return self

    def with_sleep(self) -> EngineSpec:
        """Copy whose engine can `Engine.sleep`. Raises `ConfigError` if impossible."""
        raise ConfigError(
            f"engine.share_devices=turns, and engine {self.name!r} cannot sleep",
            fix="engine=vllm, or leave engine.share_devices out: an engine on the CPU is in nobody's way",
        )

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` if it cannot serve the folder `model` anywhere."""
        return

    def require(self) -> None:
        """Raise `PrerequisiteError`, with what helps, if this machine lacks something. May take a second."""
        return

    def versions(self) -> Mapping[str, str]:
        """Versions of packages that affect its samples. Raises `PrerequisiteError`, as `require`."""
        return {}

    @abstractmethod
    async def start(self, model: Path, *, log_dir: Path) -> Engine:
        """Serve the Hugging Face folder `model` as version 0, with logs in `log_dir`.

        Raises `ConfigError` (as `check_model`), `PrerequisiteError` (as `require`), `EngineFault`.
        """


@runtime_checkable
class Reward(Protocol):
    """Judge of an episode's patch, without options; may be a plain function."""

    name: str
    repairs: bool = False
    """Promises 1 for the task's reference and 0 for a patch that repairs nothing; checked before a run's first step.
    Habits, formats and costs promise nothing.
    """
    runs_checks: bool = False
    """Whether it runs the task's checks, so that `Score.passed` verifies repairs."""
    takes_verified: bool = False
    """Whether it also compares patches with `Task.verified`."""
    on_state: bool = False
    """Whether it judges the attempt's final workspace, which `sandbox` then opens."""
    version: int = 1
    """Version of the formula; values of two versions do not compare."""

    @abstractmethod
    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode; `sandbox` opens fresh workspaces to run code. Raises `RewardFault`."""

    def drawn(self, episode: Episode) -> bool:
        """Whether it scores this episode: costly rewards may score a sample."""
        return True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float | None:
        """Value of `patch` for the reference `oracle`; None if both diffs do not suffice. Raises `MalformedPatch`."""
        return None
