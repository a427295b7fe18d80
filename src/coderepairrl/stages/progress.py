"""Progress on stderr: one line a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from coderepairrl.printable import format_mean, logged
from coderepairrl.stats.measures import Notes, fit_one_line
from coderepairrl.types import Ending, Episode

_SHOWN_NOTES = 3  # Notes printed of each reward: the most frequent ones on its zeros.
_ERROR_CHARS = 400  # Characters of an error in a line.


# Metrics in a step's line, the most important first; {0} is the formatted mean, {1} the number.
_SHOWN_METRICS = {
    "reward": "reward {0}",
    "void": "void {0}",
    "crash": "crash {0}",
    "empty_patches": "empty {1:.0%}",
    "tool_success": "tools {1:.0%}",
    "flat_groups": "flat {0}",
    "learn/grad_norm": "grad {0}",
    "tokens_per_second": "{1:.0f} tok/s",
    "learn/loss": "loss {0}",
}
_COLUMNS = 79  # Width of a step's line: fits a terminal of 80 columns.


class Progress:
    """Progress of a run. `quiet` prints nothing; `show` gives text for an episode; `label` is a prefix of lines."""

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool = False,
        show: Callable[[Episode], str] = lambda episode: "",
        label: str = "",
    ) -> None:
        self._show, self._label = show, label
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.total_steps = total_steps
        self.finished_step = 0
        # Causes of void and crashed episodes: each kind is printed once, then counted.
        self._broken: dict[tuple[Ending, str], list[str]] = {}
        self._notes = Notes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report_failures()
        for line in self._notes.zeros(_SHOWN_NOTES):
            self.say(line)

    def resume(self, step: int, replayed: range) -> None:
        """Report that steps up to `step` are done; `replayed`: those after the newest checkpoint."""
        self.finished_step = step
        steps = f"step {step}" if len(replayed) == 1 else f"steps {replayed.start} to {step}"
        how = f"{steps} replayed from the log" if replayed else "from its checkpoint"
        self.say(f"resumed after step {step} of {self.total_steps}: {how}")

    def report_failures(self) -> None:
        """Report counts of further failures since the last call, by cause."""
        for (ending, _), (first, *more) in self._broken.items():
            if more:
                self.say(f"{ending}: {len(more)} more like {first}")
        self._broken.clear()

    def episode(self, episode: Episode) -> None:
        """Count a finished episode."""
        self._notes.add(episode)
        if text := self._show(episode):
            self.say(text)
        if episode.ending in (Ending.VOID, Ending.CRASH):
            kind, cause = _find_cause(episode)
            causes = self._broken.setdefault((episode.ending, kind), [])
            causes.append(cause)
            if len(causes) == 1:
                self.say(f"{episode.ending}: {episode.id}: {cause}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a finished step."""
        self.finished_step = step
        head = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  "
        self.say(head + _format_metrics(metrics, _COLUMNS - len(head)))

    def alarm(self, text: str) -> None:
        """Print an alarm."""
        self.say(f"ALARM: {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        text = f"{self._label}: {text}" if self._label else text
        self.console.print(Text(logged(text)), soft_wrap=True)


def _format_metrics(metrics: Mapping[str, Any], room: int) -> str:
    line = ""
    for name, form in _SHOWN_METRICS.items():
        value = metrics.get(name)
        if value is None or (name in ("void", "crash") and value == 0):
            continue
        text = f"  {form.format(format_mean(value), value)}"
        if len(line) + len(text) <= room + 2:  # the first two spaces are removed below
            line += text
    return line.removeprefix("  ")


def _find_cause(episode: Episode) -> tuple[str, str]:
    if episode.ending is Ending.VOID:
        cause = _pick_line(episode.fault, 0)
        return re.sub(r"\d+", "0", cause), cause  # other request or process numbers are no new kind
    # the last line of a traceback is the error; it may quote the policy and so rarely repeats: count by reason
    return episode.reason, f"{episode.reason}: {_pick_line(episode.crash, -1)}"


def _pick_line(text: str, number: int) -> str:
    # cut, as a policy may have written it
    return fit_one_line((text.strip().splitlines() or [""])[number], _ERROR_CHARS)
