"""Live progress on stderr: a panel on terminals, one line a step everywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coderepairrl.printable import format_mean, logged, printable
from coderepairrl.stats import Notes
from coderepairrl.stats.measures import fit_one_line
from coderepairrl.types import Ending, Episode

_EMA = 0.2
_NOTES = 3  # Kinds of notes on zeros printed of each reward.
_WIDEST = 400  # Characters of an error in a line.


# Metrics in a step's line, the most important first.
_SHOWN = {
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
_COLUMNS = 79  # Width of a step's line, which then wraps on no terminal.


class Progress:
    """Progress of a run. `quiet` prints nothing; `show` gives lines for an episode.

    `label` is a prefix of lines, which replaces the panel.
    """

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
        self._started = self._phase_began = time.monotonic()
        self._phase, self._done, self._expected = "starting", 0, 0
        self.finished_step = self._first_step = 0
        self._last: Mapping[str, Any] = {}
        self._alarm = ""
        # Causes of void and crashed episodes in this phase: each kind is printed once, then counted.
        self._broken: dict[tuple[Ending, str], list[str]] = {}
        self._notes = Notes()
        self._tokens, self._rate = 0, 0.0
        self._live = Live(console=self.console, get_renderable=self._render_panel, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self._label:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal and not self._label:
            self._live.stop()
        self._count_broken()
        for line in self._notes.zeros(_NOTES):
            self.say(line)

    def resume(self, step: int, replayed: range) -> None:
        """Report that steps up to `step` are done; `replayed` follow the newest checkpoint."""
        self.finished_step = self._first_step = step
        self.phase("replay")
        again = f"step {step}" if len(replayed) == 1 else f"steps {replayed.start} to {step}"
        how = f"{again} replayed from the log" if replayed else "from its checkpoint"
        self.say(f"resumed after step {step} of {self.total_steps}: {how}")

    def phase(self, name: str, expected: int = 0) -> None:
        """Begin a phase of `expected` episodes."""
        self._count_broken()
        self._phase, self._done, self._expected = name, 0, expected
        self._phase_began, self._tokens = time.monotonic(), 0

    def advance(self) -> None:
        """Count an item of the phase."""
        self._done += 1

    def episode(self, episode: Episode) -> None:
        """Count a finished episode."""
        self._done += episode.ending is not Ending.VOID
        self._tokens += episode.sampled
        self._notes.add(episode)
        rate = self._tokens / max(time.monotonic() - self._phase_began, 1e-9)
        self._rate = rate if not self._rate else (1 - _EMA) * self._rate + _EMA * rate
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
        self.finished_step, self._last = step, metrics
        head = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  "
        self.say(head + _format_metrics(metrics, _COLUMNS - len(head)))

    def alarm(self, text: str) -> None:
        """Print an alarm, and show it in the panel."""
        self._alarm = text
        self.say(f"ALARM: {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        text = f"{self._label}: {text}" if self._label else text
        self.console.print(Text(logged(text)), soft_wrap=True)

    def _count_broken(self) -> None:
        for (ending, _), (first, *more) in self._broken.items():
            if more:
                self.say(f"{ending}: {len(more)} more like {first}")
        self._broken.clear()

    def _render_panel(self) -> Table:
        now = time.monotonic()
        steps = self.finished_step - self._first_step
        left = (now - self._started) / steps * (self.total_steps - self.finished_step) if steps else None
        table = Table.grid(padding=(0, 2))
        done = f" {self._done}/{self._expected}" if self._expected else ""
        table.add_row("phase", Text(printable(self._phase) + done))
        if self.total_steps:  # an evaluation has none
            table.add_row("step", f"{self.finished_step}/{self.total_steps}")
            table.add_row("", _format_metrics(self._last))
        table.add_row("speed", f"{self._rate:,.0f} tokens/s")
        for ending in (Ending.VOID, Ending.CRASH):
            if count := sum(len(causes) for (kind, _), causes in self._broken.items() if kind is ending):
                table.add_row(str(ending), f"{count}")
        if self._alarm:
            table.add_row("ALARM", Text(printable(self._alarm)))
        table.add_row("time", f"{now - self._started:,.0f} s" + (f", about {left:,.0f} s left" if left else ""))
        return table


def _format_metrics(metrics: Mapping[str, Any], room: int = 200) -> str:
    line = ""
    for name, form in _SHOWN.items():
        value = metrics.get(name)
        if value is None or (name in ("void", "crash") and value == 0):
            continue
        text = f"  {form.format(format_mean(value), value)}"
        if len(line) + len(text) <= room + 2:
            line += text
    return line.removeprefix("  ")


def _find_cause(episode: Episode) -> tuple[str, str]:
    if episode.ending is Ending.VOID:  # one kind: causes that differ only in numbers, of requests or processes
        cause = _pick_line(episode.fault, 0)
        return re.sub(r"\d+", "0", cause), cause
    # a traceback names the error in its last line, which may quote the policy, and so never repeats
    return episode.reason, f"{episode.reason}: {_pick_line(episode.crash, -1)}"


def _pick_line(text: str, number: int) -> str:
    # cut: a policy may have written it
    return fit_one_line((text.strip().splitlines() or [""])[number], _WIDEST)
