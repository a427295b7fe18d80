"""Pages of a run folder, decoded by its tokenizer."""

from __future__ import annotations

import contextlib
import difflib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coderepairrl import config, models
from coderepairrl.config.schema import Config
from coderepairrl.errors import CodeRepairError, UsageError
from coderepairrl.learn.stitch import list_fates
from coderepairrl.processes.installs import install_extra
from coderepairrl.report.analysis import Report, analyse_run
from coderepairrl.report.conversation import build_conversation
from coderepairrl.report.episodes import (
    EpisodeView,
    make_attempt_column,
    render_episode,
    render_group,
    render_list,
    render_task,
)
from coderepairrl.report.kit import PageContext, parse_diff_lines
from coderepairrl.report.reading import read_run
from coderepairrl.report.rows import OPEN, UNFINISHED, EpisodeRow, EpisodeRows
from coderepairrl.runs import open_run
from coderepairrl.runs.log import Follower
from coderepairrl.types import Ending, Episode, Task

_SEARCHED_CHARS = 6000  # of an episode, in text.js
_REST_FACTOR = 20  # pause after analysing a growing run, in durations of that analysis: it delays other pages


class RunPages:
    """Pages of the run folder at `path`. Raises `UsageError` for other folders."""

    def __init__(self, path: Path) -> None:
        self.folder = open_run(path)
        self.name = path.resolve().name
        self._tasks: tuple[float, Mapping[str, Task]] = (0.0, {})
        self._texts: dict[str, str] = {}
        # size of the analysed log, time from which it may be analysed again, and its report
        self._report: tuple[int, float, Report] | None = None
        self.rows = EpisodeRows(
            Follower(self.folder.log), one_advantage=not (self._settings and self._settings.train.value_head)
        )

    @cached_property
    def _settings(self) -> Config | None:
        try:
            return config.load_run(self.folder.path)
        except CodeRepairError:
            return None

    @property
    def damage(self) -> str:
        """Describe unreadable parts."""
        sentences = []
        if self._settings is None:
            sentences.append("config.toml cannot be read: which tokens were trained is unknown.")
        if notice := self.rows.follower.notice:
            sentences.append(f"{notice[0].upper()}{notice[1:]}.")
        return " ".join(sentences)

    def report(self) -> Report:
        """Analyse the log, unless unchanged or just analysed (`_REST_FACTOR`)."""
        began = time.monotonic()
        size = self.folder.log.stat().st_size if self.folder.log.is_file() else 0
        if self._report is None or (self._report[0] != size and began > self._report[1]):
            report = analyse_run(read_run(self.folder, self.rows))
            self._report = size, began + _REST_FACTOR * (time.monotonic() - began), report
        return self._report[2]

    # -- pages

    def render_list_page(self, context: PageContext) -> str:
        """Page of all episodes."""
        rows = list(self.rows.by_id.values())
        return render_list(rows, context, state=self.rows.state, damage=self.damage)

    def list_changed_rows(self, since: int) -> dict[str, Any]:
        """Rows changed after state `since`."""
        rows = [row.cells() for row in self.rows.by_id.values() if row.changed > since]
        return {"rows": rows, "state": self.rows.state}

    def render_episode_page(self, name: str, context: PageContext) -> str:
        """Page of an episode. Raises KeyError."""
        view = self.view_episode(name)
        if not context.live:
            self._texts[name] = _extract_searchable_text(view.episode)
        context = replace(context, notice=view.notice)
        return render_episode(view, context, self._sort_rows(self.rows.groups[self.rows.by_id[name].group]))

    def render_group_page(self, name: str, context: PageContext) -> str:
        """Page of a group. Raises KeyError."""
        rows = self._sort_rows(self.rows.groups[name])
        episodes = [self.view_episode(row.id).episode for row in rows]
        attempts = [
            make_attempt_column(row, episode, episodes[0] if at else None)
            for at, (row, episode) in enumerate(zip(rows, episodes, strict=True))
        ]
        return render_group(name, attempts, self.find_task(rows[0].task), context)

    def render_task_page(self, name: str, context: PageContext) -> str:
        """Page of a task. Raises KeyError."""
        rows = self._sort_rows(self.rows.tasks[name])
        verdicts = {row.id: self.rows.follower.verdict(row.id) for row in rows}
        diffs = {name: parse_diff_lines(verdict.patch) for name, verdict in verdicts.items() if verdict}
        return render_task(name, rows, diffs, self.find_task(name), context)

    def find_task(self, name: str) -> Task | None:
        """Task, or None if not kept."""
        file = self.folder.path / "tasks.jsonl"
        with contextlib.suppress(OSError, CodeRepairError):
            stamp = file.stat().st_mtime
            if stamp != self._tasks[0]:
                self._tasks = stamp, self.folder.tasks()
        return self._tasks[1].get(name)

    def view_episode(self, name: str) -> EpisodeView:
        """Episode, perhaps unfinished. Raises KeyError."""
        row = self.rows.by_id[name]
        decode, notice = self._decoder
        episode = self.rows.follower.episode(name)
        ending = ""
        if episode is None:
            turns = self.rows.follower.turns(name)
            identity = (row.id, row.task, row.phase, row.step, row.group, row.attempt)
            episode, ending = Episode(*identity, Ending.DONE, turns=turns, kind=row.kind), row.ending
        return EpisodeView(
            episode,
            decode,
            self._list_states(episode, row),
            row.advantage,
            self.name,
            notice,
            self.find_task(row.task),
            ending,
            self.rows.consumed.get(name),
        )

    def _list_states(self, episode: Episode, row: EpisodeRow) -> dict[int, str]:
        """State of each turn's tokens (`EpisodeView.trained`)."""
        if row.ending in (OPEN, UNFINISHED):
            state = f"sampled:{row.ending}"
        elif row.phase != "train":
            state = "sampled:evaluation"
        elif episode.ending is Ending.VOID:
            state = "dropped:void"
        elif row.id not in self.rows.consumed or self._settings is None:
            state = "sampled:no step has consumed it"
        elif not self.rows.trained.get(row.id, True):
            masked = self._settings.train.mask_truncated and episode.ending is Ending.LIMIT
            state = "dropped:truncated" if masked else "dropped:flat_group"
        else:
            turn_fates = list_fates(episode, max_tokens=self._settings.rollout.tokens)
            states = [f"{fate}:{reason}" if reason else fate for fate, reason in turn_fates]
            return {turn.index: state for turn, state in zip(episode.turns, states, strict=True)}
        return {turn.index: state for turn in episode.turns}

    def _sort_rows(self, names: Iterable[str]) -> list[EpisodeRow]:
        return sorted((self.rows.by_id[name] for name in names), key=lambda row: (row.step, row.attempt, row.id))

    # -- text

    def list_searchable_texts(self) -> Iterator[tuple[str, str]]:
        """Ids with searchable text: replies, calls, notes, patch."""
        for name in self.rows.by_id:
            yield name, self._texts.get(name) or _extract_searchable_text(self.view_episode(name).episode)

    @cached_property
    def _decoder(self) -> tuple[Callable[[Sequence[int]], str], str]:
        """Decoder of ids, and a notice if it has no tokenizer."""
        model = self._settings.model.path if self._settings else ""
        places = [self.folder.path / "model", *sorted(self.folder.checkpoints.glob("[0-9]*"))]
        with contextlib.suppress(UsageError):  # the model may have been moved since: the page says so
            places.append(models.find_model_folder(model))
        place = next((each for each in places if (each / "tokenizer.json").is_file()), None)
        if place is None:
            notice = f"No tokenizer was found in this run folder or at {model}: tokens are shown as their ids."
            return _format_ids, notice
        if find_spec("tokenizers") is None:
            notice = "The package tokenizers is not installed: tokens are shown as their ids"
            return _format_ids, f"{notice} ({install_extra('train')})."
        from coderepairrl.tokens.inert import InertTokenizer

        spec = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
        return _cache_single_ids(InertTokenizer(spec, name=str(place), eos_token_id=None).decode), ""


