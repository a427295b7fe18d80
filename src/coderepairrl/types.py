"""Data types of the whole project: frozen, and free of torch.

A `Task` becomes an `Episode` of `Turn`s, an episode earns `Score`s, and the leaves of its tree of turns become the
`Sample`s that a policy is trained on.

    >>> given = TokenSpan((1, 2, 3), Origin.GIVEN)
    >>> sampled = TokenSpan((7, 8), Origin.POLICY, (-0.1, -0.5))
    >>> len(given), len(sampled)
    (3, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple


class Origin(StrEnum):
    """Author of a span's tokens."""

    GIVEN = "given"
    """Not sampled by the policy: template, prompt, tool output. Context, never trained."""
    POLICY = "policy"
    """Sampled by the policy."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Token ids of one origin; `logprobs` if and only if the policy sampled them.

    A logprob is ``log softmax(logits / T)`` of the sampled token, untruncated.

    >>> TokenSpan((5,), Origin.POLICY)
    Traceback (most recent call last):
    ...
    ValueError: a policy span carries one logprob per id: 1 ids, 0 logprobs
    """

    ids: tuple[int, ...]
    origin: Origin
    logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.origin is Origin.POLICY else 0
        if len(self.logprobs) != expected:
            raise ValueError(
                f"a {self.origin} span carries {'one logprob per id' if expected else 'no logprobs'}: "
                f"{len(self.ids)} ids, {len(self.logprobs)} logprobs"
            )

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Tokens ``start:end`` of a turn's output, sampled by policy `version`.

    >>> VersionRange(version=3, start=0, end=12)
    VersionRange(version=3, start=0, end=12)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for sampling tokens. The run's settings override a client's.

    `stop_ids` end a turn in the engine, `stop` strings in the gateway. Training needs plain temperature sampling:
    otherwise recorded logprobs would not be the trained policy's.

    >>> Sampling().trainable, Sampling(top_p=0.9).trainable, Sampling(temperature=0.0).trainable
    (True, False, False)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 1024
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether tokens sampled with these settings may be trained on."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


class Chunk(NamedTuple):
    """Tokens that an engine emitted, of one policy version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of an engine, given its options; known before it starts.

    >>> Capabilities(adapter_rank=8).uses_gpus
    False
    """

    adapter_rank: int = 0
    """Largest rank of adapters that it loads on its initial weights; 0: none, so it gets merged weights."""
    can_receive: bool = False
    """Whether it takes full weights without a file, as an offer (`coderepairrl.sync.weights`)."""
    can_sleep: bool = False
    """Whether it can release its GPUs for other processes."""
    uses_gpus: bool = False
    """Whether it starts GPU processes; others use the CPU, or run already."""
    is_exclusive: bool = False
    """Whether two such engines at once would conflict: over GPUs, or weights."""
    context: int | None = None
    """Longest sequence in tokens by its options; None: the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """A run's requirements for the engine that it starts.

    >>> EngineNeeds(adapter_rank=8, adapters=3).sleep
    False
    """

    adapter_rank: int = 0
    """Largest rank of the adapters that it loads; 0: none."""
    adapters: int = 1
    """Number of adapters that are served at the same time, each by its version."""
    gpus: str | None = None
    """GPUs that it may use (CUDA_VISIBLE_DEVICES); None: all."""
    sleep: bool = False
    """Whether it sleeps while other processes use its GPUs."""


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """A stop id or stop string: the model ended its message."""
    LENGTH = "length"
    """The turn's token budget was spent: the message is cut."""
    ABORT = "abort"
    """The client left; tokens sampled so far are recorded, not trained."""


SideCalls = Literal["mask", "tools", "train"]
"""Side calls of an agent (titles, summaries, sub-agents) to train: none (``mask``), those with tools
(``tools``), all (``train``).
"""


