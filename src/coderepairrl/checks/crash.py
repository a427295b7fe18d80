"""Crash test: kill a small run at random moments, resume, compare with an undisturbed one.

Runs of `STEPS` steps of the shipped policy (tiny engine, real sandboxes) are killed (SIGKILL) up to four times each and
resumed to their end. A seed draws the moments. Each run must have the undisturbed one's weights after every step and
files in its last checkpoint, and train every attempt once. No process may outlive the controller; no temporary folder,
shared memory or control group may outlive the resumed run.

With ``staleness``, steps depend on timing: instead, a replay of the log must give the last checkpoint, and no sample
may be too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coderepairrl import sandbox
from coderepairrl.errors import PrerequisiteError, RunError, UsageError
from coderepairrl.learn.account import count_run_tokens
from coderepairrl.printable import logged
from coderepairrl.processes.installs import require_train
from coderepairrl.registry import Finding, suggest_nearest
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.runs.storage import SUMS
from coderepairrl.sandbox import cgroups
from coderepairrl.sync.weights import find_shared_path

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def find_descendants(root: int) -> dict[int, bytes]:
    """Find live descendants of `root`, with command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # after the program's name, which may have any character; Z and X are dead
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    commands: dict[int, bytes] = {}
    generation = {root}
    while generation := {pid for pid, parent in parents.items() if parent in generation}:
        for pid in generation:
            with contextlib.suppress(OSError):
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    return commands


def freeze_processes(root: int) -> list[int]:
    """Stop `root` and descendants, so that none starts another; return ids."""
    stopped: list[int] = []
    while running := [pid for pid in (root, *find_descendants(root)) if pid not in stopped]:
        _signal(running, signal.SIGSTOP)
        stopped += running
    return stopped


