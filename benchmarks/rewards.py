"""What rewards cost, how they rank real patches with known outcomes, and what edits that repair nothing earn.

    python benchmarks/rewards.py [--pairs 1000] [--data ../shared/data] [--choose]

Cost: the thesis formula on `difflib`, as the original computes it, against this project's rewards. Pairs are realistic
and made here: files of the standard library, one edit as the oracle, another nearby as the patch. All columns are
timed in turns on blocks of pairs, in CPU seconds. The values of `patch_similarity` are checked to be equal.

Ranking and edits, where there is a folder with the data (``pairs``, ``swebench``, ``humaneval_java``, ``quixbugs``):
what `crrl data rank` says, of SWE-bench (Python) and of functions of HumanEval-Java and QuixBugs-Java, by issue.
``--choose`` repeats the choice of the formula of `patch_edits` by cross-validation over issues (`choice.py`).
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import choice
from coderepairrl.certify import data
from coderepairrl.certify.data.ranking import Judged
from coderepairrl.rewards import PatchEdits, PatchLines, PatchSimilarity

BLOCK = 50
NAMES = ("patch_similarity", "nano_similarity", "patch_lines", "patch_edits")
GOLD = {"lite": "swebench_lite", "verified": "swebench_verified", "full": "swebench_full_devin_sample"}


def pairs(count: int) -> list[tuple[bytes, bytes]]:
    """Diffs of two edits of one file, within 40 lines of each other."""
    rng = random.Random(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text("utf-8", "replace").splitlines(True) for path in sorted(folder.glob("*.py"))]
    sources = [lines for lines in sources if len(lines) > 120]
    made = []
    while len(made) < count:
        lines = rng.choice(sources)
        place = rng.randrange(len(lines) - 60)
        made.append((edit(rng, lines, sources, place), edit(rng, lines, sources, place + rng.randrange(40))))
    return made


def edit(rng: random.Random, lines: list[str], sources: list[list[str]], place: int) -> bytes:
    """One to three hunks of new lines, some changed in a word and some from elsewhere."""
    new = list(lines)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = min(place + rng.randrange(20), len(new) - 1)
        words = re.sub(r"\w+", lambda word: word[0] if rng.random() < 0.7 else f"{word[0]}_x", new[at])
        new[at : at + rng.randrange(1, 6)] = [words, *rng.choices(rng.choice(sources), k=rng.randrange(12))]
    body = "".join(difflib.unified_diff(lines, new, "a/src/module.py", "b/src/module.py"))
    hashes = f"{rng.getrandbits(28):07x}..{rng.getrandbits(28):07x}"
    return f"diff --git a/src/module.py b/src/module.py\nindex {hashes} 100644\n{body}".encode()


def thesis(oracle: bytes, patch: bytes) -> float:
    """The formula on `difflib`, one file."""
    return difflib.SequenceMatcher(None, oracle.decode().strip(), patch.decode().strip()).ratio()


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, packed or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def swebench(folder: Path) -> list[Judged]:
    """Real predictions by issue, whatever data set they were made for; ``diff --git`` lines added where missing."""
    gold = {
        (name, row["instance_id"]): row["patch"].encode()
        for name, file in GOLD.items()
        for row in rows(folder / "swebench" / f"{file}.jsonl.gz")
    }
    return [
        Judged(row["instance_id"], gold[row["dataset"], row["instance_id"]], headed(patch), row["resolved"], "python")
        for row in rows(folder / "pairs" / "swebench_pairs.jsonl.gz")
        if row["status"] not in ("empty", "no_log")
        for patch in [row["model_patch"].encode("utf-8", "surrogatepass")]
    ]


def headed(patch: bytes) -> bytes:
    """`patch` with ``diff --git`` lines."""
    if re.search(rb"^diff --git ", patch, re.MULTILINE):
        return patch
    names = rb"^--- (?:a/)?([^\n\t]*).*\n(?=\+\+\+ )"
    return re.sub(names, lambda found: b"diff --git a/%s b/%s\n" % (found[1], found[1]) + found[0], patch, flags=re.M)


def java(folder: Path) -> list[Judged]:
    """Lines that ten models put in place of the broken ones of a function."""
    sources = {
        "humaneval-java": "humaneval_java/humaneval_java.jsonl.gz",
        "quixbugs-java": "quixbugs/quixbugs_java.jsonl",
    }
    tasks = {(name, row["program"]): row for name, file in sources.items() for row in rows(folder / file)}
    found = []
    for row in rows(folder / "pairs" / "java_function_pairs.jsonl.gz"):
        task = tasks[row["dataset"], row["bug"]]
        path = task["buggy_file"]
        old = task["files"][path].splitlines(keepends=True)
        first, end = map(int, row["loc"].split("-"))
        text = row["patch"] + "\n" * (not row["patch"].endswith("\n") and bool(row["patch"]))
        new = [*old[: first - 1], *text.splitlines(keepends=True), *old[end - 1 :]]
        body = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
        )
        patch = f"diff --git a/{path} b/{path}\n{body}".encode("utf-8", "surrogatepass") if body else b""
        issue = f"{row['dataset']}/{row['bug']}"
        found.append(Judged(issue, task["patch"].encode(), patch, row["correctness"] == "plausible", "java"))
    return found


def ranking(folder: Path, choose: bool) -> None:
    """Print how rewards rank, and what edits earn."""
    if not (folder / "pairs").is_dir():
        print(f"\nno ranking: there are no patches with outcomes in {folder / 'pairs'} (name the folder with --data)")
        return
    sets = {"SWE-bench (Python)": swebench(folder), "HumanEval-Java and QuixBugs-Java": java(folder)}
    for title, judged in sets.items():
        verdicts = data.rank(judged, NAMES)
        print(f"\n## {title}\n\n{data.report(judged, verdicts)}")
    if choose:
        choice.report(sets)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1000, help="to time")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--choose", action="store_true", help="cross-validate forms of patch_edits, too: some minutes")
    wanted = parser.parse_args()
    status = cost(wanted.pairs)
    ranking(wanted.data, wanted.choose)
    return status


def cost(count: int) -> int:
    """Print what rewards cost; 1 if values differ."""
    made = pairs(count)
    columns = {
        "difflib": thesis,
        "patch_similarity": PatchSimilarity().compare,
        "patch_lines": PatchLines().compare,
        "patch_edits": PatchEdits().compare,
    }
    spent = dict.fromkeys(columns, 0.0)
    for first in range(0, len(made), BLOCK):
        found = {}
        for name, compare in columns.items():
            started = time.process_time()
            found[name] = [compare(oracle, patch) for oracle, patch in made[first : first + BLOCK]]
            spent[name] += time.process_time() - started
        if found["patch_similarity"] != found["difflib"]:
            print(f"values differ between pairs {first} and {first + BLOCK}")
            return 1
    sizes = sorted(len(patch) for _, patch in made)
    print(f"{len(made)} pairs, median {sizes[len(sizes) // 2]} bytes, the longest {sizes[-1]}; values equal")
    print(f"{'':20}{'ms a pair':>10}{'times faster than difflib':>28}")
    for name, seconds in spent.items():
        print(f"{name:20}{1e3 * seconds / len(made):10.3f}{spent['difflib'] / seconds:28.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
