"""Mutants in other languages than Python: by syntax alone, verified by what compiles and runs here."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, PrerequisiteError, TaskError
from coderepairrl.grading import grade
from coderepairrl.tasks.mutants import MutantSource, languages
from coderepairrl.tasks.mutants.corpus_tasks import mutants, pairs
from coderepairrl.tasks.mutants.grammars import mutations_in, parser
from coderepairrl.tasks.mutants.languages import LANGUAGES
from coderepairrl.tasks.mutants.slices import UNSEEN_MODULES, functions
from coderepairrl.tasks.mutants.source import unified
from coderepairrl.tasks.mutants.verify import verify_in
from coderepairrl.types import Task

NAMES = list(LANGUAGES)


@pytest.fixture
def chain(language: str, isolating: None) -> None:
    """What compiles and runs `language`; it may be missing outside CI alone."""
    try:
        LANGUAGES[language].check_programs()
    except PrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def workspace(task: Task) -> Path:
    return Path(task.workspace.removeprefix("dir:"))


CODE = {
    "javascript": """\
import { total } from "./total.js";

// a < b && c
export class Cart {
  add(price, count) {
    const label = "a < b";  // price + count
    this.items.push(price, count);
    for (let i = 0; i < count; i++) {
      if (!price && label.startsWith("é")) continue;
      this.sum += price * 2;
    }
    return this.sum >= total(price, `${count + 1} < 2`);
  }
}
const half = (n) => n / 2;
""",
    "java": """\
package a;

/** a < b && c */
public class Cart {
    int add(int price, int count) {
        String label = "a < b";  // price + count
        this.items.put(price, count);
        for (int i = 0; i < count; i++) {
            if (!free && label.startsWith("é")) continue;
            this.sum += price * 2;
        }
        return this.sum >= total(price, count) ? price : count;
    }
}
""",
    "go": """\
package cart

// a < b && c
func (c *Cart) Add(price int, count int) bool {
	label := "a < b" // price + count
	c.put(price, count)
	for i := 0; i < count; i++ {
		if !c.free && strings.HasPrefix(label, "é") {
			continue
		}
		c.sum += price * 2
	}
	return c.sum >= total(price, count)
}
""",
    "rust": """\
impl Cart {
    /// a < b && c
    fn add(&mut self, price: i64, count: i64) -> bool {
        let label = "a < b"; // price + count
        self.put(price, count);
        for i in 0..count {
            if !self.free && label.starts_with("é") {
                continue;
            }
            self.sum += price * 2;
        }
        return self.sum >= total(price, count);
    }
}

#[cfg(test)]
mod tests {
    fn check() -> bool {
        return 1 < 2;
    }
}
""",
    "c": """\
#include <string.h>

