"""The nouns of the whole project: frozen, typed, and free of torch.

Data flows one way: a `Task` becomes an `Episode` of `Turn`s, an episode earns `Score`s, and the leaves of its
tree of turns become the `Sample`s that a policy is trained on.

    >>> given = TokenSpan((1, 2, 3), Origin.GIVEN)
    >>> sampled = TokenSpan((7, 8), Origin.POLICY, (-0.1, -0.5))
    >>> len(given), len(sampled)
    (3, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class Origin(StrEnum):
    """Where the tokens of a span come from."""

    GIVEN = "given"
    """Written by others than the policy: template, prompt, tool output. Context, never trained."""
    POLICY = "policy"
    """Sampled by the policy."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Token ids with one origin. `logprobs` are there if and only if the policy sampled them.

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
    """Tokens ``start:end`` of a turn's output were sampled by policy `version`.

    >>> VersionRange(version=3, start=0, end=12)
    VersionRange(version=3, start=0, end=12)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. The run's sampling overrides a client's.

    `stop_ids` end a turn in the engine, `stop` strings in the gateway. Training with anything but a bare
    temperature is refused, since the recorded logprobs would not be those of the trained policy.

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
        """Whether tokens drawn like this may be trained on."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """A stop id or stop string: the model ended its message."""
    LENGTH = "length"
    """The turn's token budget was spent: the message is cut."""
    ABORT = "abort"
    """The client went away; what was sampled by then is recorded and not trained."""


"""Whether recorded tokens stand for text that a client repeats, or what the client sent is rendered."""
SideCalls = Literal["mask", "tools", "train"]
"""Which calls beside an agent's main conversation (titles, summaries, sub-agents) are trained: ``mask`` none, ``tools``
those that were given tools, ``train`` all."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a prompt leaves what was recorded, inside a turn: it begins with the first `tokens` ids of the sequence of
    `turn`, and its conversation with the first `messages` messages of that turn's."""

    turn: int
    tokens: int
    messages: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call, as the engine saw it.

    Turns form a tree. The engine's prompt was the whole sequence of `base`, or the beginning of a sequence that `fork`
    names (nothing for a root), then `given`; it sampled `output`, then possibly `tail`: tokens after a stop string,
    which were sampled but belong to no later prompt. Concatenating ``given + output`` along a path from a root *is*
    what the engine saw (`sequence`), so masking never searches text.

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
    """Client settings that the run's sampling replaced, as ``name=value``."""
    finish: Finish = Finish.STOP
    dialect: str = "chat"
    digest: str = ""
    """Hash of the request body, by which a client's retry joins the first call."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The request's messages that `base`, or the beginning that `fork` names, had not yet seen, then the reply."""
    started: float = 0.0
    ended: float = 0.0
    """Unix seconds."""
    masked: str = ""
    """Why this turn's sampled tokens are not trained (``aborted``, ``sampling``, ``relayed``); empty if they are."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the request offered."""
    schemas: tuple[Mapping[str, Any], ...] = ()
    """Their schemas, where `base` does not have the same ones (`offered`)."""
    fork: Fork | None = None
    """Of a turn without `base`: where it branches off inside another. None of a root."""
    remote: Mapping[str, Any] = field(default_factory=dict)
    """What a remote server reported of a turn that it sampled: ``usage``, ``finish_reason``, ids if it gave any. For
    information: such a turn has no spans."""

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled in this call, the cut tail included."""
        return len(self.output) + len(self.tail)


def path(turns: Sequence[Turn], leaf: int) -> tuple[Turn, ...]:
    """The turns of which each extends the whole one before, up to `leaf`. `turns` are indexed by `Turn.index`.

    The first is a root, or forks inside a turn that is not among them.
    """
    chain: list[Turn] = []
    at: int | None = leaf
    while at is not None:
        chain.append(turns[at])
        at = turns[at].base
    return tuple(reversed(chain))


def sequence(turns: Sequence[Turn], leaf: int) -> tuple[int, ...]:
    """Every id that the engine had in context after turn `leaf`, in order.

    >>> output = TokenSpan((7, 8), Origin.POLICY, (-0.1, -0.5))
    >>> first = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), output)
    >>> other = Turn(1, None, TokenSpan((3,), Origin.GIVEN), output, fork=Fork(0, tokens=3, messages=1))
    >>> sequence((first, other), 1)
    (1, 2, 7, 3, 7, 8)
    """
    return tuple(sequence_list(turns, leaf))


def sequence_list(turns: Sequence[Turn], leaf: int) -> list[int]:
    """`sequence`, to be added to."""
    ids: list[int] = []
    for turn, kept in _lineage(turns, leaf):
        ids += turn.given.ids
        ids += turn.output.ids
        if kept is not None:
            del ids[kept.tokens :]
    return ids


def conversation(turns: Sequence[Turn], leaf: int) -> tuple[Mapping[str, Any], ...]:
    """Every message of the conversation that turn `leaf` ends, its reply included."""
    return tuple(message for message, _ in replies(turns, leaf))


def replies(turns: Sequence[Turn], leaf: int) -> list[tuple[Mapping[str, Any], Turn | None]]:
    """As `conversation`, each message with the turn that it is the reply of; None for one that the client sent."""
    messages: list[tuple[Mapping[str, Any], Turn | None]] = []
    for turn, kept in _lineage(turns, leaf):
        messages += [(message, None) for message in turn.messages[:-1]]
        messages += [(message, turn) for message in turn.messages[-1:]]
        if kept is not None:
            del messages[kept.messages :]
    return messages


def _lineage(turns: Sequence[Turn], leaf: int) -> Iterator[tuple[Turn, Fork | None]]:
    """The turns that made what `leaf` had in context, from a root on; after a turn, what a fork keeps of all so far."""
    chain: list[tuple[Turn, Fork | None]] = []
    at: int | None = leaf
    kept: Fork | None = None
    while at is not None:
        turn = turns[at]
        chain.append((turn, kept))
        kept = turn.fork
        at = turn.base if kept is None else kept.turn
    return reversed(chain)


def offered(turns: Sequence[Turn], leaf: int) -> tuple[Mapping[str, Any], ...]:
    """The schemas of the tools that the request of turn `leaf` offered; none of runs that older versions logged."""
    if not turns[leaf].tools:
        return ()
    return next((turn.schemas for turn in reversed(path(turns, leaf)) if turn.schemas), ())


def leaves(turns: Sequence[Turn]) -> Iterator[int]:
    """Indices of the turns that no other turn extends, in order."""
    extended = {turn.base for turn in turns}
    return (turn.index for turn in turns if turn.index not in extended)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an agent, as it happened.

    `command` is the first words of what ran, for statistics of what agents run.

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
    """How an episode ended."""

    DONE = "done"
    LIMIT = "limit"
    """Calls, tokens, context or time were spent: scored on what stands in the tree, and flagged."""
    CRASH = "crash"
    """The agent program broke after the model had replied, by whatever the policy made it do: scored on what stands in
    the tree, and flagged."""
    VOID = "void"
    """An infrastructure fault, or an agent that broke before any reply: outside the baseline, retried, counted, never a
    zero."""


@dataclass(frozen=True, slots=True)
class Score:
    """The value of one reward for an episode. The episode's reward is the weighted sum.

    >>> total((Score("patch_lines", 0.5, 0.6), Score("tests", 1.0, 0.4)))
    0.7
    """

    name: str
    value: float
    weight: float = 1.0
    note: str = ""
    passed: bool | None = None
    """Whether the patch passed the task's checks, from a reward that ran them; None where none were run."""
    nearest: str = ""
    """The episode whose repair (`Task.verified`) is nearer to the patch than the task's own reference, if one is."""


