"""Checks for the first ten minutes on a GPU, as one command (docs/guides/first-gpu-day.md).

    python benchmarks/gpu/first_day.py [--python PYTHON] [--seconds 590] [--only trees learner] [--out first-day.jsonl]
    python benchmarks/gpu/first_day.py --toy        (miniatures, on a CPU too: shows that the script runs)

Each step is a command with a time limit. Weights are random, so nothing is downloaded. A step that has no time left, or
needs a vLLM that is not installed, is reported as left out. For each step a line of JSON is printed at once and
appended to `--out`: the command, its exit code, seconds, peak GPU memory, and the end of its output.
Exits with 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coderepairrl import models
from coderepairrl.engines.vllm.server import find_installed_vllm, find_vllm_python
from coderepairrl.errors import PrerequisiteError
from coderepairrl.plan.sizing.architecture import PUBLISHED
from learner import TOY  # benchmarks/gpu, where this script is

BENCHMARKS = Path(__file__).resolve().parents[1]
SHARE = 'engine.options.args=["--gpu-memory-utilization","0.3"]'
LEAST = 20
"""Least remaining seconds to start a step."""
SHOWN = 2000
"""Characters of a command's output that are kept, from its end."""


class Step(NamedTuple):
    name: str
    command: list[str]
    seconds: int
    """Limit, about three times what the step should take."""
    needs_vllm: bool = True


def list_steps(python: str, work: Path, *, toy: bool) -> list[Step]:
    """List the steps: trees in bf16, then steps 3, 4, 6, 7 and 8 of the guide."""
    crrl = str(Path(sys.executable).with_name("crrl"))
    gpu, sync = [sys.executable, str(BENCHMARKS / "gpu")], [sys.executable, str(BENCHMARKS / "sync.py")]
    vllm = f"engine.options.python={python}"
    off = ["eval.before=false", "eval.after=false", f"run.dir={work}"]
    small = ["rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.calls=3", "rollout.turn_tokens=256"]
    train = [crrl, "train", "qwen3-0.6b", "model.init=random", f"model.path={work / 'shape'}", vllm, *off, *small]
    trees, learner = ([gpu[0], f"{gpu[1]}/{name}.py"] for name in ("trees", "learner"))
    if toy:
        cpu = ["engine.devices=[]", "train.devices=[]", "train.precision=fp32", "engine.options.args=[]"]
        cpu += ["rollout.tokens=4096", "engine.options.context=4096", "engine.options.slots=4", "gpu.memory_gb=80"]
        return [
            Step("trees", [*trees, "--toy"], 100, False),
            Step("learner", [*learner, "--toy", "--rows", "3", "--parts", "group", "--json"], 100, False),
            Step("engine", [crrl, "check", "engine", "vllm", vllm], 300),
            Step("sync", [*sync, "--repeat", "1", "--sizes", "128", "--json", "--python", python], 300),
            Step("hello", [crrl, "hello", "engine.name=vllm", vllm, "run.steps=1", *off, *small], 300),
            Step("plan", [*train, *cpu, "--dry-run", "--json"], 60),
            Step("train", [*train, *cpu, "run.steps=1"], 300),
        ]
    return [
        Step("trees", [*trees], 60, False),
        Step(
            "learner",
            [*learner, "--sizes", "0.6B", "--lengths", "4096", "--rounds", "2", "--parts", "step", "group", "loss"],
            150,
            False,
        ),
        Step("engine", [crrl, "check", "engine", "vllm", vllm, SHARE], 180),
        Step("sync", [*sync, "--repeat", "3", "--sizes", "1024", "--json", "--python", python], 150),
        Step("hello", [crrl, "hello", "engine.name=vllm", vllm, SHARE, "run.steps=3", *off], 200),
        Step("plan", [*train, "--dry-run", "--json"], 60),
        Step("train", [*train, "run.steps=2"], 240),
    ]


def write_shape(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model folder without weights: `shape`, with the tokenizer of the shipped policy."""
    shutil.copytree(models.resolve_model("builtin:tiny").folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokens = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in tokens.items() if key == "vocab_size" or key.endswith("token_id")}
    (folder / "config.json").write_text(json.dumps({**shape, **kept, "architectures": ["Qwen3ForCausalLM"]}))


def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step for at most `seconds`: its exit code, seconds, peak GPU memory and the end of its output."""
    began, over, peak = time.monotonic(), threading.Event(), [0.0]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(step.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        watcher = threading.Thread(target=lambda: peak.append(max(watch_memory(over), default=0.0)))
        watcher.start()
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"over {seconds:.0f} s"
        over.set()
        watcher.join()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    took = round(time.monotonic() - began, 1)
    return {"exit": code, "seconds": took, "most_gib": round(max(peak), 2), "output": text[-SHOWN:]}


def watch_memory(over: threading.Event) -> Iterator[float]:
    """Yield the GiB used on the first GPU, twice a second, until `over`."""
    while torch.cuda.is_available() and not over.wait(0.5):
        free, total = torch.cuda.mem_get_info()
        yield (total - free) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=find_vllm_python(), help="the Python that has vLLM")
    parser.add_argument("--seconds", type=float, default=590)
    parser.add_argument("--only", nargs="+", metavar="STEP")
    parser.add_argument("--out", type=Path, default=Path("first-day.jsonl"))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        parser.error("there is no GPU: only --toy makes sense here")
    end, failed = time.monotonic() + options.seconds, False
    try:
        vllm = " ".join(find_installed_vllm(options.python, {}))
    except PrerequisiteError as error:
        vllm, problem = "", str(error)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"device": device, "torch": torch.__version__, "vllm": vllm}
    with tempfile.TemporaryDirectory() as name:
        write_shape(Path(name, "shape"), {**TOY, "head_dim": 32} if options.toy else PUBLISHED["Qwen3-0.6B"])
        for step in list_steps(options.python, Path(name), toy=options.toy):
            if options.only and step.name not in options.only:
                continue
            left = min(step.seconds, end - time.monotonic())
            if step.needs_vllm and not vllm:
                result: dict[str, Any] = {"left_out": problem}
            elif left < LEAST:
                result = {"left_out": "no time is left"}
            else:
                result = run(step, left)
            failed |= result.get("exit", 0) != 0
            line = json.dumps({"step": step.name, **about, "command": step.command, **result})
            print(line, flush=True)
            with options.out.open("a") as lines:
                lines.write(f"{line}\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
