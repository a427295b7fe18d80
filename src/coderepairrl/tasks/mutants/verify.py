"""``python -m coderepairrl.tasks.mutants.verify [LANGUAGE ...]``: judge mutations of the corpus, write how each fails.

Without a language it is Python, which takes half a minute. Others are compiled and run in a sandbox, some minutes each.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coderepairrl import sandbox as sandboxes
from coderepairrl.printable import visible
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import SandboxBackend
from coderepairrl.tasks.mutants.corpus_tasks import corpus_digest, pairs, verified
from coderepairrl.tasks.mutants.judge import Failure, judge
from coderepairrl.tasks.mutants.languages import LANGUAGES, Language
from coderepairrl.tasks.mutants.slices import Function, functions, repository
from coderepairrl.types import Task

SECONDS = 5.0
"""After which a mutation is taken to hang."""


def verify(keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Judge every mutation of the corpus, or those of `keys`: the failure of each, by key, for those that fail a check
    in time.

    Raises RuntimeError when a function of the corpus fails its own checks.
    """
    healthy = judge((f.source, [(c.call, c.want) for c in f.checks]) for f in functions())
    if sick := [f.key for f, failure in zip(functions(), healthy, strict=True) if failure is not None]:
        raise RuntimeError(f"functions of the corpus fail their own checks: {', '.join(sick)}")
    known = pairs()
    asked = {key: known[key] for key in (known if keys is None else keys)}
    failures = judge((m.apply(f.source), [(c.call, c.want) for c in f.checks]) for f, m in asked.values())
    found = {key: each for key, each in zip(asked, failures, strict=True) if each is not None and each[0] >= 0}
    return {"corpus": corpus_digest(known), **found}


async def verify_in(language: str, backend: SandboxBackend, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """The same for another language, or for some of its mutations, one after the other in a sandbox each.

    Left out is what does not compile, does not end within `SECONDS`, or does what C leaves undefined. Raises
    RuntimeError as `verify` does, `PrerequisiteError` without the language's programs, and `SandboxFault`.
    """
    LANGUAGES[language].check_programs()
    known = pairs(language)
    for function in functions(language):
        if keys is None and (failure := await _failure(function, backend)) is not None:
            raise RuntimeError(f"{function.key} fails its own checks: {failure}")
    found = {}
    for key in known if keys is None else keys:
        function, mutation = known[key]
        failure = await _failure(replace(function, source=mutation.apply(function.source)), backend)
        if failure is not None and failure[0] >= 0:
            found[key] = failure
    return {"corpus": corpus_digest(known), **found}


async def _failure(function: Function, backend: SandboxBackend) -> Failure | None:
    """The first check that fails and what it gives, as `judge` says it; ``[-1, reason]`` for what cannot count."""
    layout = LANGUAGES[function.language]
    failure = await _once(function, backend, layout)
    for arrays in layout.beside if failure is not None and failure[0] >= 0 else ():
        if await _once(function, backend, replace(layout, arrays=arrays)) != failure:
            return [-1, "depends on what lies beside a list"]
    return failure


async def _once(function: Function, backend: SandboxBackend, layout: Language) -> Failure | None:
    made, checks = repository([function]), [(check.call, check.want) for check in function.checks]
    printing = layout.tests_text(function.module, [function.name], checks, show=True)
    files = {made.path: made.text, **made.tests, layout.tests_path(function.module): printing}
    with scratch("verify") as folder:
        for path, text in files.items():
            (folder / path).write_text(text)
        task = Task(f"mutants/{function.key}", "verify", function.language, f"dir:{folder}", b"")
        async with backend.open(task) as sandbox:
            result = await sandbox.exec(made.command, timeout=SECONDS)
    output = result.output.decode("utf-8", "replace")
    values = [line.removeprefix("= ") for line in output.splitlines() if line.startswith("= ")]
    for index, (_, want) in enumerate(checks):
        if index == len(values):
            error = layout.error(output)
            return [-1, output[-500:]] if result.timed_out or not error else [index, error]
        got = values[index]
        if want in ("True", "False"):
            got = {"0": "false", "1": "true"}.get(got, got)  # as C prints them
        if got != layout.value(want):
            return [index, got]
    return None


def main(languages: Sequence[str]) -> None:
    """Write the verdicts of each language."""
    for language in languages:
        if language == "python":
            verdicts = verify()
        else:
            backend = sandboxes.make(sandboxes.choose().name)
            try:
                verdicts = asyncio.run(verify_in(language, backend))
            finally:
                backend.close()
        body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in verdicts.items())
        verified(language).write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
        print(visible(f"{language}: {len(verdicts) - 1} of {len(pairs(language))} mutations fail a check"))


if __name__ == "__main__":
    main(sys.argv[1:] or ["python"])
