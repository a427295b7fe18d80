"""Checks of Java programs by javac and JUnit 4, reported as JUnit XML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coderepairrl.types import Checks, Command

JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest.jar"
"""Location in Debian's packages junit4 and libhamcrest-java."""
_RUNNER = "CrrlReport"
_REPORT = """\
import java.util.*;
import org.junit.runner.*;
import org.junit.runner.notification.*;

public class CrrlReport extends RunListener {
    private final Map<Description, String> found = new LinkedHashMap<>();

    @Override public void testStarted(Description test) { found.put(test, ""); }
    @Override public void testFailure(Failure failure) { found.put(failure.getDescription(), "<failure/>"); }
    @Override public void testAssumptionFailure(Failure failure) {
        found.put(failure.getDescription(), "<skipped/>");
    }
    @Override public void testIgnored(Description test) { found.put(test, "<skipped/>"); }

    private static String quoted(String text) {
        return text.replace("&", "&amp;").replace("<", "&lt;").replace("\\"", "&quot;");
    }

    public static void main(String[] args) throws Exception {
        CrrlReport report = new CrrlReport();
        JUnitCore core = new JUnitCore();
        core.addListener(report);
        boolean passed = core.run(Class.forName(args[0])).wasSuccessful();
        StringBuilder xml = new StringBuilder("<testsuite>\\n");
        report.found.forEach((test, outcome) -> xml.append("<testcase classname=\\"")
            .append(quoted(test.getClassName())).append("\\" name=\\"")
            .append(quoted(String.valueOf(test.getMethodName()))).append("\\">")
            .append(outcome).append("</testcase>\\n"));
        java.nio.file.Files.writeString(java.nio.file.Path.of(args[1]), xml.append("</testsuite>\\n"));
        Runtime.getRuntime().halt(passed ? 0 : 1);
    }
}
"""
_SCRIPT = """
results=$1 class=$2 jars=$3; shift 3
out=$(mktemp -d) || exit 1
javac -nowarn -Xlint:none -encoding UTF-8 -cp "$jars" -d "$out" "$@" || exit 1
exec java -Xmx1g -Xss4m -cp "$out:$jars" CrrlReport "$class" "$results"
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

    Tests are named ``package.Class.method`` (or ``::`` before the method). They fail if the JVM ends early.
    """
    words = ["sh", "-c", _SCRIPT, "sh", "{results}", test_class, jars, f"{_RUNNER}.java", *sorted({*tests, *sources})]
    return Checks(
        (Command(tuple(words), seconds, "junit"),),
        {**tests, f"{_RUNNER}.java": _REPORT},
        tuple(name.replace("::", ".") for name in fail_to_pass),
        tuple(name.replace("::", ".") for name in pass_to_pass),
    )