def total(scores: Sequence[Score]) -> float:
    """Weighted sum of `scores`."""
    return sum((score.value * score.weight for score in scores), 0.0)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one task.

    `phase` is ``train`` or the name of an evaluation; `step` the optimiser step for which it was begun. Which step
    consumed it, the record of that step says.
    `patch` are the bytes of ``git diff`` against the task's commit, `timings` seconds per activity
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
    """In a word, why it ended: ``submitted``, ``calls``, ``tokens``, ``time``, how a program crashed (``exit 1``,
    ``SIGSEGV``, ``KeyError``), or the fault's boundary."""
    fault: str = ""
    """Of a void episode: what failed."""
    crash: str = ""
    """Of an episode that ended in a crash: how, with the traceback or the last that the program printed."""
    printed: str = ""
    """What an agent program printed, both streams in the order they were written: the beginning and the end of it."""
    turns: tuple[Turn, ...] = ()
    side: tuple[int, ...] = ()
    """Turns beside the main conversation, which are not trained (`SideCalls`), by index."""
    tool_calls: tuple[ToolCall, ...] = ()
    patch: bytes = b""
    scores: tuple[Score, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""
    language: str = ""
    repository: str = ""
    difficulty: float | None = None
    """These four are the task's, so that a table of episodes can be grouped by them."""
    calls_known: bool = True
    """Whether the agent said which tools it called. Of a program that does not, or that broke, `tool_calls` is empty
    and means nothing."""

    @property
    def reward(self) -> float:
        """Weighted sum of the scores."""
        return total(self.scores)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(turn.sampled for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Sample:
    """The spans of one leaf, flattened to one row for the learner.

    ``ids[i]`` is trained iff ``trained[i]``; `logprobs` are the engine's (0.0 where nothing was sampled) and
    `versions` the policy version of each token (-1 where nothing was sampled). `weight` is the row's share of
    its episode's trained tokens, so that a forked episode weighs no more than a straight one; `group` is that of the
    episode.

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
    """A check: `argv` run in the workspace, for at most `timeout` seconds.

    `results` is the format of its reports on single tests: ``pytest``, ``unittest``, ``junit``, ``cargo``, ``go``,
    ``node``, ``harbor``, or the rules of a benchmark, ``NAME:ARGUMENT`` (docs/guides/tasks.md). Without it the exit
    code decides: 0 passes.
    `test_timeout` are the seconds that one test may take where pytest or unittest is asked: one that takes longer has
    failed, and the others still run. 0 is half of the time that is left, so that some is left for the others.

    >>> Command(("python3", "-m", "unittest", "-q"), timeout=20.0).timeout
    20.0
    """

    argv: tuple[str, ...]
    timeout: float = 60.0
    results: str = ""
    test_timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class Checks:
    """How a repair is tested: `commands` that must all pass after the files in `restore` were put back.

    `restore` maps a path in the workspace to its content; an agent that edits its tests gains nothing. Where tests are
    named, a command with `results` passes when all of both lists pass, whatever the others do (SWE-bench's rule).

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
    """Where they run, if not in a fresh workspace of the task: the image with tests that agents must not see."""

    @property
    def named(self) -> tuple[str, ...]:
        """The tests of both lists."""
        return self.fail_to_pass + self.pass_to_pass

    def __bool__(self) -> bool:
        return bool(self.commands)


@dataclass(frozen=True, slots=True)
class Verified:
    """A repair by the policy itself that passed its task's checks in an earlier step: a further reference.

    `episode` is its id.

    >>> Verified(b"", "train-00001-000-03", step=1).step
    1
    """

    patch: bytes
    episode: str
    step: int


@dataclass(frozen=True, slots=True)
class Task:
    """A repository with a bug, or a question, and what is known of it.

    `id` is stable across machines. `workspace` is ``dir:PATH`` (a folder, or a git repository at its HEAD),
    ``git:URL@SHA`` or ``image:NAME@DIGEST``; empty for a question that needs no files, for which no sandbox is opened.
    `reference` is the oracle patch; it never enters an agent's sandbox.

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
    """``venv:FOLDER``: a virtual environment on this machine, which sandboxes show read-only and put first on ``PATH``;
    ``python:JSON``: one that is built from a specification, on any machine (`environments.Specification`); any other
    text is a fingerprint of the environment in which the checks were verified."""
    split: str = "train"
    licence: str = ""
    difficulty: float | None = None
    repository: str = ""
    """Where the bug is from, as ``OWNER/NAME``. Bugs of one repository are no independent observations."""
    created: str = ""
    """When the issue was written or the bug repaired, as ``YYYY-MM-DD``: a model that was trained later may know it."""
    kind: str = ""
    """Chooses agent, limits and rewards (config section ``kinds``); empty is what the run has for all."""
    answer: str = ""
    """Of a task that is answered and not repaired, what the last reply must contain: a label such as ``CWE-79``."""
    verified: tuple[Verified, ...] = ()
    """Further references, on the copy of the task that rewards are given; agents get a task without any."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command in a sandbox did. Output is bytes, both streams in the order they were written.

    >>> ExecResult(0, b"ok\\n").ok
    True
    """

    exit_code: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False
    """More was printed than `max_bytes`; the rest was read and thrown away."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may spend, for any agent.

    `tokens` counts the longest sequence of the episode: prompt, outputs and tool results.

    >>> Limits().calls
    30
    """

    calls: int = 30
    """Tool calls (the agent's own limit); the gateway refuses model calls beyond ``calls + 2``."""
    tokens: int = 10_240
    seconds: float = 60.0
    turn_tokens: int = 4_096
    """At most so many tokens in one reply."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds its model: an OpenAI-compatible API whose base URL carries the episode's key.

    >>> Endpoint("http://127.0.0.1:8000/s/KEY/v1", "KEY", "policy").model
    'policy'
    """

    base_url: str
    api_key: str
    model: str
    limits: Limits = Limits()
    socket: str = ""
    """Unix socket of the gateway, for agents inside a sandbox (`Sandbox.reach`)."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """How an agent ended, by its own account. `tool_calls` is None when it does not count them.

    `exit` is ``submitted``, or the limit that ended it: ``calls``, ``tokens``, ``time``.

    >>> AgentReport("submitted").exit
    'submitted'
    """

    exit: str
    tool_calls: tuple[ToolCall, ...] | None = None
    log: str = ""
