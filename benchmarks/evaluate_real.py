"""`crrl eval` on a real benchmark with a known answer: does it report the share of tasks that were repaired?

    python benchmarks/evaluate_real.py --work FOLDER quixbugs path=quixbugs_python.jsonl
    python benchmarks/evaluate_real.py --work FOLDER swe_bench path=verified.jsonl.gz workspace=native clone=...

The tasks are evaluated twice through the agent Nano, with a context of 16,384 tokens. First an engine replays the
reference of a share of the tasks (`--share`), drawn by the hash of their ids, and replies "Done." to the others; then
random weights sample. `crrl eval` must print an interval that holds the share, then exactly 0; the exit code is 1
otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from coderepairrl import tasks
from coderepairrl.config import parse_options
from coderepairrl.engines import ScriptedEngine
from coderepairrl.protocols import EngineSpec
from coderepairrl.types import EngineNeeds, Sampling
from real_repositories import CONTEXT, write_model

LIMITS = (
    "agent.name=nano",
    "rollout.calls=3",
    f"rollout.tokens={CONTEXT}",
    "rollout.seconds=900",
    "rollout.concurrency=2",
    "sandbox.options.memory=4294967296",
)


class Known(EngineSpec):
    """An engine that applies the patch of a known prompt. `repairs`: a JSON file, prompt to patch."""

    name = "known"

    def __init__(self, *, repairs: str) -> None:
        self._repairs: dict[str, str] = json.loads(Path(repairs).read_text())

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        words = Tokenizer.from_file(str(model / "tokenizer.json"))

        def script(ids: Sequence[int], sampling: Sampling, seed: int) -> Sequence[int]:
            text = words.decode(list(ids), skip_special_tokens=False)
            reply = "Done."
            if "<tool_response>" not in text:
                for prompt, patch in self._repairs.items():
                    if prompt in text:
                        command = f"git apply - <<'END_OF_PATCH'\n{patch}END_OF_PATCH"
                        call = {"name": "shell", "arguments": {"cmd": command}}
                        reply = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            return words.encode(f"{reply}<|im_end|>", add_special_tokens=False).ids

        return ScriptedEngine(script, context=CONTEXT, chunk=64)


def evaluate(work: Path, name: str, words: Sequence[str]) -> tuple[float, float, float, float]:
    """Run `crrl eval`: the share resolved, the ends of its interval, and wall-clock seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "coderepairrl.cli", "eval", *words, "--policy", str(work / "model")]
    command += [*LIMITS, "-o", str(work / name)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    [summary] = (work / name).glob("eval/*/summary.json")
    resolved = json.loads(summary.read_text())["outcomes"]["resolved"]
    return resolved["value"], resolved["low"], resolved["high"], time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a new folder")
    parser.add_argument("--share", type=float, default=0.4, help="of the tasks, repaired as published")
    parser.add_argument("source")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    write_model(options.work / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.work / "model")).save_pretrained(
        options.work / "model"
    )
    source = tasks.make_source(options.source, **parse_options(options.options))
    test = sorted((task for task in source if task.split == "test"), key=lambda each: each.id)
    by_hash = sorted(test, key=lambda each: hashlib.sha256(each.id.encode()).hexdigest())
    repaired = by_hash[: round(options.share * len(test))]
    repairs = {each.prompt.strip(): each.reference.decode() for each in repaired}
    (options.work / "repairs.json").write_text(json.dumps(repairs))
    replay = ["engine.name=evaluate_real:Known", f"engine.options.repairs={options.work / 'repairs.json'}"]
    words = [options.source, *options.options]
    value, low, high, seconds = evaluate(options.work, "replay", [*words, *replay, "rollout.turn_tokens=12000"])
    print(f"\n{len(repaired)} of {len(test)} repaired: found {value:.3f} [{low:.3f}, {high:.3f}] in {seconds:.0f} s")
    right = low <= len(repaired) / len(test) <= high
    value, low, high, seconds = evaluate(options.work, "random", [*words, "rollout.turn_tokens=256"])
    print(f"\nrandom weights: {value:.3f} [{low:.3f}, {high:.3f}] in {seconds:.0f} s")
    return 0 if right and value == 0.0 else 1


if __name__ == "__main__":
    sys.exit(main())