@dataclass(frozen=True, slots=True)
class Fork:
    """Branch inside an earlier turn: the prompt shares the first `tokens` ids and `messages` messages of `turn`."""

    turn: int
    tokens: int
    messages: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Model call, as the engine saw it.

    Turns form a tree. The engine's prompt was the sequence of `base`, or the part of a sequence named by `fork`
    (nothing for a root), then `given`; it sampled `output`, then possibly `tail`: tokens after a stop string, in no
    later prompt. ``given + output`` along a path from a root *is* what the engine saw (`sequence`): masking never
    searches text.

    >>> root = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), TokenSpan((9,), Origin.POLICY, (-0.2,)))
    >>> child = Turn(1, 0, TokenSpan((3,), Origin.GIVEN), TokenSpan((8,), Origin.POLICY, (-0.1,)))
    >>> sequence((root, child), 1)
    (1, 2, 9, 3, 8)
    """

    index: int
    base: int | None
    given: TokenSpan
    output: TokenSpan
    tail: TokenSpan = TokenSpan((), Origin.POLICY)
    versions: tuple[VersionRange, ...] = ()
    """Policy version per token range of ``output + tail``."""
    sampling: Sampling = Sampling()
    overridden: tuple[str, ...] = ()
    """Client settings replaced by the run's sampling, as ``name=value``."""
    finish: Finish = Finish.STOP
    dialect: str = "chat"
    digest: str = ""
    """Hash of the request body; joins a client's retry with the first call."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Request messages beyond those of `base` or `fork`, then the reply."""
    started: float = 0.0
    ended: float = 0.0
    """Unix seconds."""
    masked: str = ""
    """Why sampled tokens are not trained (``aborted``, ``sampling``, ``relayed``); empty if they are."""
    tools: tuple[str, ...] = ()
    """Names of offered tools."""
    schemas: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools, if they differ from those of `base` (`offered_tools`)."""
    fork: Fork | None = None
    """Branching point of a turn without `base`; None for a root."""
    remote: Mapping[str, Any] = field(default_factory=dict)
    """Remote server's report on a turn that it sampled, for information: ``usage``, ``finish_reason``, any ids.
    Such a turn's spans are empty.
    """

    @property
    def sampled(self) -> int:
        """Tokens sampled in this call, the cut tail included."""
        return len(self.output) + len(self.tail)


def sequence(turns: Sequence[Turn], leaf: int) -> tuple[int, ...]:
    """Ids in the engine's context after turn `leaf`.

    >>> output = TokenSpan((7, 8), Origin.POLICY, (-0.1, -0.5))
    >>> first = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), output)
    >>> other = Turn(1, None, TokenSpan((3,), Origin.GIVEN), output, fork=Fork(0, tokens=3, messages=1))
    >>> sequence((first, other), 1)
    (1, 2, 7, 3, 7, 8)
    """
    return tuple(sequence_list(turns, leaf))


def sequence_list(turns: Sequence[Turn], leaf: int) -> list[int]:
    """`sequence` as a mutable list."""
    ids: list[int] = []
    for turn, fork in _iterate_lineage(turns, leaf):
        ids += turn.given.ids
        ids += turn.output.ids
        if fork is not None:
            del ids[fork.tokens :]
    return ids


def conversation(turns: Sequence[Turn], leaf: int) -> tuple[Mapping[str, Any], ...]:
    """Messages of the conversation that turn `leaf` ends, reply included."""
    return tuple(message for message, _ in messages_with_turns(turns, leaf))


def messages_with_turns(turns: Sequence[Turn], leaf: int) -> list[tuple[Mapping[str, Any], Turn | None]]:
    """Messages of `conversation` with the turns that sampled them; None for the client's."""
    messages: list[tuple[Mapping[str, Any], Turn | None]] = []
    for turn, fork in _iterate_lineage(turns, leaf):
        messages += [(message, None) for message in turn.messages[:-1]]
        messages += [(message, turn) for message in turn.messages[-1:]]
        if fork is not None:
            del messages[fork.messages :]
    return messages


def _iterate_lineage(turns: Sequence[Turn], leaf: int) -> Iterator[tuple[Turn, Fork | None]]:
    """Turns in `leaf`'s context, from a root on, each with the fork that cuts the context after it."""
    chain: list[tuple[Turn, Fork | None]] = []
    at: int | None = leaf
    fork: Fork | None = None
    while at is not None:
        turn = turns[at]
        chain.append((turn, fork))
        fork = turn.fork
        at = turn.base if fork is None else fork.turn
    return reversed(chain)


def offered_tools(turns: Sequence[Turn], leaf: int) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas offered to turn `leaf`."""
    at: int | None = leaf if turns[leaf].tools else None
    while at is not None and not turns[at].schemas:
        at = turns[at].base
    return () if at is None else turns[at].schemas


def leaf_indices(turns: Sequence[Turn]) -> Iterator[int]:
    """Indices of turns that no other extends, in order."""
    extended = {turn.base for turn in turns}
    return (turn.index for turn in turns if turn.index not in extended)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call of an agent, as it happened.

    `command` lists the names of started commands, for statistics.

    >>> ToolCall(turn=0, name="shell", arguments='{"cmd": "ls"}', ok=True, output_chars=12, seconds=0.01).ok
    True
    """

    turn: int
    name: str
    arguments: str
    ok: bool
    output_chars: int = 0
    seconds: float = 0.0
    command: str = ""


