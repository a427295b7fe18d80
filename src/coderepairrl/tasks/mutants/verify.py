"""``python -m coderepairrl.tasks.mutants.verify``: judge the corpus's mutations and write the verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coderepairrl.tasks.mutants.corpus_tasks import VERIFIED, corpus_digest, pairs
from coderepairrl.tasks.mutants.judge import judge
from coderepairrl.tasks.mutants.slices import functions


def verify(keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Failure by key of each mutation (of `keys`, if set) that fails a check in time.

    Raises RuntimeError if a corpus function fails its own checks.
    """
    healthy = judge((f.source, [(c.call, c.want) for c in f.checks]) for f in functions())
    if sick := [f.key for f, failure in zip(functions(), healthy, strict=True) if failure is not None]:
        raise RuntimeError(f"functions of the corpus fail their own checks: {', '.join(sick)}")
    all_pairs = pairs()
    chosen = {key: all_pairs[key] for key in (all_pairs if keys is None else keys)}
    failures = judge((m.apply(f.source), [(c.call, c.want) for c in f.checks]) for f, m in chosen.values())
    noticed = {key: each for key, each in zip(chosen, failures, strict=True) if each is not None and each[0] >= 0}
    return {"corpus": corpus_digest(all_pairs), **noticed}


if __name__ == "__main__":
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in verify().items())
    VERIFIED.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
