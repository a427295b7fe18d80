"""Wrong patches differ from the reference as programs, apply unchanged, and are reproducible."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from coderepairrl.checks.audit.wrong import KINDS, Mutants, WrongPatch, draw_mutants
from rewards.folder import Repository, git

OLD = '''def clamp(value, low, high):
    """Within bounds."""
    return value


def span(values):
    return max(values)
'''
NEW = '''def clamp(value, low, high):
    """Within both bounds."""
    # the lower one first
    if value < low:
        return low
    if value > high:
        return high
    return value


def span(values):
    return max(values) - min(values)
'''
OTHER_OLD, OTHER_NEW = "LIMIT = 4\n", "LIMIT = 5\nSTEP = 1\n"
MORE = "def f():\n    return 1\n"


class Change:
    """A repository of files, and their repair."""

    def __init__(self, folder: Path, old: dict[str, str], new: dict[str, str]) -> None:
        self.folder = folder
        self.reference = Repository(folder).task(old, new).reference
        self.before = {name: old[name].encode() if name in old else None for name in {**old, **new}}
        self.after = {name: text.encode() for name, text in {**old, **new}.items()}

    def wrong(self, count: int = 1000, seed: str = "0") -> Mutants:
        return draw_mutants(self.reference, self.before, self.after, count, seed)

    def applied(self, wrong: WrongPatch) -> dict[str, str]:
        git(self.folder, "apply", "-", stdin=wrong.patch)
        found = {name: (self.folder / name).read_text() for name in self.after if (self.folder / name).exists()}
        git(self.folder, "reset", "-q", "--hard")
        git(self.folder, "clean", "-qfd")
        return found


@pytest.fixture
def change(tmp_path: Path) -> Change:
    old = {"m.py": OLD, "limits.py": OTHER_OLD, "README.md": "a\n", "tests/test_m.py": "x = 1\n"}
    new = {"m.py": NEW, "limits.py": OTHER_NEW, "README.md": "b\n", "tests/test_m.py": "x = 2\n", "more.py": MORE}
    return Change(tmp_path, old, new)


def test_all_kinds_are_made_and_none_is_the_reference_or_nothing(change: Change) -> None:
    made = change.wrong()
    assert {each.kind for each in made.patches} == set(KINDS)
    assert len({each.patch for each in made.patches}) == len(made.patches)
    programs = ("m.py", "limits.py", "more.py")
    repaired = [ast.dump(ast.parse(text)) for text in (NEW, OTHER_NEW, MORE)]
    untouched = [ast.dump(ast.parse(text)) for text in (OLD, OTHER_OLD, "")]
    for wrong in made.patches:
        files = change.applied(wrong)
        assert (files["README.md"], files["tests/test_m.py"]) == ("b\n", "x = 2\n"), "only programs are changed"
        trees = [ast.dump(ast.parse(files.get(name, ""))) for name in programs]
        assert trees not in (repaired, untouched), wrong
    assert made.equivalent > 0, "a docstring and a comment are among the lines of the reference"
    texts = {wrong.what for wrong in made.patches}
    assert "comparison: if value <= low:" in texts and "operator: return max(values) + min(values)" in texts


def test_a_seed_draws_the_same_mutants_and_more_extend_fewer(change: Change) -> None:
    few, many, others = change.wrong(5), change.wrong(9), change.wrong(5, "1")
    assert change.wrong(5) == few and many.patches[:5] == few.patches and others != few
    assert {each.kind for each in few.patches} == set(KINDS), "of each kind in turn"


def test_other_languages_are_changed_by_their_signs(tmp_path: Path) -> None:
    old = {"a.js": "function f(a, b) {\n  return a;\n}\n"}
    body = "  // both\n  if (a <= b && !done(a)) { return b; }\n  let c = 1;\n  return a + c;\n"
    new = {"a.js": f"function f(a, b) {{\n{body}}}\n"}
    change = Change(tmp_path, old, new)
    texts = {change.applied(each)["a.js"] for each in change.wrong().patches}
    for one, other in ((" <= ", " < "), (" && ", " || "), ("!done", "done"), (" + ", " - "), ("c = 1", "c = 0")):
        assert new["a.js"].replace(one, other) in texts
    assert new["a.js"].replace("  // both\n", "") not in texts
