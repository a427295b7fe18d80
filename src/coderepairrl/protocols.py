"""The five seams of the project on one page: all that is used of a part, by anybody, is here.

Each has a scripted fake beside its real implementations and an exam, ``crrl check KIND NAME``. A class of your own
derives from its protocol, which has a default for what is not abstract, is named by import path in the config
(``reward = "mine:Short"``), made of the section's ``options`` by keyword, and sits the same exam:

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
    """Where tasks come from."""

    name: str
    evaluation_set: str = ""
    """What it is called, if it is there to be measured on and not to be trained on."""

    def prepare(self) -> None:
        """Fetch and cache what the tasks need. Raises `TaskError` naming the task and the fix."""

    def __iter__(self) -> Iterator[Task]: ...

    def oracle(self, task_id: str) -> Checks | None:
        """For a task without a reference: its checks after its solution, which is a program; None where there is none.
        Raises KeyError."""
        return None


@runtime_checkable
class Sandbox(Protocol):
    """An open workspace in isolation: a git repository at the task's commit, and nothing else of the host.

    Every method raises `SandboxFault` when the sandbox itself fails; a command that fails is a result.
    """

    workdir: str
    """The repository's path as commands inside see it."""

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
        """Run `argv` (no shell) to its end, `timeout` seconds at most. Afterwards its whole process tree is gone."""

    async def read(self, path: str) -> bytes:
        """Bytes of a file, `path` relative to `workdir`. Raises OSError for all that an agent can bring about:
        FileNotFoundError, PermissionError (outside), ..."""

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file (and its folders), keeping its mode.

        With `follow` links are followed, inside the workspace only. Without, `path` afterwards is a file of its own in
        folders that are no links: links on the way give place to folders, and other names of the file keep its content.
        Raises OSError as `read`, with the file as it was, also for a full workspace (ENOSPC).
        """

    async def reach(self, address: str) -> str:
        """Bridge the host's Unix socket `address` to the guest's loopback; returns ``http://127.0.0.1:PORT``."""

    async def diff(self) -> bytes:
        """The change against the task's commit, new, staged and committed files included, as git applies it.

        No process of the guest is alive while it is taken, and none of the agent's code runs.
        """


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """Properties of a backend's sandboxes on this machine, for exams and attacks.

    >>> SandboxInfo(isolates=True, limits={"memory": 1 << 30}).limits["memory"] >> 20
    1024
    """

    isolates: bool = False
    """Whether commands are kept from the rest of the machine. What could harm it is tried only where they are."""
    user: int | None = None
    """User id of the host that commands run as; None: ours."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """What one sandbox may use at most: bytes of ``memory``, ``file_bytes`` of one file, ``disk_bytes``, ..."""
    limits_kept: str = "by means of its own"
    """How limits are kept, in words."""
    workspaces: str = "by means of its own"
    """How workspaces are opened, in words."""
    slowdown: float = 3.0
    """Time of a short command at most, as a multiple of the same command's on the host."""


@runtime_checkable
class SandboxBackend(Protocol):
    """A way to isolate: `bwrap`, `docker`, ..., `unsafe-local`."""

    name: str

    def check_image(self, name: str) -> None:
        """Raise `TaskError` if it knows that it cannot open the workspace ``image:NAME``. Fetches nothing."""
        return

    @abstractmethod
    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox for `task`; leaving the context destroys it. Raises `SandboxFault`, `TaskError`."""

    def show(self, folders: Sequence[str]) -> None:
        """Let commands see these folders of the host, read-only, before anything is opened. Raises `ConfigError`."""
        raise ConfigError(f"sandbox {self.name!r} cannot show {folders[0]}, which the agent needs", fix="another one")

    def require(self) -> None:
        """Raise `PrerequisiteError`, with the command that helps, if it cannot work here. May take a second."""
        return

    def info(self) -> SandboxInfo:
        """Its properties on this machine."""
        return SandboxInfo()

    def close(self) -> None:
        """Release what it holds; it may be used again."""
        return


class FirstRequest(NamedTuple):
    """What an agent asks a model first, in the format of OpenAI's chat."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@runtime_checkable
