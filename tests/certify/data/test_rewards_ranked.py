"""`crrl data rank`: rewards against known outcomes, and the edits that should earn nothing."""

from __future__ import annotations

import difflib
import json
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from coderepairrl.certify import data
from coderepairrl.certify.data.spoil import ZERO, spoiled
from coderepairrl.errors import UsageError
from coderepairrl.rewards import PatchEdits, parse
from commands import CRRL
from rewards.folder import records

SOURCE = "".join(f"def step_{i}(a, b):\n    return a - b * {i}\n\n\n" for i in range(30))


@pytest.fixture
def rows() -> list[dict[str, object]]:
    """Ten tasks, each with a repair, a near one, a wrong one and nothing."""
    found: list[dict[str, object]] = []
    for i in range(10):
        oracle, *others = (diff(i, new) for new in (f"a + b * {i}", f"a * b * {i}", "None"))
        for patch in (oracle, *others, ""):
            found.append({"task": f"t/{i}", "reference": oracle, "patch": patch, "resolved": patch == oracle})
    return found


def diff(step: int, new: str) -> str:
    old = SOURCE.splitlines(keepends=True)
    changed = SOURCE.replace(f"return a - b * {step}\n", f"return {new}\n").splitlines(keepends=True)
    return "diff --git a/m.py b/m.py\n" + "".join(difflib.unified_diff(old, changed, "a/m.py", "b/m.py"))


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_audit_ranks_and_prices(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    found = data.rank(data.read(write(tmp_path, rows)), ["patch_similarity", "patch_edits"])
    thesis, edits = found
    assert edits.overall.value == edits.within.value == 1.0
    assert thesis.gain_overall == thesis.gain_within == (0.0, None, None)
    assert edits.cheap["reference"] == thesis.cheap["reference"] == 1.0
    assert all(edits.cheap[name] == 0.0 for name in ZERO)
    assert thesis.cheap["blank line"] > 0.2
    assert edits.cheap["junk in the right file"] < 0.1
    text = data.report(data.read(write(tmp_path, rows)), found)
    assert "40 patches, 10 resolved, 10 tasks, 10 with both" in text
    assert "| `patch_edits` | 1.000 [too few] |" in text


def test_the_command(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    command = [*CRRL, "data", "rank", str(write(tmp_path, rows)), "--json"]
    chart = tmp_path / "figure.svg"
    command += ["--reward", "file_match", "--figure", str(chart)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["reward"] == "file_match"
    assert found["cheap"]["junk in the right file"] == 1.0
    assert "file_match" in chart.read_text()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 1: not read as JSON"),
        ("[]", "line 1: no object"),
        ('{"task": "a", "reference": "", "patch": 3, "resolved": true}', "patch is missing or no str"),
        ('{"task": "a", "reference": "", "patch": "", "resolved": true}', "all patches have one outcome"),
    ],
)
def test_bad_rows_are_refused_by_line(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=says) as caught:
        data.read(path)
    assert caught.value.fix
    with pytest.raises(UsageError):
        data.read(tmp_path / "none.jsonl")


def test_rewards_that_need_a_repository_are_refused(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    with pytest.raises(UsageError, match="does not compare two diffs"):
        data.rank(data.read(write(tmp_path, rows)), ["tests"])


def test_cheap_edits_of_real_references() -> None:
    """All are diffs, the same each time; those that change nothing earn nothing unless the reference does so too."""
    values: dict[str, list[float]] = {}
    for row in islice(records("swebench/swebench_lite.jsonl.gz"), 60):
        reference = row["patch"].encode()
        made = spoiled(reference)
        assert made == spoiled(reference)
        for name, patch in made.items():
            parse(patch)
            values.setdefault(name, []).append(PatchEdits().compare(reference, patch, "python"))
    means = {name: sum(each) / len(each) for name, each in values.items()}
    assert all(means[name] < 0.02 for name in ZERO), means
    assert max(means["junk in the right file"], means["junk in the right hunk"], means["junk on the right line"]) < 0.1
    assert means["right edit, wrong place"] < 0.05
    assert 0.3 < means["reference and noise"] < 0.8
