"""Five interfaces: `TaskSource`, `Sandbox`, `Agent`, `Engine`, `Reward`. Each has an exam, ``crrl check KIND NAME``.

A class of yours derives from its protocol, which has defaults for what is not abstract. The config names it by import
path (``agent = "mine:Bot"``) and passes the section's ``options`` by keyword; a reward has none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.types import (
    AgentReport,
    Capabilities,
    Checks,
    Chunk,
    Endpoint,
    EngineNeeds,
    Episode,
    ExecResult,
    FirstRequest,
    Sampling,
    SandboxInfo,
    Score,
    SideCalls,
    Task,
)


class TaskSource(Protocol):
    """Source of tasks; one with an `evaluation_set` (its name) is for measuring, not for training."""

    name: str
    evaluation_set: str = ""

    def prepare(self) -> None:
        """Fetch and cache what the tasks need. Raises `TaskError`."""

    def __iter__(self) -> Iterator[Task]: ...

    def oracle(self, task_id: str) -> Checks | None:
        """Checks that run a task's solution program first, if it has no reference; else None. Raises KeyError."""
        return None


class Sandbox(Protocol):
    """Open workspace: a git repository at the task's commit in `workdir`. Methods raise `SandboxFault` if it fails."""

    workdir: str

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
        """Run `argv` (no shell) for at most `timeout` seconds and end its processes. A failing command is no error."""

    async def read(self, path: str) -> bytes:
        """Read a file, `path` relative to `workdir`. Raises OSError for anything that an agent can cause."""

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file (and its folders), keeping its mode. Raises OSError, with the file unchanged.

        Without `follow`, links on the way are replaced by folders, and other hard links keep their content.
        """

    async def reach(self, address: str) -> str:
        """Bridge the host's Unix socket `address` to the guest's loopback; return ``http://127.0.0.1:PORT``."""

    async def diff(self) -> bytes:
        """Change since the task's commit, staged and committed ones included. No code or process of the agent runs."""


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
        raise ConfigError(f"sandbox {self.name!r} cannot show {folders[0]}, which the agent needs", fix="sandbox=bwrap")

    def require(self) -> None:
        """Raise `PrerequisiteError`, with the command that helps, if it cannot work here."""
        return

    def info(self) -> SandboxInfo:
        """Properties on this machine."""
        return SandboxInfo()

    def close(self) -> None:
        """Release resources; it may be used again."""
        return


class Agent(Protocol):
    """Program that repairs code by calling a model, from the ``host`` (the controller) or within the ``sandbox``.

    `binds` are host folders that it needs in the sandbox, `not_in` reasons why it does not work, by backend.
    """

    name: str
    placement: Literal["host", "sandbox"]
    binds: Sequence[str] = ()
    not_in: Mapping[str, str] = MappingProxyType({})
    side_calls: SideCalls = "mask"
    dialect: str = ""  # API of a program in the sandbox, for its exam

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


class EngineSpec(Protocol):
    """Engine with its options, not started. Its constructor raises `ConfigError` for impossible options."""

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """Abilities, known without a model."""
        return Capabilities()

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` if it cannot serve the folder `model` anywhere."""
        return

    def require(self, needs: EngineNeeds = EngineNeeds(), *, connect: bool = False) -> Mapping[str, str]:
        """Versions of packages that affect samples; `connect`: also of a running server. Raises `PrerequisiteError`."""
        return {}

    @abstractmethod
    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> Engine:
        """Serve the Hugging Face folder `model` as version 0. Raises as `check_model`, `require`, and `EngineFault`."""


class Engine(Protocol):
    """Token ids in, token ids out, at most `context` of both. It stops on ids, the gateway on strings."""

    context: int

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """Sample until a stop id (emitted), `max_tokens`, or the context is full; closing aborts the request.

        Raises `EngineFault`, and ValueError for a prompt that leaves no room.
        """

    @abstractmethod
    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Serve the weights at `path` as `version`; return it once they sample every later token.

        `path` is a safetensors file, a Hugging Face folder, or, by its `Capabilities`, peft adapters or an offer
        (`coderepairrl.sync.weights`); `checksum` the hex SHA-256 of its safetensors files, one after the other by name.
        Raises `EngineFault` if it differs or weights do not fit; then the old version is served, never a mixture.
        Prefixes computed by older weights are not reused.
        """

    def at(self, version: int) -> Engine:
        """This engine, with requests for a kept `version` (`EngineNeeds.adapters`); closing it has no effect."""
        raise EngineFault("this engine serves one version at a time", fix="measure each policy in a separate call")

    async def receivers(self) -> tuple[int, float]:
        """Number of processes that receive an offer's weights, and their time limit in seconds."""
        raise EngineFault("this engine takes weights as files only", fix="engine.weights=file, or engine=vllm")

    async def sleep(self) -> None:
        """Release GPU memory until `wake` or `load`; requests wait. Raises `EngineFault` if dead, or unable."""
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


class Reward(Protocol):
    """Scores an episode's patch; may be a plain function. Scores by different `version`s are not comparable."""

    name: str
    version: int = 1
    repairs: bool = False  # 1 for the task's reference, 0 without repair: checked before a run's first step
    runs_checks: bool = False  # runs the task's checks, so that `Score.passed` verifies repairs
    takes_verified: bool = False  # also compares patches with `Task.verified`
    on_state: bool = False  # scores the attempt's final workspace, which `sandbox` then opens

    @abstractmethod
    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode; `sandbox` opens fresh workspaces to run code. Raises `RewardFault`."""

    def drawn(self, episode: Episode) -> bool:
        """Whether it scores this episode: costly rewards may score a sample."""
        return True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float | None:
        """Value of `patch` for the reference `oracle`; None if the diffs do not suffice. Raises `MalformedPatch`."""
        return None
