"""Checks of Java programs by javac and JUnit 4, each test reported by a witness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coderepairrl.grading import programs
from coderepairrl.grading.witness import JUNIT_FILE
from coderepairrl.types import Checks, Command

JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest.jar"
"""Location in Debian's packages junit4 and libhamcrest-java."""
_SCRIPT = """
class=$1 jars=$2; shift 2
out=$(mktemp -d) || exit 1
javac -nowarn -Xlint:none -proc:none -encoding UTF-8 -cp "$jars" -d "$out" "$@" </dev/null || exit 1
exec java -Xmx1g -Xss4m -cp "$jars:$out" CrrlWitness "$class" "$out"
"""
"""QuixBugs' KNAPSACK allocates about 600 MB."""


def checks(
    tests: Mapping[str, str],
    sources: Sequence[str],
    test_class: str,
    *,
    fail_to_pass: Sequence[str] = (),
    pass_to_pass: Sequence[str] = (),
    jars: str = JARS,
    seconds: float = 120.0,
) -> Checks:
    """Compile `sources` with restored `tests` (contents by path), and run `test_class`.

    Tests are named ``package.Class.method`` (or ``::`` before the method), and fail if the JVM ends early.
    """
    words = ["sh", "-c", _SCRIPT, "sh", test_class, jars, JUNIT_FILE, *sorted({*tests, *sources})]
    return Checks(
        (Command(tuple(words), seconds, "junit"),),
        {**tests, JUNIT_FILE: programs.JUNIT},
        tuple(name.replace("::", ".") for name in fail_to_pass),
        tuple(name.replace("::", ".") for name in pass_to_pass),
    )