/* a < b && c */
static int add(struct cart *cart, int price, int count) {
    const char *label = "a < b"; // price + count
    put(price, count);
    for (int i = 0; i < count; i++) {
        if (!cart->free && strchr(label, 'a')) continue;
        cart->sum += price * 2;
    }
    return cart->sum >= total(price, count);
}
""",
}


@pytest.mark.parametrize("language", NAMES)
def test_one_line_is_changed_where_it_is_code(language: str) -> None:
    source = CODE[language]
    found = mutations_in(source, language)
    kinds = {"operator", "comparison", "boolean", "off by one", "negation", "constant", "control flow"}
    kinds |= {"swapped arguments", "wrong variable", "missing statement"}
    kinds.add("wrong function" if language == "c" else "wrong method")
    assert {m.kind for m in found} >= kinds
    assert ("returned value" in {m.kind for m in found}) == (language != "java")  # whose value is chosen by `?`
    texts = [m.apply(source) for m in found]
    assert len(set(texts)) == len(texts) and source not in texts
    for mutation, text in zip(found, texts, strict=True):
        assert not parser(language).parse(text.encode()).root_node.has_error, text
        pairs = zip(source.split("\n"), text.split("\n"), strict=True)
        [(before, after)] = [(a, b) for a, b in pairs if a != b]
        for inside in ("// price + count", "a < b && c", "< 2`"):  # comments, and text in a template
            assert (inside in before) == (inside in after) or not after
        assert ('"a < b"' in before) == ('"a < b"' in after) or mutation.kind == "constant"
    assert {m.function.lower() for m in found} <= {"cart.add", "add", "half"}


@pytest.mark.parametrize("language", NAMES)
def test_lines_and_columns_are_those_of_the_text(language: str) -> None:
    """Where characters have several bytes, lines end as on Windows, and a form feed is no end of a line."""
    for source in (CODE[language].replace("\n", "\r\n"), CODE[language].replace("a < b && c", "é\x0cé\u2028")):
        for mutation in mutations_in(source, language):
            text = mutation.apply(source)
            assert not parser(language).parse(text.encode()).root_node.has_error, text
            patch = unified("a", source, text)
            assert patch.count(b"\n@@ ") == 1 and b"\n-" in patch


def test_a_function_with_an_error_is_left_alone() -> None:
    source = "int f(int a) { return a < ; }\nint g(int a) { return a < 1; }\n"
    assert {m.function for m in mutations_in(source, "c")} == {"g"}


def test_a_patch_has_lines_as_git_has_them(tmp_path: Path) -> None:
    old, new = "a\x0cb\nc < d\n", "a\x0cb\nc <= d\n"
    (tmp_path / "x.c").write_text(old)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=unified("x.c", old, new), check=True)
    assert (tmp_path / "x.c").read_text() == new


@pytest.mark.parametrize("language", NAMES)
def test_the_corpus_has_functions_of_the_python_corpus(language: str) -> None:
    own, python = functions(language), {f.key: f for f in functions()}
    assert 20 <= len(own) <= 40
    for f in own:
        assert f.checks == python[f.key.removeprefix(f"{language}/")].checks
        assert LANGUAGES[language].spelled(f.name) in f.source
    assert {f.module for f in own} >= UNSEEN_MODULES
    assert max(Counter(f.key for f, _ in pairs(language).values()).values()) <= 6


@pytest.mark.parametrize("language", NAMES)
def test_tasks_are_split_and_quoted_as_in_python(language: str, tmp_path: Path) -> None:
    tasks = list(MutantSource(languages=language, cache=str(tmp_path), sandbox="docker"))
    splits = {split: {t.id[:-2] for t in tasks if t.split == split} for split in ("train", "test", "unseen")}
    assert len(splits["train"]) >= 60 and min(len(splits["test"]), len(splits["unseen"])) >= 20
    assert sum(map(len, splits.values())) == len(set.union(*splits.values())) == len(tasks) / 2
    assert all(task.language == language and task.id.startswith(f"mutants/{language}/") for task in tasks)
    for task in tasks:
        lines = task.reference.decode().split("\n")
        removed = next(line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---"))
        added = next(line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++"))
        quoted = [line.strip() for line in task.prompt.split("\n")]
        assert (removed in quoted) == task.id.endswith("-q") and added not in quoted
    seen = {m.function.name for m in mutants(language) if m.split != "unseen"}
    assert not seen & {f.name for f in functions() if f.module in UNSEEN_MODULES}


def test_languages_take_turns(tmp_path: Path) -> None:
    options = {"split": "train", "quoted": 1, "n": 30, "cache": str(tmp_path), "sandbox": "docker"}
    made = MutantSource(languages=("python", "go", "c"), **options)  # type: ignore[arg-type]
    count = Counter(task.language for task in made)
    assert set(count) == {"python", "go", "c"} and min(count.values()) >= 7


@pytest.mark.parametrize("language", NAMES)
async def test_shipped_verdicts_are_true(language: str, chain: None) -> None:
    """Of some functions, judged anew: what fails, and how."""
    known = {m.key: m for m in mutants(language)}
    keys = sorted(known)[::80]
    judged = await verify_in(language, sandbox.make(sandbox.choose().name), keys)
    for key in keys:
        index, got = judged[key]
        function, symptom = known[key].function, known[key].symptom
        assert got == symptom.got
        assert LANGUAGES[language].call(function.checks[index].call, function.module) == symptom.call


ENDS = {
    "javascript": "process.exit(0);",
    "java": "System.exit(0);",
    "go": "os.Exit(0)",
    "rust": "std::process::exit(0);",
    "c": "__builtin_exit(0);",
}


@pytest.mark.parametrize("language", NAMES)
async def test_a_bug_fails_its_repair_passes_and_ending_early_does_not(
    language: str, chain: None, tmp_path: Path
) -> None:
    backend = sandbox.make(sandbox.choose().name)
    [task] = MutantSource(languages=language, split="train", n=1, cache=str(tmp_path))
    [path] = [path for path in workspace(task).iterdir() if path.name not in task.checks.restore]
    source = path.read_text()
    ended = re.sub(r"^(?!class).*\) .*{$", rf"\g<0>\n{ENDS[language]}", source, flags=re.MULTILINE)
    ended = ended.replace("package main\n", 'package main\nimport "os"\n')
    assert ENDS[language] in ended
    for patch, passes in (
        (b"", False),
        (task.reference, True),
        (unified(path.name, source, ended), False),
        (unified(path.name, source, source + "}"), False),
    ):
        async with backend.open(task) as box:
            verdict = await grade(box, task, patch)
        assert (verdict.problem == "") == passes, (task.id, patch, verdict)


PACKAGES = {
    "javascript": {
        "lib/cart.js": "exports.cheap = function (price, limit) {\n  return price < limit;\n};\n",
        "test/cart.test.js": 'const test = require("node:test");\nconst assert = require("node:assert");\n'
        'const { cheap } = require("../lib/cart.js");\ntest("cheap", () => {\n  assert.equal(cheap(1, 2), true);\n'
        "  assert.equal(cheap(2, 2), false);\n});\n",
    },
    "java": {
        "src/Cart.java": "class Cart {\n    static boolean cheap(int price, int limit) {\n"
        "        return price < limit;\n    }\n}\n",
        "test/CartTest.java": "class CartTest {\n    public static void main(String[] args) {\n"
        "        assert Cart.cheap(1, 2);\n        assert !Cart.cheap(2, 2);\n    }\n}\n",
    },
    "go": {
        "go.mod": "module cart\n",
        "cart.go": "package cart\n\nfunc Cheap(price, limit int) bool {\n\treturn price < limit\n}\n",
        "cart_test.go": 'package cart\n\nimport "testing"\n\nfunc TestCheap(t *testing.T) {\n'
        "\tif !Cheap(1, 2) || Cheap(2, 2) {\n\t\tt.Fatal(Cheap(2, 2))\n\t}\n}\n",
    },
    "rust": {
        "cart.rs": "pub fn cheap(price: i64, limit: i64) -> bool {\n    return price < limit;\n}\n",
        "tests/cart.rs": '#[path = "../cart.rs"]\nmod cart;\n\n#[test]\nfn cheap() {\n    assert!(cart::cheap(1, 2));\n'
        "    assert!(!cart::cheap(2, 2));\n}\n",
    },
    "c": {
        "cart.c": "int cheap(int price, int limit) {\n    return price < limit;\n}\n",
        "test_cart.c": "#include <assert.h>\nint cheap(int, int);\nint main(void) {\n    assert(cheap(1, 2));\n"
        "    assert(!cheap(2, 2));\n}\n",
    },
}
COMMANDS = {  # what builds, and what tests
    "javascript": ("", "node --test test/"),
    "java": (
        "sh -c 'javac -d /tmp/out src/Cart.java'",
        "sh -c 'javac -d /tmp/out src/Cart.java test/CartTest.java && java -ea -cp /tmp/out CartTest'",
    ),
    "go": ("env GOCACHE=/tmp/go go build ./...", "env GOCACHE=/tmp/go go test -vet=off ./..."),
    "rust": (
        "rustc --crate-type lib -o /tmp/cart.rlib cart.rs",
        "sh -c 'rustc --test -o /tmp/tests tests/cart.rs && /tmp/tests'",
    ),
    "c": ("gcc -Werror -c -o /tmp/cart.o cart.c", "sh -c 'gcc -o /tmp/tests cart.c test_cart.c && /tmp/tests'"),
}


@pytest.mark.parametrize("language", NAMES)
async def test_a_users_package_is_broken_by_its_own_tests(language: str, chain: None, tmp_path: Path) -> None:
    root = tmp_path / "package"
    for name, content in PACKAGES[language].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    build, command = COMMANDS[language]
    options = {"path": str(root), "languages": language, "command": command, "build": build, "n": 1, "timeout": 60.0}
    tasks = list(MutantSource(**options, cache=str(tmp_path / "cache")))  # type: ignore[arg-type]
    assert tasks and {task.language for task in tasks} == {language}
    [code, test] = [name for name in PACKAGES[language] if not name.endswith(".mod")]
    backend = sandbox.make(sandbox.choose().name)
    for task in tasks:
        assert list(task.checks.restore) == [test] and f"+++ b/{code}".encode() in task.reference
        async with backend.open(task) as box:
            assert (await grade(box, task, b"")).problem
        async with backend.open(task) as box:
            assert not (await grade(box, task, task.reference)).problem


async def test_what_does_not_compile_is_no_bug(isolating: None, tmp_path: Path) -> None:
    """Also where the tests fail of it: with a build that always fails for other text, nothing is left."""
    for name, content in PACKAGES["c"].items():
        (tmp_path / name).write_text(content)
    options = {"path": str(tmp_path), "languages": "c", "command": COMMANDS["c"][1], "n": 2}
    with pytest.raises(TaskError, match="notice none"):
        list(MutantSource(**options, build="grep -q 'price < limit;' cart.c", cache=str(tmp_path / "1")))  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="does not build before any bug"):
        list(MutantSource(**options, build="false", cache=str(tmp_path / "2")))  # type: ignore[arg-type]


def test_missing_programs_and_languages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(LANGUAGES["rust"], programs={"no-such-rustc": "rustc"})
    monkeypatch.setattr(languages, "LANGUAGES", {**LANGUAGES, "rust": nowhere})
    with pytest.raises(PrerequisiteError, match="need no-such-rustc") as caught:
        nowhere.check_programs()
    assert "rustc" in str(caught.value.fix)
    for options, message in (
        ({"languages": "cobol"}, "cobol"),
        ({"languages": ()}, "needs a language"),
        ({"path": "x", "languages": "go", "command": "go test ./..."}, "shows what compiles"),
        ({"path": "x", "languages": "javascript"}, "the command that runs the tests"),
    ):
        with pytest.raises(ConfigError, match=message):
            MutantSource(**options)  # type: ignore[arg-type]
    (tmp_path / "a.js").write_text("function f(a) {\n  return a < 1;\n}\n")
    with pytest.raises(TaskError) as refused:
        list(MutantSource(str(tmp_path), command="true", cache=str(tmp_path / "cache")))
    assert "languages=javascript" in str(refused.value.fix)
