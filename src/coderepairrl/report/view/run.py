"""From a run folder to a page. The folder's log is all that is read, and the tokenizer."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coderepairrl import config, models
from coderepairrl.config.schema import Train
from coderepairrl.errors import UsageError
from coderepairrl.learn import KIND
from coderepairrl.learn.stitch import advantages, fates
from coderepairrl.report.view.page import Row, render_episode, render_index
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.types import Ending, Episode


def render(run: Path, episode: str | None = None) -> str:
    """The page of an episode of the run folder `run`, named by its id or the beginning of it; else the index.

    Without a tokenizer the page shows ids, and a line says so. Raises `UsageError` for a folder
    that is no run, or an episode that it does not have.
    """
    if episode is not None:
        shown = read_episode(run, episode)
        return render_episode(
            shown.episode, shown.decode, shown.trained, shown.advantage, run=shown.run, notice=shown.notice
        )
    folder = open_run(run)
    episodes = list(logged_episodes(folder.records()))
    earned = _advantages(episodes, config.load(folder.config).train)
    return render_index([Row(each, earned.get(each.id)) for each in episodes], run=folder.path.name)


class Shown(NamedTuple):
    """An episode with what a page says about it besides."""

    episode: Episode
    decode: Callable[[Sequence[int]], str]
    """Ids to text, special tokens included."""
    trained: Mapping[int, str]
    """By the index of a turn, what became of its output: ``trained``, ``masked:REASON`` or ``dropped:REASON``."""
    advantage: float | None
    run: str
    notice: str
    """What is missing, such as the tokenizer; else empty."""


def read_episode(run: Path, episode: str) -> Shown:
    """The episode of the run folder `run` named by its id or the beginning of it; raises as `render` does."""
    folder = open_run(run)
    settings = config.load(folder.config)
    episodes = list(logged_episodes(folder.records()))
    chosen = _find(episodes, episode, folder)
    advantage = _advantages(episodes, settings.train).get(chosen.id)
    decode, notice = _decoder(folder, settings.model.path)
    trained = _trained(chosen, advantage, settings.rollout.tokens)
    return Shown(chosen, decode, trained, advantage, folder.path.name, notice)


def _find(episodes: Sequence[Episode], wanted: str, folder: RunFolder) -> Episode:
    ids = [episode.id for episode in episodes]
    found = [i for i, id in enumerate(ids) if id == wanted] or [i for i, id in enumerate(ids) if id.startswith(wanted)]
    if len(found) == 1:
        return episodes[found[0]]
    if found:
        some = ", ".join(ids[i] for i in found[:5])
        raise UsageError(f"{wanted} begins the ids of {len(found)} episodes", fix=f"give more of it: {some}")
    close = difflib.get_close_matches(wanted, ids, n=3)
    near = f"did you mean {', '.join(close)}?" if close else "list them"
    raise UsageError(f"{folder.path} has no episode {wanted}", fix=f"{near} (crrl view {folder.path})")


def _advantages(episodes: Sequence[Episode], terms: Train) -> dict[str, float | None]:
    """Advantages as the learner had them; none outside training."""
    trained = (episode for episode in episodes if episode.phase == "train")
    kind = terms.advantage or KIND[terms.algorithm]
    _, found = advantages(trained, kind, denominator=terms.denominator, kl=terms.beta > 0)
    return found


def _trained(episode: Episode, advantage: float | None, max_tokens: int) -> Mapping[int, str]:
    """What became of each turn's output, as in the rows that the learner gets."""
    if episode.phase != "train":
        return {turn.index: "dropped:evaluation" for turn in episode.turns}
    if episode.ending is Ending.VOID or advantage is None:
        reason = "void" if episode.ending is Ending.VOID else "flat_group"
        return {turn.index: f"dropped:{reason}" for turn in episode.turns}
    became = fates(episode, max_tokens=max_tokens)
    return {
        turn.index: f"{fate}:{reason}" if reason else fate
        for turn, (fate, reason) in zip(episode.turns, became, strict=True)
    }


def _decoder(folder: RunFolder, model: str) -> tuple[Callable[[Sequence[int]], str], str]:
    """How ids become text, and what to say when they do not."""
    places = [folder.path / "model", *sorted(folder.checkpoints.glob("[0-9]*"))]
    with contextlib.suppress(UsageError):  # the model may have been moved since: the page says so
        places.append(models.folder(model))
    for place in places:
        if (place / "tokenizer.json").is_file():
            from coderepairrl.tokens.inert import InertTokenizer

            spec = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
            return InertTokenizer(spec, name=str(place), eos_token_id=None).decode, ""
    notice = f"No tokenizer was found in this run folder or at {model}: tokens are shown as their ids."
    return lambda ids: "".join(f"⟨{id}⟩" for id in ids), notice
