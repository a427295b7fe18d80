"""The corpus in other languages: how a tiny repository looks in each, and how its checks run.

Functions and their checks are those of the Python corpus (`slices`), so that the same bug in the same algorithm can be
asked for in each. A check is one line of a program that ends at the first check that fails, and whose last line is a
word that the program is given: a repair that only ends the program early has failed.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from coderepairrl.errors import PrerequisiteError
from coderepairrl.sandbox.interpreter import install_command

SCRIPT = "test.sh"
"""Compiles and runs the checks of a repository."""
_RUN = """\
d=$(mktemp -d) && word=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ') || exit 1
${build}last=$($start "$word") || exit 1
[ "$${last##*[!0-9a-f]}" = "$word" ]
"""
_PLACES = "/usr/local/bin:/usr/bin:/bin"
"""Where sandboxes look for programs."""


@dataclass(frozen=True, slots=True)
class Language:
    """A language of the corpus. Texts are templates; ``$module`` is a module's name, ``$Module`` capitalized."""

    name: str
    programs: Mapping[str, str]
    """What compiles or runs it, and Debian's package with it."""
    path: str
    module: str
    """A file of functions: ``$functions``, ``$names``."""
    tests: str
    """A program of ``$checks``, which prints its first argument at the end."""
    check: str
    """A line of it: ``$call``, ``$want``."""
    show: str
    """The line that prints what a call gives instead, after ``= ``."""
    build: str
    start: str
    arrays: str
    """A list of numbers (``...``) as an argument."""
    died: str
    """Finds, in what a program printed that an error has ended, what the error is called."""
    beside: tuple[str, ...] = ()
    """The same with other values around it, on which no verdict may depend."""
    camel: bool = False
    indent: str = "    "
    """Of checks."""
    seconds: float = 20.0

    def module_path(self, module: str) -> str:
        """File of a module."""
        return _filled(self.path, module)

    def tests_path(self, module: str) -> str:
        """File of its checks."""
        return self.module_path(f"test_{module}") if self.name != "java" else f"Test{self.module_path(module)}"

    def module_text(self, module: str, names: Sequence[str], sources: Sequence[str]) -> str:
        """Functions as a file, a blank line apart."""
        functions = "\n\n".join(source.strip("\n") for source in sources)
        if self.name == "java":
            functions = textwrap.indent(functions, "    ")
        return _filled(self.module, module, functions=functions, names=", ".join(sorted(map(self.spelled, names))))

    def tests_text(
        self, module: str, names: Sequence[str], checks: Sequence[tuple[str, str]], *, show: bool = False
    ) -> str:
        """The program that runs checks: pairs of a call and what it gives, in Python. With `show` it prints values."""
        lines = [
            _filled(self.show if show else self.check, module, call=self.call(call, module), want=self.value(want))
            for call, want in checks
        ]
        body = textwrap.indent("\n".join(lines), self.indent)
        return _filled(self.tests, module, checks=body, names=", ".join(sorted(map(self.spelled, names))))

    def script(self, module: str) -> str:
        """What `SCRIPT` does for a module."""
        build = f"{_filled(self.build, module)} || exit 1\n" if self.build else ""
        return _filled(_RUN, module, build=build, start=_filled(self.start, module))

    def spelled(self, name: str) -> str:
        """The name of a function of the Python corpus.

        >>> GO.spelled("is_leap"), C.spelled("is_leap")
        ('isLeap', 'is_leap')
        """
        first, *others = name.split("_")
        return first + "".join(part.capitalize() for part in others) if self.camel else name

    def call(self, call: str, module: str) -> str:
        """A call of the Python corpus.

        >>> RUST.call("argmax([3, -9])", "search"), C.call("argmax([3, -9])", "search")
        ('argmax(&[3, -9])', 'argmax((int[]){3, -9}, 2)')
        """
        node = ast.parse(call, mode="eval").body
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        given = [ast.unparse(argument) for argument in node.args]
        last = max((index for index, text in enumerate(given) if text.startswith("[")), default=-1)
        arguments = []
        for index, text in enumerate(given):
            arguments.append(self.value(text))
            if index == last and self.name == "c":  # two lists are of one length
                arguments.append(str(len(ast.literal_eval(text))))
        within = f"{module.capitalize()}." if self.name == "java" else ""
        return f"{within}{self.spelled(node.func.id)}({', '.join(arguments)})"

    def value(self, text: str) -> str:
        """A number, a truth value or a list of numbers in Python.

        >>> GO.value("True"), GO.value("[1, 2]")
        ('true', '[]int{1, 2}')
        """
        if text.startswith("["):
            return self.arrays.replace("..." if len(text) > 2 else "..., ", text[1:-1]).replace("...", "")
        return text.lower()

    def error(self, output: str) -> str:
        """The name of the error that has ended a program which printed `output`; empty if none is seen."""
        found = re.search(self.died, output, re.MULTILINE) if self.died else None
        return found[1].strip() if found else ""

    def check_programs(self) -> None:
        """Raise `PrerequisiteError` for what sandboxes on this machine will not find."""
        for program, package in self.programs.items():
            if shutil.which(program, path=_PLACES) is None:
                raise PrerequisiteError(
                    f"tasks in {self.name} need {program} in {_PLACES.replace(':', ', ')}, where sandboxes look",
                    fix=install_command(package),
                )