def _extract_searchable_text(episode: Episode) -> str:
    words = [score.note for score in episode.scores]
    for messages in build_conversation(episode).values():
        if messages:
            words += [messages[-1].text, messages[-1].thought]
            words += [field.text for call in messages[-1].calls for field in call.fields]
    words += [episode.patch.decode(errors="replace"), episode.fault, episode.crash, episode.printed]
    return "\n".join(filter(None, words))[:_SEARCHED_CHARS].lower()


def find_episode(run: RunPages, name: str) -> str:
    """Find the id that is, or begins with, `name`. Raises `UsageError` for none or several."""
    ids = list(run.rows.by_id)
    matches = [id for id in ids if id == name] or [id for id in ids if id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{len(matches)} episodes have an id that begins with {name}", fix=f"name one: {', '.join(matches[:5])}"
        )
    close = difflib.get_close_matches(name, ids, n=3)
    near = f"did you mean {', '.join(close)}?" if close else "list them"
    raise UsageError(
        f"{run.folder.path} has no episode {name}", fix=f"{near} (crrl report {shlex.quote(str(run.folder.path))})"
    )


def _format_ids(ids: Sequence[int]) -> str:
    return "".join(f"⟨{id}⟩" for id in ids)


def _cache_single_ids(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    one = cache(lambda id: decode((id,)))  # pages decode each token by itself
    return lambda ids: one(ids[0]) if len(ids) == 1 else decode(ids)
