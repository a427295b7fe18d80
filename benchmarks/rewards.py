"""Cost of rewards: the thesis formula on `difflib`, as the original computes it, against this project's rewards.

    python benchmarks/rewards.py [--pairs 1000]

Pairs are realistic and made here: files of the standard library, one edit as the oracle, another nearby as the patch.
All columns are timed in turns on blocks of pairs, in CPU seconds. `patch_similarity` must equal the formula.
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import sys
import sysconfig
import time
from pathlib import Path

from coderepairrl.rewards import PatchEdits, PatchLines, PatchSimilarity

BLOCK = 50


def pairs(count: int) -> list[tuple[bytes, bytes]]:
    """Diffs of two edits of one file, within 40 lines of each other."""
    rng = random.Random(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text("utf-8", "replace").splitlines(True) for path in sorted(folder.glob("*.py"))]
    sources = [lines for lines in sources if len(lines) > 120]
    patches = []
    while len(patches) < count:
        lines = rng.choice(sources)
        place = rng.randrange(len(lines) - 60)
        patches.append((edit(rng, lines, sources, place), edit(rng, lines, sources, place + rng.randrange(40))))
    return patches


def edit(rng: random.Random, lines: list[str], sources: list[list[str]], place: int) -> bytes:
    """A diff of one to three hunks of new lines, some changed in a word and some from elsewhere."""
    new = list(lines)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = min(place + rng.randrange(20), len(new) - 1)
        words = re.sub(r"\w+", lambda word: word[0] if rng.random() < 0.7 else f"{word[0]}_x", new[at])
        new[at : at + rng.randrange(1, 6)] = [words, *rng.choices(rng.choice(sources), k=rng.randrange(12))]
    body = "".join(difflib.unified_diff(lines, new, "a/src/module.py", "b/src/module.py"))
    hashes = f"{rng.getrandbits(28):07x}..{rng.getrandbits(28):07x}"
    return f"diff --git a/src/module.py b/src/module.py\nindex {hashes} 100644\n{body}".encode()


def thesis(oracle: bytes, patch: bytes) -> float:
    """The thesis formula on `difflib` for one file."""
    return difflib.SequenceMatcher(None, oracle.decode().strip(), patch.decode().strip()).ratio()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1000, help="to time")
    return cost(parser.parse_args().pairs)


def cost(count: int) -> int:
    """Print the cost of each reward; returns 1 if values differ."""
    patches = pairs(count)
    columns = {
        "difflib": thesis,
        "patch_similarity": PatchSimilarity().compare,
        "patch_lines": PatchLines().compare,
        "patch_edits": PatchEdits().compare,
    }
    spent = dict.fromkeys(columns, 0.0)
    for first in range(0, len(patches), BLOCK):
        values = {}
        for name, compare in columns.items():
            started = time.process_time()
            values[name] = [compare(oracle, patch) for oracle, patch in patches[first : first + BLOCK]]
            spent[name] += time.process_time() - started
        if values["patch_similarity"] != values["difflib"]:
            print(f"values differ between pairs {first} and {first + BLOCK}")
            return 1
    sizes = sorted(len(patch) for _, patch in patches)
    print(f"{len(patches)} pairs, median {sizes[len(sizes) // 2]} bytes, the longest {sizes[-1]}; values equal")
    print(f"{'':20}{'ms a pair':>10}{'times faster than difflib':>28}")
    for name, seconds in spent.items():
        print(f"{name:20}{1e3 * seconds / len(patches):10.3f}{spent['difflib'] / seconds:28.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