def _filled(text: str, module: str, **values: str) -> str:
    """`text` with names of the module and `values` in their places; of a shell's ``$`` nothing else is touched."""
    return Template(text).safe_substitute(values, module=module, Module=module.capitalize())


JAVASCRIPT = Language(
    name="javascript",
    programs={"node": "nodejs"},
    path="$module.js",
    module="$functions\n\nmodule.exports = { $names };\n",
    tests='const assert = require("assert");\nconst { $names } = require("./$module");\n\n$checks\n'
    "console.log(process.argv[2]);\n",
    check="assert.strictEqual($call, $want);",
    show='console.error("=", $call);',
    build="",
    start="node test_$module.js",
    arrays="[...]",
    died=r"^(\w*Error)\b",
    camel=True,
    indent="",
)
JAVA = Language(
    name="java",
    programs={"javac": "default-jdk-headless", "java": "default-jdk-headless"},
    path="$Module.java",
    module="class $Module {\n$functions\n}\n",
    tests="class Test$Module {\n    public static void main(String[] args) {\n$checks\n"
    "        System.out.println(args[0]);\n    }\n}\n",
    check="assert $call == $want;",
    show='System.err.println("= " + $call);',
    build='javac -J-XX:TieredStopAtLevel=1 -J-XX:+UseSerialGC -d "$d" $Module.java Test$Module.java',
    start='java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -ea -cp "$d" Test$Module',
    arrays="new int[] {...}",
    died=r'Exception in thread "main" java\.lang\.(\w+)',
    camel=True,
    indent="        ",
)
GO = Language(
    name="go",
    programs={"go": "golang-go"},
    path="$module.go",
    module="package main\n\n$functions\n",
    tests='package main\n\nimport "os"\n\nfunc check(ok bool) {\n\tif !ok {\n\t\tpanic("wrong")\n\t}\n}\n\n'
    "func main() {\n$checks\n\tos.Stdout.WriteString(os.Args[1])\n}\n",
    check="check($call == $want)",
    show='println("=", $call)',
    build='env GO111MODULE=off GOCACHE="$d" GOPATH="$d" go build -o "$d/tests" $module.go test_$module.go',
    start='"$d/tests"',
    arrays="[]int{...}",
    died=r"^panic: (?:runtime error: )?([^\[\n]+)",
    camel=True,
    indent="\t",
)
RUST = Language(
    name="rust",
    programs={"rustc": "rustc"},
    path="$module.rs",
    module="$functions\n",
    tests="mod $module;\nuse $module::*;\n\nfn main() {\n$checks\n"
    '    println!("{}", std::env::args().nth(1).unwrap());\n}\n',
    check="assert!($call == $want);",
    show='eprintln!("= {}", $call);',
    build='rustc -A warnings -o "$d/tests" test_$module.rs',
    start='"$d/tests"',
    arrays="&[...]",
    died=r"panicked at (?:'|[^'\n]*:\n)([^':\n]+)",  # before and since Rust 1.73
)
C = Language(
    name="c",
    programs={"gcc": "gcc"},
    path="$module.c",
    module="#include <stdbool.h>\n\n$functions\n",
    tests='#include <assert.h>\n#include <stdio.h>\n#include "$module.c"\n\n'
    "int main(int argc, char **argv) {\n$checks\n    puts(argv[1]);\n}\n",
    check="assert($call == $want);",
    show='fprintf(stderr, "= %d\\n", $call);',
    # ended by what the language leaves undefined, but for reading beside a list: sandboxes are too small for that
    build='gcc -w -fsanitize=undefined -fno-sanitize-recover=all -o "$d/tests" test_$module.c',
    start='"$d/tests"',
    arrays="(int[]){...}",
    beside=("(int[]){9999, ..., 9999} + 1", "(int[]){-9999, ..., -9999} + 1"),
    died="",
)
LANGUAGES: Mapping[str, Language] = {each.name: each for each in (JAVASCRIPT, JAVA, GO, RUST, C)}
"""Besides Python."""
LANGUAGE_NAMES = ("python", *LANGUAGES)
