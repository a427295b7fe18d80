"""The five seams of the project on one page.

Each has a scripted fake beside its real implementations and an exam, ``crrl check KIND NAME``. A class of your
own is named by import path in the config (``engine = "mypackage.engines:MyEngine"``) and sits the same exam.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from coderepairrl.types import AgentReport, Endpoint, Episode, ExecResult, Sampling, Score, Task


@runtime_checkable
class TaskSource(Protocol):
    """Where tasks come from."""

    name: str

    def prepare(self) -> None:
        """Fetch and cache whatever the tasks need. Raises `TaskError` naming the task and the fix."""
        ...

    def __iter__(self) -> Iterator[Task]: ...


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
        """Run `argv` (no shell) to its end, its whole process tree gone afterwards."""
        ...

    async def read(self, path: str) -> bytes:
        """Bytes of a file, `path` relative to `workdir`.

        Raises OSError for whatever an agent can bring about: FileNotFoundError, PermissionError (outside), ...
        """
        ...

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file (and its folders), keeping its mode.

        With `follow` links are followed, inside the workspace only. Without, `path` afterwards is a file of its own in
        folders that are no links: links on the way give place to folders, and other names of the file keep its content.

        Raises OSError likewise, with the file as it was: PermissionError (outside), ENOSPC (a full workspace), ...
        """
        ...

    async def reach(self, address: str) -> str:
        """Bridge the host's Unix socket `address` to the guest's loopback; returns ``http://127.0.0.1:PORT``."""
        ...

    async def diff(self) -> bytes:
        """The change against the task's commit, new, staged and committed files included, as git applies it.

        No process of the guest is alive while it is taken, and none of the agent's code runs.
        """
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """A way to isolate: `bwrap`, `docker`, ..., `unsafe-local`."""

    name: str

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox for `task`; leaving the context destroys it. Raises `SandboxFault`, `TaskError`."""
        ...


@runtime_checkable
class Agent(Protocol):
    """Something that repairs code by calling a model.

    One placed in the sandbox may name folders of the host that it must see there in an attribute `binds`. One that
    makes calls beside its main conversation may say in an attribute `side_calls` what becomes of them (`SideCalls`).
    """

    name: str
    placement: Literal["host", "sandbox"]

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Work on `task` until done or out of budget. Raises `AgentFault` when the program itself breaks."""
        ...


class Chunk(NamedTuple):
    """Tokens as an engine emits them, all of one policy version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out. Knows no text: it stops on ids, the gateway on strings."""

    name: str
    context: int
    """Longest sequence, prompt and output together, in tokens."""

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """Sample until a stop id (which is emitted), `max_tokens`, or the context is full.

        Closing the generator aborts the request. Raises `EngineFault`, and ValueError for a prompt that leaves
        no room.
        """
        ...

    @abstractmethod
    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Serve the weights at `path` as `version`, and return it once every later token is theirs.

        They are a safetensors file or a folder in Hugging Face layout, where `EngineSpec.adapters` also a folder of
        peft adapters on the model it was started with, and where `EngineSpec.receives` also an offer
        (`coderepairrl.sync.weights`). `checksum` is the SHA-256 in hex of the safetensors files, one after the other
        in the order of their names. Raises `EngineFault` when it differs or they do not fit; the old version then goes
        on serving, never a mixture. No prefix computed by older weights is reused.
        """
        ...

    async def receivers(self) -> int:
        """How many processes take the weights of an offer; 0 where all weights come as files."""
        return 0

    @property
    def patience(self) -> float:
        """Seconds that the weights of an offer may take to arrive."""
        return 300.0

    @abstractmethod
    async def pause(self) -> None:
        """Hold all requests where they are."""
        ...

    @abstractmethod
    async def resume(self) -> None:
        """Let held requests go on."""
        ...

    @abstractmethod
    async def health(self) -> Mapping[str, float]:
        """Counters: ``version``, ``running``, ``generated_tokens``, ... Raises `EngineFault` when it is dead."""
        ...

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and release everything."""
        ...


@runtime_checkable
class EngineSpec(Protocol):
    """An engine with its options, not started yet: what ``engine = "module:Class"`` in a config names.

    It is made of ``engine.options`` by keyword and raises `ConfigError` for those that cannot be on any machine.

        class Mine(EngineSpec):
            name = "mine"

            async def start(self, model: Path, *, log_dir: Path) -> Engine:
                return MyEngine(model)
    """

    name: str

    @property
    def adapters(self) -> bool:
        """Whether it loads adapters beside the weights that it is started with."""
        return False

    @property
    def receives(self) -> bool:
        """Whether it takes full weights without a file."""
        return False

    @property
    def takes_gpus(self) -> bool:
        """Whether `start` starts processes that compute on GPUs; others compute on the CPU, or run already."""
        return False

    def with_adapters(self, rank: int) -> EngineSpec:
        """The same with room for adapters of this rank, itself if it takes none.

        Raises `ConfigError` where its options leave less room.
        """
        return self

    def on_gpus(self, visible: str) -> EngineSpec:
        """The same on these GPUs alone, in the words of CUDA_VISIBLE_DEVICES. Asked only where it `takes_gpus`."""
        return self

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` if it cannot serve the folder `model`, whichever machine it is."""

    def require(self) -> None:
        """Raise `PrerequisiteError`, with what helps, if this machine lacks what it needs. May take a second."""

    def versions(self) -> Mapping[str, str]:
        """Versions of the packages of its own that it samples by. Raises `PrerequisiteError`, as `require`."""
        return {}

    @abstractmethod
    async def start(self, model: Path, *, log_dir: Path) -> Engine:
        """Serve the folder `model` (Hugging Face layout) as version 0; logs go to the folder `log_dir`.

        Raises `ConfigError` as `check_model`, `PrerequisiteError` as `require`, and `EngineFault`.
        """
        ...


@runtime_checkable
class Reward(Protocol):
    """Judges an episode's patch.

    A class that measures whether the task is repaired declares it by a true attribute `repairs`: it promises 1 for the
    task's reference and 0 for a patch that repairs nothing, and a run holds it to that before its first step. Without
    the attribute (habits, formats, costs, one of your own) nothing is promised. One with a true attribute `on_state` is
    asked while the attempt's own workspace is open, which is what `sandbox` opens for it: as it stands at the end.
    """

    name: str

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode; `sandbox` opens fresh workspaces for rewards that run code. Raises `RewardFault`."""
        ...
