"""Watch an evaluation: progress lines, results, cost, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

from coderepairrl.errors import HealthGateError, RunError
from coderepairrl.stats.intervals import Interval, cluster_episodes, is_share, mean_interval
from coderepairrl.stats.measures import Cost, Prices, sum_costs
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode

_PATIENCE = 2  # Rounds (of `concurrency` attempts) with the same obstacle before an evaluation warns or stops.
_MIN_SILENT = 10  # An evaluation stops if its first attempts, at least this many, sample no token.
# Obstacles, worded to follow "N attempts".
_VOID, _SILENT, _TIMED_OUT = "are void", "sampled nothing", "ended by the time limit"
_FIX = {
    _VOID: "remove the cause, then continue with --resume",
    _SILENT: "raise rollout.tokens (a prompt needs room for a reply), or read one of the attempts with crrl report",
    _TIMED_OUT: "raise rollout.seconds or lower rollout.concurrency",
}


def find_obstacle(episode: Episode) -> str:
    """Find what kept the policy from showing its ability, or ""."""
    if episode.ending is Ending.VOID:
        return _VOID
    cost = sum_costs([episode])
    if not (cost.sampled_tokens or cost.unreported):
        return _SILENT
    return _TIMED_OUT if (episode.ending, episode.reason) == (Ending.LIMIT, "time") else ""


def find_common_obstacle(episodes: Sequence[Episode]) -> str:
    """Warning if one obstacle hid the policy's ability in all valid `episodes`, or ""."""
    obstacles = [find_obstacle(episode) for episode in episodes if episode.ending is not Ending.VOID]
    if not obstacles or len(set(obstacles)) > 1 or not obstacles[0]:
        return ""
    return f"all {len(obstacles)} attempts {obstacles[0]}: they say nothing about the policy; {_FIX[obstacles[0]]}"


@dataclass(eq=False)
class EvaluationWatch:
    """Called with each attempt after its verdict. Raises `RunError` if several models replied in `before`."""

    attempts: int
    """Number of all attempts, including those `before`."""
    concurrency: int
    before: InitVar[Iterable[Episode]]
    """Attempts of earlier processes."""
    prices: Prices | None
    say: Callable[[str], None]
    stops: bool = True
    """Whether attempts that sample nothing stop the evaluation; void ones always do."""

    def __post_init__(self, before: Iterable[Episode]) -> None:
        self._valid: list[Episode] = []  # Without turns, which are large.
        self._cost = Cost()
        self._obstacle = ""
        self._in_a_row = 0  # Attempts with this obstacle.
        self._model: Any = ""  # Server's name for its model; empty if it gives none, and for our own engines.
        for episode in before:
            self._add(episode)

    def __call__(self, episode: Episode) -> None:
        """Count the attempt and print its line.

        Raises `RunError` if another model replies, and `HealthGateError` after many void attempts in a row, or if all
        sampled no token.
        """
        self._add(episode)
        if episode.ending is not Ending.VOID:
            self.say(self._format_line(episode))
        obstacle = find_obstacle(episode)
        self._in_a_row = self._in_a_row + 1 if obstacle == self._obstacle else 1
        self._obstacle = obstacle
        if not obstacle or self._in_a_row < _PATIENCE * self.concurrency:
            return
        message = f"the last {self._in_a_row} attempts {obstacle}"
        if obstacle == _VOID:
            fault, _, _ = episode.fault.partition("\n")
            raise HealthGateError(f"{message}: {fault}", fix=_FIX[obstacle])
        if obstacle == _SILENT and self.stops and len(self._valid) == self._in_a_row >= _MIN_SILENT:
            raise HealthGateError(message, fix=_FIX[obstacle])
        if self._in_a_row == _PATIENCE * self.concurrency:  # only a warning: the policy itself may be slow
            self.say(f"warning: {message}; {_FIX[obstacle]}")

    def _add(self, episode: Episode) -> None:
        for turn in episode.turns:
            model = turn.remote.get("model")
            if model and self._model and model != self._model:
                raise RunError(
                    f"{turn.remote.get('url', 'the server')} replied as {self._model} before, and as {model} now; an"
                    " evaluation measures one policy",
                    fix="name a fixed version of the model (--model-name), and begin a new evaluation",
                )
            self._model = self._model or model or ""
        self._cost = self._cost.plus(sum_costs([episode]))
        if episode.ending is not Ending.VOID:
            self._valid.append(replace(episode, turns=()))

    def _format_line(self, episode: Episode) -> str:
        cost = sum_costs([episode])
        resolved = is_resolved(episode)
        outcome = f"reward {episode.reward:.3f}" if resolved is None else "resolved" if resolved else "not resolved"
        outcome += ", empty patch" if not episode.patch.strip() else ""
        if episode.ending is not Ending.DONE:
            when = "" if episode.turns else " before the first reply"
            outcome += f", {episode.ending.value} ({episode.reason}){when}"
        money = "" if self.prices is None else f"; cost {self._cost.money(self.prices):.4f}"
        return (
            f"[{len(self._valid)}/{self.attempts}] {episode.task_id} #{episode.attempt}: {outcome};"
            f" {cost.prompt_tokens:,} + {cost.sampled_tokens:,} tokens, {cost.attempt_seconds:.1f} s;"
            f" so far {self._mean_so_far()}{money}"
        )

    def _mean_so_far(self) -> Interval:
        verdicts = {each.id: verdict for each in self._valid if (verdict := is_resolved(each)) is not None}
        tested = len(verdicts) == len(self._valid)
        cluster_of = cluster_episodes(self._valid)
        values = [float(verdicts[each.id]) if tested else each.reward for each in self._valid]
        return mean_interval(values, [cluster_of[each.task_id] for each in self._valid], share=is_share(values))
