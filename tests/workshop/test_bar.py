"""The bar of `make hello-bar`: what meets it, what misses it."""

from __future__ import annotations

from random import Random

from coderepairrl.types import Ending, Episode, Score
from workshop.tiny import bar


def episodes(seed: int, fixed: float, step: int, *, tried: float = 0.8) -> list[Episode]:
    """256 tasks over 32 functions; a share `tried` has a patch, and `fixed` of these is right."""
    rng = Random(f"{seed}/{step}")
    made = []
    for at in range(256):
        patched = rng.random() < tried
        right = float(patched and rng.random() < fixed)
        made.append(
            Episode(
                f"eval-{step:05d}-{at}",
                f"mutants/m.f{at % 32}/swap-{at:04x}-{'qu'[at % 2]}",
                "eval",
                step,
                str(at),
                0,
                Ending.DONE,
                patch=b"+x\n" if patched else b"",
                scores=(Score("patch_lines", right, 0.5), Score("tests", right, 0.5)),
            )
        )
    return made


def found(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> dict[str, dict[str, bar.Episodes]]:
    seeds = {
        f"seed {seed}": {
            "sampled": (episodes(seed, 0.2, 0), episodes(seed, 0.2 + gain, 1)),
            "sampled, unquoted issues": (episodes(seed + 6, 0.1, 0), episodes(seed + 6, 0.1 + unquoted, 1)),
            "greedy": (episodes(seed + 9, 0.3, 0), episodes(seed + 9, 0.3 + greedy, 1)),
        }
        for seed in range(3)
    }
    return {**seeds, "pooled": bar.pooled(list(seeds.values()))}


def missed(gain: float, greedy: float = 0.2, unquoted: float = 0.3) -> set[str]:
    return {verdict.demand for verdict in bar.judge(found(gain, greedy, unquoted)) if not verdict.met}


def test_a_large_gain_in_every_seed_meets_the_bar() -> None:
    assert missed(0.5) == set()


def test_no_gain_misses_all_of_it_but_the_size() -> None:
    demands = {verdict.demand for verdict in bar.judge(found(0.0))}
    assert missed(0.0, 0.0, 0.0) == demands - {"held-out tasks"}
