"""Examples are written and read with every token and message, and damage is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.errors import UsageError
from coderepairrl.runs import examples
from coderepairrl.runs.examples import Example, read_examples, write_examples

CALL = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls \\ud83d"}'}}
EXACT = Example(
    "e/0",
    "e",
    "toy/1",
    repository="o/r",
    language="python",
    source="run",
    agent="nano",
    policy="tiny",
    reward=0.1 + 0.2,
    passed=True,
    messages=(
        {"role": "user", "content": "héllo \x00 \u2028"},
        {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [CALL]},
        {"role": "tool", "content": "half \ud83d", "tool_call_id": "c"},
    ),
    tools=({"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}},),
    ids=(1, 151_643, 3),
    trained=(False, True, True),
    tokenizer="abc",
)
RENDERED = Example("f", "f", "toy/2", messages=({"role": "user", "content": "x"},))


def test_examples_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coderepairrl.runs.storage._ROWS_PER_WRITE", 2)
    written = [EXACT, RENDERED, replace(RENDERED, id="g", reward=-1.0, passed=False)]
    assert write_examples(tmp_path / "x.parquet", iter(written)) == 3
    assert read_examples(tmp_path / "x.parquet") == written
    assert [each.exact for each in written] == [True, False, False]
    write_examples(tmp_path / "empty.parquet", [])
    assert read_examples(tmp_path / "empty.parquet") == []


def test_datasets_reads_the_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_examples(tmp_path / "x.parquet", [EXACT, RENDERED])
    table = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    assert table["ids"][0] == [1, 151_643, 3] and table["reward"][1] is None


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    write_examples(tmp_path / "x.parquet", [EXACT])

    def breaks() -> object:
        yield RENDERED
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_examples(tmp_path / "x.parquet", breaks())  # type: ignore[arg-type]
    assert read_examples(tmp_path / "x.parquet") == [EXACT]
    assert [each.name for each in tmp_path.iterdir()] == ["x.parquet"]
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    for name in ("x.parquet", "missing.parquet"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_examples(tmp_path / name)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"messages": "[1"}, "row 2: messages is not a JSON array"),
        ({"tools": "[1]"}, "row 2: tools holds something that is not an object"),
        ({"messages": "[{}]"}, "row 2: a message has no role"),
        ({"ids": [1]}, "row 2: 1 ids but 0 values of trained"),
        ({"task_id": None}, "row 2: task_id is empty"),
        ({"reward": "high"}, "high"),
        ({"reward": float("nan")}, "row 2: reward nan is not a number"),
        ({"trained": ...}, "no column 'trained'"),
    ],
)
def test_damage_is_named(spoil: dict[str, object], says: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{**examples._example_row(RENDERED)}, {**examples._example_row(RENDERED), **spoil}]
    for name in [name for name, value in spoil.items() if value is ...]:
        rows = [{key: value for key, value in row.items() if key != name} for row in rows]
    if isinstance(spoil.get("reward"), str):
        rows[0]["reward"] = "low"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=says):
        read_examples(tmp_path / "x.parquet")