class Agent(Protocol):
    """Something that repairs code by calling a model."""

    name: str
    placement: Literal["host", "sandbox"]
    """Where it runs: in the controller, using the sandbox, or as a program within."""
    binds: Sequence[str] = ()
    """Folders of the host that it must see in the sandbox."""
    not_in: Mapping[str, str] = MappingProxyType({})
    """Why it does not work in a sandbox, by the name of the backend."""
    side_calls: SideCalls = "mask"
    """What becomes of calls beside its main conversation."""
    dialect: str = ""
    """The API that a program in the sandbox speaks; its exam asks."""

    @property
    def reads_reference(self) -> bool:
        """Whether it shows the model something of the task's reference: what it comes to is a bound, and no result."""
        return False

    def first_request(self, task: Task) -> FirstRequest:
        """What is known of its first request before there is a sandbox: a run whose limits leave no room for a reply
        to it is refused."""
        return FirstRequest([{"role": "user", "content": task.prompt}])

    @abstractmethod
    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Work on `task` until done or out of budget. Raises `AgentFault` when the program itself breaks."""


class Chunk(NamedTuple):
    """Tokens as an engine emits them, all of one policy version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out. Knows no text: it stops on ids, the gateway on strings."""

    context: int
    """Longest sequence, prompt and output together, in tokens."""

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """Sample until a stop id (which is emitted), `max_tokens`, or the context is full.

        Closing the generator aborts the request. Raises `EngineFault`, and ValueError for a prompt that leaves no room.
        """

    @abstractmethod
    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Serve the weights at `path` as `version`, and return it once every later token is theirs.

        They are a safetensors file or a folder in Hugging Face layout, where `EngineSpec.adapters` also a folder of
        peft adapters on the model it was started with, and where `EngineSpec.receives` also an offer
        (`coderepairrl.sync.weights`). `checksum` is the SHA-256 in hex of the safetensors files, one after the other
        in the order of their names. Raises `EngineFault` when it differs or they do not fit; the old version then goes
        on serving, never a mixture. No prefix computed by older weights is reused.
        """

    def at(self, version: int) -> Engine:
        """The same engine for requests that are served by `version`, which it keeps (`EngineSpec.with_adapters`).
        Closing it leaves the engine as it is."""
        raise EngineFault("this engine serves one version at a time", fix="measure each policy in a call of its own")

    async def receivers(self) -> int:
        """How many processes take the weights of an offer; 0 where all weights come as files."""
        return 0

    @property
    def patience(self) -> float:
        """Seconds that the weights of an offer may take to arrive."""
        return 300.0

    async def sleep(self) -> None:
        """Give the memory of its device to others until `wake` or `load`, of which either wakes it; nothing to do where
        it sleeps. Open requests stay open and go on afterwards after what they have sampled; new ones wait.

        Raises `EngineFault`: it is dead then, or cannot sleep.
        """
        raise EngineFault("this engine cannot sleep", fix="engine.share_devices=false, or engine=vllm")

    async def wake(self) -> None:
        """Serve again what it served, if it sleeps. Raises `EngineFault`, as a rule with the death of the engine."""
        return

    @abstractmethod
    async def health(self) -> Mapping[str, float]:
        """Counters: ``version``, ``running``, ``generated_tokens``, ... Raises `EngineFault` when it is dead."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything."""


@runtime_checkable
class EngineSpec(Protocol):
    """An engine with its options, not started yet; this is what ``engine`` in a config names.

    Making one raises `ConfigError` for options that cannot be on any machine.
    """

    name: str
    receives: bool = False
    """Whether it takes full weights without a file."""
    exclusive: bool = False
    """Whether two of them at once would be in each other's way: they take the same GPUs, or replace each other's
    weights."""

    @property
    def adapters(self) -> bool:
        """Whether it loads adapters beside the weights that it is started with."""
        return False

    @property
    def takes_gpus(self) -> bool:
        """Whether `start` starts processes that compute on GPUs; others compute on the CPU, or run already."""
        return False

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens, where its options set one; None: the model's own."""
        return None

    def with_adapters(self, rank: int, count: int = 1) -> EngineSpec:
        """The same with room for adapters of this rank, itself if it takes none. Raises `ConfigError`.

        With a `count` its engine keeps that many of them at once, each of which `Engine.at` serves.
        """
        return self

    def on_gpus(self, visible: str) -> EngineSpec:
        """The same on these GPUs alone, as CUDA_VISIBLE_DEVICES has them. Asked only where it `takes_gpus`."""
        return self

    def with_sleep(self) -> EngineSpec:
        """The same, whose engine can `Engine.sleep`. Raises `ConfigError` if it cannot."""
        raise ConfigError(
            f"engine.share_devices=turns, and engine {self.name!r} cannot sleep",
            fix="engine=vllm, or leave engine.share_devices out: an engine on the CPU is in nobody's way",
        )

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` if it cannot serve the folder `model`, on any machine."""
        return

    def require(self) -> None:
        """Raise `PrerequisiteError`, with what helps, if this machine lacks what it needs. May take a second."""
        return

    def versions(self) -> Mapping[str, str]:
        """Versions of the packages of its own that it samples by. Raises `PrerequisiteError`, as `require`."""
        return {}

    @abstractmethod
    async def start(self, model: Path, *, log_dir: Path) -> Engine:
        """Serve the folder `model` (Hugging Face layout) as version 0; logs go to the folder `log_dir`.

        Raises `ConfigError` as `check_model`, `PrerequisiteError` as `require`, and `EngineFault`.
        """


@runtime_checkable
class Reward(Protocol):
    """Judges an episode's patch. It takes no options, and may be a plain function."""

    name: str
    repairs: bool = False
    """Promises 1 for the task's reference and 0 for a patch that repairs nothing; a run holds it to that before its
    first step. Habits, formats and costs promise nothing."""
    runs_checks: bool = False
    """Whether it runs the task's checks, so that its `Score.passed` verifies repairs."""
    takes_verified: bool = False
    """Whether it compares patches with `Task.verified`, too."""
    on_state: bool = False
    """Whether it judges the attempt's own workspace, as it stands at the end: `sandbox` then opens that one."""
    version: int = 1
    """Raised when the formula changes: values of two versions do not compare."""

    @abstractmethod
    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode; `sandbox` opens fresh workspaces for rewards that run code. Raises `RewardFault`."""

    def drawn(self, episode: Episode) -> bool:
        """Whether it scores this episode: one that costs much may score a sample."""
        return True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float | None:
        """The value of `patch` where `oracle` is the reference of a task in `language`; None where it needs more than
        two diffs. Raises `MalformedPatch` for what is no diff."""
        return None