class Ending(StrEnum):
    """End of an episode."""

    DONE = "done"
    LIMIT = "limit"
    """Calls, tokens, context or time were spent: the workspace is scored as it is, and flagged."""
    CRASH = "crash"
    """The agent broke after a reply, perhaps through the policy: the workspace is scored as it is, and flagged."""
    VOID = "void"
    """Infrastructure fault, or an agent that broke before any reply: retried, counted, not in the baseline, never a
    zero reward.
    """


@dataclass(frozen=True, slots=True)
class Score:
    """Value of one reward; an episode's reward is the weighted sum.

    >>> total((Score("patch_lines", 0.5, 0.6), Score("tests", 1.0, 0.4)))
    0.7
    """

    name: str
    value: float
    weight: float = 1.0
    note: str = ""
    passed: bool | None = None
    """Whether the patch passed the task's checks; None if not run."""
    nearest: str = ""
    """Episode whose repair (`Task.verified`) is nearer to the patch than the task's reference, if any."""


def total(scores: Sequence[Score]) -> float:
    """Weighted sum of `scores`."""
    return sum((score.value * score.weight for score in scores), 0.0)


@dataclass(frozen=True, slots=True)
class Episode:
    """Attempt at a task.

    `phase` is ``train`` or an evaluation's name; `step` the optimiser step that it started for (another may train on
    it). `patch` is ``git diff`` against the task's commit, `timings` seconds per activity
    (``generate``, ``tools``, ``sandbox``, ``diff``, ``reward``, ``total``).

    >>> Episode("e", "toy/1", "train", step=0, group="g", attempt=0, ending=Ending.DONE).reward
    0.0
    """

    id: str
    task_id: str
    phase: str
    step: int
    group: str
    attempt: int
    ending: Ending
    reason: str = ""
    """Cause of the end: ``submitted``, ``calls``, ``tokens``, ``time``, a crash (``exit 1``, ``SIGSEGV``,
    ``KeyError``), or the fault's boundary.
    """
    fault: str = ""
    """Fault message (VOID only)."""
    crash: str = ""
    """Crash, with traceback or last output (CRASH only)."""
    printed: str = ""
    """Output of an agent program, both streams interleaved: beginning and end."""
    turns: tuple[Turn, ...] = ()
    side: tuple[int, ...] = ()
    """Indices of turns outside the main conversation, not trained (`SideCalls`)."""
    tool_calls: tuple[ToolCall, ...] = ()
    patch: bytes = b""
    scores: tuple[Score, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""
    language: str = ""
    repository: str = ""
    difficulty: float | None = None
    """`kind` to `difficulty` are the task's, for grouping."""
    calls_known: bool = True
    """Whether the agent reported its tool calls; if not, `tool_calls` is empty."""

    @property
    def reward(self) -> float:
        """Weighted sum of the scores."""
        return total(self.scores)

    @property
    def sampled(self) -> int:
        """Tokens sampled by the policy."""
        return sum(turn.sampled for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Sample:
    """Spans of one leaf as a row for the learner.

    ``ids[i]`` is trained if ``trained[i]``; `logprobs` are the engine's (0.0 if not sampled), `versions` the policy
    versions (-1 if not sampled). `weight` is the row's share of its episode's trained tokens, so that forks do not
    raise an episode's weight.

    >>> Sample("e", (1, 9), (False, True), (0.0, -0.2), (-1, 0), advantage=1.0).trained
    (False, True)
    """

    episode_id: str
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantage: float
    weight: float = 1.0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """Check: `argv` run in the workspace for at most `timeout` seconds.

    `results` is the format of single tests: ``pytest``, ``unittest``, ``junit``, ``cargo``, ``go``, ``node``,
    ``harbor``, or a benchmark's rules, ``NAME:ARGUMENT`` (docs/guides/tasks.md); without it exit code 0 passes.
    `test_timeout` is the limit of one test in seconds (pytest, unittest), which then fails; 0: half of the remaining
    time.

    >>> Command(("python3", "-m", "unittest", "-q"), timeout=20.0).timeout
    20.0
    """

    argv: tuple[str, ...]
    timeout: float = 60.0
    results: str = ""
    test_timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class Checks:
    """Test of a repair: all `commands` must pass after `restore` (content by path), so that edited tests gain nothing.

    If tests are named, a command with `results` passes when all of both lists pass, whatever others do (SWE-bench's
    rule).

    >>> bool(Checks()), bool(Checks((Command(("true",)),)))
    (False, True)
    """

    commands: tuple[Command, ...] = ()
    restore: Mapping[str, str] = field(default_factory=dict)
    fail_to_pass: tuple[str, ...] = ()
    """Tests that fail on the bug and pass on the repair."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass on both."""
    workspace: str = ""
    """Workspace of the checks, if not the task's: the image with hidden tests."""
    collect: Mapping[str, str] = field(default_factory=dict)
    """Parts of the attempt for the last command, which runs in a fresh sandbox of `workspace`: by absolute path, the
    shell script that writes it as a tar archive (`grading.collect`). Earlier commands run in the attempt's sandbox.
    """

    @property
    def named(self) -> tuple[str, ...]:
        """Tests of both lists."""
        return self.fail_to_pass + self.pass_to_pass

    def __bool__(self) -> bool:
        return bool(self.commands)


@dataclass(frozen=True, slots=True)
class VerifiedRepair:
    """A repair by the policy that passed the checks in an earlier step: a further reference.

    >>> VerifiedRepair(b"", "train-00001-000-03", step=1).step
    1
    """

    patch: bytes
    episode: str
    step: int


@dataclass(frozen=True, slots=True)
class Task:
    """Repository with a bug, or a question.

    `id` is stable across machines. `workspace` is ``dir:PATH`` (a folder, or a git repository at HEAD), ``git:URL@SHA``
    or ``image:NAME@DIGEST``; empty for a question without files, which opens no sandbox. `reference` is the oracle
    patch; it never enters an agent's sandbox.

    >>> Task("toy/add", "add() subtracts.", "python", "dir:/srv/toy", b"").split
    'train'
    >>> Task("cwe/7", "Which weakness is it?", "c", "", b"", answer="CWE-79").workspace
    ''
    """

    id: str
    prompt: str
    language: str
    workspace: str
    reference: bytes
    checks: Checks = Checks()
    environment: str = ""
    """``venv:FOLDER``: virtual environment on this machine, read-only in sandboxes and first on ``PATH``;
    ``python:JSON``: built from a specification (`environments.build.Specification`); other text is a fingerprint of
    the environment in which checks were verified.
    """
    split: str = "train"
    licence: str = ""
    difficulty: float | None = None
    repository: str = ""
    """``OWNER/NAME``. Bugs of one repository are not independent."""
    created: str = ""
    """Date of the issue or repair, ``YYYY-MM-DD``: models trained later may have seen it."""
    kind: str = ""
    """Selects agent, limits and rewards (config section ``kinds``); empty: the run's."""
    answer: str = ""
    """Text that the last reply must contain, such as ``CWE-79``, if the task is a question."""
    verified: tuple[VerifiedRepair, ...] = ()
    """Further references on the rewards' copy of the task; agents never see them."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits below the run's: ``seconds`` of an attempt; ``memory`` and ``disk_bytes`` in bytes, and ``cpus``, of a
    sandbox.
    """


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command in a sandbox; `output` is both streams, interleaved.

    >>> ExecResult(0, b"ok\\n").ok
    True
    """

    exit_code: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False
    """More than `max_bytes` was printed; the rest was discarded."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """Properties of a backend's sandboxes on this machine.

    >>> SandboxInfo(isolates=True, limits={"memory": 1 << 30}).limits["memory"] >> 20
    1024
    """

    isolates: bool = False
    """Whether commands are isolated from the machine. Harmful attempts are made only then."""
    user: int | None = None
    """Host's user id for commands; None: this process's."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of a sandbox: bytes of ``memory``, ``file_bytes`` of one file, ``disk_bytes``, ..."""
    limits_kept: str = "by means of its own"
    """How the limits are enforced, for display."""
    workspaces: str = "by means of its own"
    """How workspaces are opened, for display."""
    slowdown: float = 3.0
    """Longest time of a short command, as a multiple of the host's."""


class FirstRequest(NamedTuple):
    """First request of an agent to a model, in OpenAI's chat format."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode, for any agent.

    `tokens` limits the longest sequence: prompt, outputs and tool results.

    >>> Limits().calls
    30
    """

    calls: int = 30
    """Tool calls (the agent's own limit); the gateway refuses model calls beyond ``calls + 2``."""
    tokens: int = 10_240
    seconds: float = 60.0
    turn_tokens: int = 4_096
    """Most tokens in one reply."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """OpenAI-compatible API for an agent; its base URL carries the episode's key.

    >>> Endpoint("http://127.0.0.1:8000/s/KEY/v1", "KEY", "policy").model
    'policy'
    """

    base_url: str
    api_key: str
    model: str
    limits: Limits = Limits()
    socket: str = ""
    """Gateway's Unix socket, for agents inside a sandbox (`Sandbox.reach`)."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Agent's account of its end; `tool_calls` is None if not counted.

    `exit` is ``submitted``, or the limit: ``calls``, ``tokens``, ``time``.

    >>> AgentReport("submitted").exit
    'submitted'
    """

    exit: str
    tool_calls: tuple[ToolCall, ...] | None = None
    log: str = ""