def kill_all(root: int) -> None:
    """Kill `root` and descendants."""
    _signal((root, *find_descendants(root)), signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Adopt orphaned descendants until exit."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        _signal(find_descendants(os.getpid()), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


STEPS, TASKS, ATTEMPTS = 3, 2, 4
CONFIG = f"""extends = "hello"
[run]
name = "crash"
steps = {STEPS}
checkpoint_every = 2
[tasks]
verify = false
options = {{ split = "train", quoted = 1 }}
[reward]
patch_edits = 1.0
[rollout]
tasks_per_step = {TASKS}
group_size = {ATTEMPTS}
seconds = 600
[eval]
before = false
after = false
"""
# Part of the command line of victims other than the controller.
_COMMAND_PARTS = {
    "engine": b"coderepairrl.engines.tiny.server",
    "learner": b"coderepairrl.learn.learner",
    "guest": b"guest.pyc",
}
_BUBBLEWRAP = b"bwrap --unshare"
VICTIMS = ("everything", "guest", "engine", "learner", "controller", "gateway")
"""`everything`: all processes at once; `gateway`: the controller during an episode."""
EACH = "each"
GONE = 3.0
"""Seconds that processes may outlive the controller."""
_KILLS_PER_RUN = 4
_PATIENCE = 600.0  # seconds until a run that does not end is killed


@dataclass(slots=True)
class Kill:
    """Kill, and its result."""

    victim: str
    moment: float
    """Drawn seconds after the start of the process."""
    at: float = 0.0
    """Time of the kill (`time.time`)."""
    gone: float = 0.0
    """Seconds until the last process ended, except `half_started`."""
    orphans: list[str] = field(default_factory=list)
    """Command lines of processes left after `GONE` seconds."""
    half_started: int = 0
    """Children of a bubblewrap killed at its start."""
    seconds: float = 0.0
    """Seconds until the next finished step or the end."""
    problems: list[str] = field(default_factory=list)


async def examine_recovery(
    victim: str, *, kills: int = 50, seed: int = 0, staleness: int = 0
) -> AsyncIterator[Finding]:
    """Kill `victim`, or ``each`` in turn, `kills` times at moments drawn from `seed`.

    `staleness` is `rollout.max_staleness`. Raises `UsageError` for an unknown victim and without a kill,
    `PrerequisiteError` except on Linux, `RunError` if the undisturbed run fails.
    """
    if victim not in (EACH, *VICTIMS):
        raise UsageError(f"the crash test kills no {victim!r}", fix=suggest_nearest(victim, (EACH, *VICTIMS)))
    if kills < 1:
        raise UsageError(
            f"kills={kills}: the crash test takes one kill or more", fix=f"crrl check crash {victim} kills=6"
        )
    if sys.platform != "linux":
        raise PrerequisiteError("the crash test finds orphaned processes on Linux only", fix="run it on Linux")
    sandbox.make_backend(sandbox.choose_backend().name).require()
    require_train()
    rng = random.Random(seed)
    with adopt_orphans(), _open_work_folder() as work:
        untouched = _Trial(work, "untouched", staleness)
        began = time.monotonic()
        if (code := await untouched.run()) != 0:
            raise RunError(f"the undisturbed run ended with {code}: {untouched.read_last_lines()}")
        duration = time.monotonic() - began
        expected = RunResult.read(untouched.folder)
        trains = [bool(step["account"]["trained"]) for step in expected.steps]
        trained = any(trains) if staleness else all(trains)  # stale: timing decides a step's attempts
        yield Finding("untouched", trained, f"{STEPS} steps in {duration:.1f} s, weights {expected.weights[:12]}")
        caches = {path.name for path in untouched.temporary.iterdir() if not path.name.startswith("crrl-")}

        planned = _plan_kills(victim, kills, duration, rng)
        done: list[Kill] = []
        has_problems = False
        while planned:
            trial = _Trial(work, f"run-{len(done):03d}", staleness)
            kills_of_run = await _run_with_kills(trial, planned, kills, len(done))
            problems = [*trial.problems, *expected.differences(trial.folder, staleness)]
            if staleness and not problems:
                problems += await trial.replay()
            problems += trial.list_remains(caches)
            for kill in kills_of_run:
                kill.problems = problems
                kill.seconds = _seconds_until_next_step(trial.folder, kill.at)
            has_problems = has_problems or bool(problems)
            if not problems:
                shutil.rmtree(trial.home)
            done += kills_of_run
        for name in VICTIMS:
            if kills_of_victim := [kill for kill in done if kill.victim == name]:
                yield _kills_finding(name, kills_of_victim)
        slowest = max(kill.gone for kill in done)
        orphans = sorted({words for kill in done for words in kill.orphans})
        half = sum(kill.half_started for kill in done)
        late = [f"{half} of a bubblewrap killed at its start, which the next run ends"] if half else []
        detail = "; ".join([f"{slowest:.2f} s after the controller at most", *late, *orphans])
        yield Finding("orphans end", slowest <= GONE, detail)
        if has_problems:
            failed = work.rename(work.with_name(f"{work.name}-failed"))
            yield Finding("runs", False, f"the failed ones are kept in {failed}")


def _plan_kills(victim: str, kills: int, duration: float, rng: random.Random) -> list[Kill]:
    """Spread kills over `duration`, sorted within a run, to be popped from the end."""
    victims = VICTIMS if victim == EACH else (victim,)
    moments = [duration * (number + rng.random()) / kills for number in range(kills)]
    rng.shuffle(moments)
    planned = [Kill(victims[number % len(victims)], moment) for number, moment in enumerate(moments)]
    runs = (planned[first : first + _KILLS_PER_RUN] for first in range(0, kills, _KILLS_PER_RUN))
    return [kill for run in runs for kill in sorted(run, key=lambda kill: kill.moment)][::-1]


async def _run_with_kills(trial: _Trial, planned: list[Kill], kills: int, earlier: int) -> list[Kill]:
    """Start and resume a run until it ends, with kills from `planned`."""
    done: list[Kill] = []
    while True:
        before = len(done)
        with trial.start() as process:
            while planned and len(done) < _KILLS_PER_RUN and await trial.wait_for_moment(process, planned[-1]):
                kill = planned.pop()
                done.append(kill)
                await trial.kill_victim(process, kill)
                which = f"kill {earlier + len(done)} of {kills}: {kill.victim}"
                print(logged(f"{which}, after {kill.moment:.1f} s"), file=sys.stderr)
            code = await _wait_for_exit(process)
        if len(done) == before:
            break
    if not done and planned:  # the run was faster than the untouched one, or had no such process so late
        planned[-1].moment *= 0.8
    if code != 0:
        trial.problems.append(f"it ended with {code}: {trial.read_last_lines()}")
    return done


class _Trial:
    def __init__(self, work: Path, name: str, staleness: int) -> None:
        self.home = work / name
        self.home.mkdir()
        self.config = self.home / "crash.toml"
        self.config.write_text(CONFIG)
        self._overrides = [f"rollout.max_staleness={staleness}", "train.old_logprobs=recomputed"] if staleness else []
        self.folder = RunFolder(self.home / "runs" / "crash")
        self.temporary = self.home / "tmp"
        self.temporary.mkdir()
        for folder in (self.home, self.temporary):
            folder.chmod(0o711)  # sandboxes of root run as another user
        self.output = self.home / "output"
        self.problems: list[str] = []
        self._sandbox_names: set[str] = set()
        self._began = 0.0

    async def run(self) -> int:
        """Start or resume the run; return its exit code."""
        with self.start() as process:
            return await _wait_for_exit(process)

    async def replay(self) -> list[str]:
        """Replay the log alone; return the differences."""
        files = RunResult.read(self.folder).files
        shutil.rmtree(self.folder.checkpoints)
        if (code := await self.run()) != 0:
            return [f"a replay of its log ended with {code}: {self.read_last_lines()}"]
        again = RunResult.read(self.folder).files
        return [] if again == files else ["a replay of its log gives a different last checkpoint"]

    @contextmanager
    def start(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start or resume the run, killed at the end."""
        resume = [str(self.folder.path), "--resume"] if self._has_log() else [str(self.config), *self._overrides]
        with self.output.open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "coderepairrl.cli", "train", *resume],
                cwd=self.home,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        self._began = time.monotonic()
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_all(process.pid)
                process.wait()

    async def kill_victim(self, process: subprocess.Popen[bytes], kill: Kill) -> None:
        self._sandbox_names |= {path.name for path in self.temporary.glob("crrl-sandbox-*")}
        if kill.victim == "everything":
            targets = freeze_processes(process.pid)
        elif kill.victim in _COMMAND_PARTS:
            targets = _find_victims(process.pid, kill.victim)[:1]
        else:
            targets = [process.pid]
        kill.at = time.time()
        _signal(targets, signal.SIGKILL)
        if process.pid in targets:
            process.wait()
            await wait_until_gone(kill)

    async def wait_for_moment(self, process: subprocess.Popen[bytes], kill: Kill) -> bool:
        """Wait for moment and victim; False if the run ended before."""
        while process.poll() is None:
            if time.monotonic() - self._began >= kill.moment and self._has_victim(process.pid, kill.victim):
                return True
            await asyncio.sleep(0.005)
        return False

    def _has_victim(self, controller: int, victim: str) -> bool:
        if victim != "gateway":
            return victim not in _COMMAND_PARTS or bool(_find_victims(controller, victim))
        types = [record["type"] for record in self.folder.records()] if self._has_log() else []
        since_start = types[len(types) - types[::-1].index("start") :] if "start" in types else []
        return since_start.count("episode") > since_start.count("verdict")

    def _has_log(self) -> bool:
        try:
            return open_run(self.folder.path).log.stat().st_size > 0
        except (UsageError, OSError):
            return False

    def list_remains(self, caches: Container[str]) -> list[str]:
        """List what an ended run left, except `caches` of libraries."""
        remains = [f"process {words.decode(errors='replace')}" for words in find_descendants(os.getpid()).values()]
        remains += [str(path) for path in self.temporary.iterdir() if path.name not in caches]
        shared = find_shared_path(self.folder)
        remains += [str(shared)] if shared.exists() else []
        parents = set(cgroups.find_cgroups().parents.values())
        remains += [
            str(path) for name in self._sandbox_names for parent in parents for path in parent.glob(f"{name}-*")
        ]
        return [f"left: {remnant}" for remnant in remains]

    def read_last_lines(self) -> str:
        return " / ".join(self.output.read_text(errors="replace").splitlines()[-5:])


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run."""

    steps: list[Mapping[str, Any]]
    files: str
    """`SUMS` of its last checkpoint."""

    @classmethod
    def read(cls, folder: RunFolder) -> RunResult:
        """Read the result of the run in `folder`."""
        saved = folder.list_checkpoints()
        files = (saved[max(saved)] / SUMS).read_text() if saved else ""
        return cls([record for record in folder.records() if record["type"] == "step"], files)

    @property
    def weights(self) -> str:
        """SHA-256 of the last step's weights."""
        return str(self.steps[-1]["checksum"]) if self.steps else ""

    def differences(self, folder: RunFolder, staleness: int = 0) -> list[str]:
        """Differences of the run in `folder`; `staleness` allows other weights."""
        try:
            result = RunResult.read(folder)
            balanced = count_run_tokens(folder.records()).is_balanced
        except (UsageError, RunError, OSError) as error:
            return [f"no run: {error}"]
        problems = [] if balanced else ["the account of its tokens is not balanced"]
        if [step["step"] for step in result.steps] != [step["step"] for step in self.steps]:
            return [*problems, f"it has the steps {[step['step'] for step in result.steps]}"]
        for step_record, untouched in zip(result.steps, self.steps, strict=True):
            if (oldest := step_record["metrics"].get("learn/staleness_max", 0)) > staleness:
                problems.append(f"step {step_record['step']} trained tokens of {oldest} versions before")
            if not staleness and step_record["checksum"] != untouched["checksum"]:
                problems.append(f"other weights after step {step_record['step']}")
            if not staleness and step_record["account"]["trained"] != untouched["account"]["trained"]:
                problems.append(f"step {step_record['step']} trained {step_record['account']['trained']} tokens")
        if not staleness and result.files != self.files:
            problems.append("other files in the last checkpoint")
        consumed = [episode.split("-retry")[0] for step in result.steps for episode in step["episodes"]]
        if len(consumed) != len(set(consumed)) or len(consumed) != STEPS * TASKS * ATTEMPTS:
            problems.append(f"{len(consumed)} attempts trained, {len(set(consumed))} different ones")
        return problems


def _seconds_until_next_step(folder: RunFolder, at: float) -> float:
    later = [r["time"] for r in folder.records() if r["type"] in ("step", "end") and r["time"] > at]
    return min(later) - at if later else 0.0


def _kills_finding(victim: str, kills: list[Kill]) -> Finding:
    recovered = [kill for kill in kills if not kill.problems]
    seconds = [kill.seconds for kill in kills]
    wrong = sorted({problem for kill in kills for problem in kill.problems})
    counts = f"{len(kills):3d} kills, {len(recovered):3d} recovered, next step after {sum(seconds) / len(kills):.1f} s"
    return Finding(victim, not wrong, "; ".join([f"{counts} (at most {max(seconds):.1f})", *wrong]))


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None:
        if time.monotonic() > deadline:
            kill_all(process.pid)
        await asyncio.sleep(0.02)
    return process.wait()


def _find_victims(controller: int, victim: str) -> list[int]:
    return [pid for pid, words in find_descendants(controller).items() if _COMMAND_PARTS[victim] in words]


async def wait_until_gone(kill: Kill) -> None:
    """Wait until a killed run's processes are gone; kill the rest after 30 s.

    Remains of a bubblewrap killed at its start are only counted: the next run ends them.
    """
    began = time.monotonic()
    while left := find_descendants(os.getpid()):
        seconds = time.monotonic() - began
        survivors = [words for words in left.values() if _BUBBLEWRAP not in words]
        if seconds > GONE and not survivors:
            kill.half_started = len(left)
            return
        if seconds > GONE and not kill.orphans:
            kill.orphans += [words.decode(errors="replace")[:200] for words in survivors]
        if seconds > 30:
            for pid in left:
                kill_all(pid)
        await asyncio.sleep(0.01)
        if survivors:
            kill.gone = time.monotonic() - began


@contextmanager
def _open_work_folder() -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="crash-"))
    work.chmod(0o711)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
