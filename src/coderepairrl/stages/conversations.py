"""Conversations of attempts, from run folders and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl import models, tasks, tokens
from coderepairrl.config import Config
from coderepairrl.errors import CodeRepairError, UsageError
from coderepairrl.learn import stitch_episode
from coderepairrl.report.metrics import find_agents_by_kind
from coderepairrl.report.trajectories.chats import Chat, convert_to_chat_message, has_secrets
from coderepairrl.rewards.parse import MalformedPatch
from coderepairrl.rewards.verified import compute_identity
from coderepairrl.runs import logged_episodes, open_run
from coderepairrl.runs.codec import digest_json
from coderepairrl.runs.examples import EXAMPLES_FILE, Example, read_examples
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import (
    Ending,
    Episode,
    Finish,
    Sample,
    Sampling,
    Turn,
    leaf_indices,
    messages_with_turns,
    offered_tools,
    sequence,
)

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Candidate:
    """Facts about an attempt that filters use."""

    source: int
    """Index of its run or file."""
    episode: str
    task: str
    repository: str = ""
    language: str = ""
    ending: str = "done"
    reward: float | None = None
    """None if it was not judged."""
    passed: bool | None = None
    """Whether its checks passed; None if there were none."""
    malformed: str = ""
    """What is wrong with its tool calls, or empty."""
    patch: str = ""
    """Digest of the patch's effect; empty for a patch without effect."""
    conversation: str = ""
    """Digest of its messages."""

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the attempt."""
        return self.source, self.episode


@dataclass(frozen=True)
class RecordedAttempts:
    """Attempts in a run folder, without those of a training's evaluations.

    Raises `UsageError` without a run or for a task source that is not shipped, `ConfigError` for an evaluation set.
    """

    path: Path

    def __post_init__(self) -> None:
        if self._is_training or "holdout" in self._about:  # `crrl train` and `collect` take training tasks only
            return
        settings = self._config.tasks
        for each in self._config.eval.each.values():
            sources = settings.sources or (settings,)
            for section in (each,) if each.source else sources:
                if section.source not in tasks.SHIPPED:  # a run from elsewhere must not import a class
                    raise UsageError(
                        f"{self.path} measured {section.source}, which may be an evaluation set",
                        fix=f"learn from attempts of crrl collect {section.source} --policy POLICY",
                    )
                tasks.check_trainable(tasks.make_source(section.source, **section.options).evaluation_set)

    def candidates(self, number: int) -> Iterator[Candidate]:
        """Candidates from valid attempts. Raises `RunError`."""
        for episode in self._iter_episodes(lambda name: True):
            yield _make_candidate(number, episode)

    def examples(self, is_wanted: Callable[[str], bool]) -> Iterator[Example]:
        """Conversations of attempts whose id `is_wanted`. Raises `UsageError` if the sampling model is gone."""
        for episode in self._iter_episodes(is_wanted):
            yield from self._make_examples(episode)

    def _iter_episodes(self, is_wanted: Callable[[str], bool]) -> Iterator[Episode]:
        for episode in logged_episodes(open_run(self.path).records(), is_wanted):
            if episode.ending is not Ending.VOID and (not self._is_training or episode.phase == "train"):
                yield episode

    def _make_examples(self, episode: Episode) -> Iterator[Example]:
        agents = find_agents_by_kind(self._config.model_dump(mode="json"), episode.phase)
        models_of_server = sorted({str(turn.remote.get("model", "")) for turn in episode.turns if turn.remote})
        common = Example(
            id="",  # set for each conversation
            episode=episode.id,
            task_id=episode.task_id,
            repository=episode.repository,
            language=episode.language,
            kind=episode.kind,
            source=self.path.name,
            agent=agents.get(episode.kind, agents[""]),
            policy=", ".join(filter(None, models_of_server)) or str(self._about.get("policy") or self.path.name),
            reward=episode.reward,
            passed=is_resolved(episode),
        )
        rows: list[tuple[int, Sample | None]] = [*_sampled_rows(episode)]
        if not rows and (last := _find_last_turn(episode)) is not None:
            rows = [(last, None)]
        for number, (leaf, row) in enumerate(rows):
            messages, tools = _leaf_messages(episode.turns, leaf), offered_tools(episode.turns, leaf)
            example = replace(common, id=f"{episode.id}/{number}", messages=messages, tools=tools)
            if row is not None:
                example = replace(example, ids=row.ids, trained=row.trained, tokenizer=self._tokenizer)
            yield example

    @property
    def _is_training(self) -> bool:
        return "policy" not in self._about  # which `crrl eval` and `collect` record

    @cached_property
    def _about(self) -> Mapping[str, Any]:
        return open_run(self.path).about()

    @cached_property
    def _config(self) -> Config:
        return configs.load_run(self.path)

    @cached_property
    def _tokenizer(self) -> str:
        folder = self.path / "model"
        try:
            if not folder.is_dir():
                folder = models.resolve_model(str(self._about.get("policy") or self._config.model.path)).folder
            return tokens.digest_tokenizer(folder)
        except CodeRepairError as error:
            raise UsageError(
                f"{self.path} has token ids of a model that cannot be read: {error}",
                fix="put the model back: its tokenizer turns the ids into text",
            ) from None


@dataclass(frozen=True)
class ExampleFile:
    """Examples of a file, or a folder with one."""

    path: Path

    def candidates(self, number: int) -> Iterator[Candidate]:
        """Candidates of source `number`. Raises `UsageError`."""
        by_episode: dict[str, list[Example]] = {}
        for example in self._rows:
            by_episode.setdefault(example.episode, []).append(example)
        for name, examples in by_episode.items():
            first = examples[0]
            conversations = [_comparable_messages(each.messages) for each in examples]
            yield Candidate(
                number,
                name,
                first.task_id,
                first.repository,
                first.language,
                reward=first.reward,
                passed=first.passed,
                malformed=next(filter(None, (_find_malformed(each.messages, each.tools) for each in examples)), ""),
                # one conversation has the same digest as in `_make_candidate`
                conversation=digest_json(conversations if len(conversations) > 1 else conversations[0]),
            )

    def examples(self, is_wanted: Callable[[str], bool]) -> Iterator[Example]:
        """Examples of attempts whose id `is_wanted`."""
        return (example for example in self._rows if is_wanted(example.episode))

    @cached_property
    def _rows(self) -> list[Example]:
        return read_examples(self.path)


def open_conversations(path: Path) -> RecordedAttempts | ExampleFile:
    """Open a run folder, a file of examples, or a folder with one. Raises `UsageError`."""
    file = path / EXAMPLES_FILE if path.is_dir() else path
    if file.is_file() and not (path / "run.json").is_file():
        return ExampleFile(file)
    return RecordedAttempts(open_run(path).path)


def _make_candidate(number: int, episode: Episode) -> Candidate:
    leaf = _find_last_turn(episode)
    messages = () if leaf is None else _leaf_messages(episode.turns, leaf)
    malformed = "it has no reply" if leaf is None else _find_malformed(messages, offered_tools(episode.turns, leaf))
    if any(turn.remote and turn.finish is Finish.LENGTH for turn in episode.turns):
        malformed = malformed or "a reply was cut at its maximum length"
    return Candidate(
        number,
        episode.id,
        episode.task_id,
        episode.repository,
        episode.language,
        episode.ending.value,
        episode.reward,
        is_resolved(episode),
        malformed,
        _patch_digest(episode.patch),
        digest_json(_comparable_messages(messages)),
    )


def _sampled_rows(episode: Episode) -> Iterator[tuple[int, Sample]]:
    """Rows of sampled tokens, each with its last turn."""
    if any(has_secrets(Chat(messages_with_turns(episode.turns, leaf), False)) for leaf in leaf_indices(episode.turns)):
        return  # ids would reveal the secret
    # imitation compares no logprobs, so it also learns from tokens whose sampling settings RL does not allow
    turns = tuple(
        replace(turn, sampling=Sampling(), masked="" if turn.masked == "sampling" else turn.masked)
        for turn in episode.turns
    )
    rows, _ = stitch_episode(replace(episode, turns=turns), advantage=1.0, max_tokens=_NO_LIMIT)
    if not rows:
        return
    last_turns = {sequence(turns, turn.index): turn.index for turn in reversed(turns)}  # the first of equal ones wins
    for row in rows:
        yield last_turns[row.ids], row


def _find_last_turn(episode: Episode) -> int | None:
    """Last complete turn of the main conversation, or None."""
    turns = episode.turns
    index = max((leaf for leaf in leaf_indices(turns) if leaf not in episode.side), default=None)
    while index is not None and turns[index].finish is Finish.ABORT:
        index = turns[index].base
    return index


def _leaf_messages(turns: Sequence[Turn], leaf: int) -> tuple[Mapping[str, Any], ...]:
    """Messages of the conversation that turn `leaf` ends, without secrets."""
    messages = (convert_to_chat_message(each) for each, _ in messages_with_turns(turns, leaf))
    return tuple({key: value for key, value in each.items() if value is not None} for each in messages)


def _find_malformed(messages: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]) -> str:
    """Describe the first malformed or unoffered tool call; else empty."""
    names = {(tool.get("function") or {}).get("name") for tool in tools}
    calls = [call for each in messages if each["role"] == "assistant" for call in each.get("tool_calls") or ()]
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if names and name not in names:
            return f"a call of {name!r}, which was not offered"
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(arguments), dict):
                continue
        return f"a call of {name!r} with {arguments[:40]!r}, which is not a JSON object"
    return ""


def _patch_digest(patch: bytes) -> str:
    """Digest of a patch's effect; empty without effect."""
    try:
        effect = compute_identity(patch)
    except MalformedPatch:
        return hashlib.sha256(patch).hexdigest()
    return hashlib.sha256(repr(sorted(map(repr, effect))).encode()).hexdigest() if effect else ""


def _comparable_messages(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    # without ids of calls, which differ by attempt
    keys = ("role", "content", "reasoning_content")
    return [[*map(each.get, keys), [call["function"] for call in each.get("tool_calls") or ()]] for each in messages]
