"""What a run keeps of its tasks, and a run of an older version that kept none."""

from __future__ import annotations

import json

from coderepairrl.runs import RunFolder, open_run

from .conftest import Project

SINCE_2 = {"kind", "language", "repository", "difficulty"}


def aged(run: RunFolder) -> None:
    """Rewrite `run` as a version with schema 1 would have written it."""
    about = run.path / "run.json"
    about.write_text(json.dumps({**run.about(), "schema": 1}))
    (run.path / "tasks.jsonl").unlink()
    lines = []
    for record in run.records():
        for fields in (record, record.get("verdict", {})):
            for name in SINCE_2 & fields.keys():
                del fields[name]
        lines.append(json.dumps(record, separators=(",", ":")) + "\n")
    run.log.write_text("".join(lines))


def test_a_run_keeps_its_tasks_and_one_of_schema_1_goes_on(project: Project) -> None:
    project.train("run.steps=1", "eval.after=true")
    run = project.run
    known = run.tasks()
    episodes = list(run.episodes())
    assert {episode.task_id for episode in episodes} <= known.keys()
    assert len({episode.language for episode in episodes}) > 1
    assert all(episode.language == known[episode.task_id].language for episode in episodes)
    aged(run)
    assert open_run(run.path).tasks() == {}
    summary = project.train("run.steps=2", "eval.after=false", "--resume")
    assert summary["account"]["balanced"] and summary["steps"] == 2
    assert run.about()["schema"] == 2 and run.tasks() == known
    first, second = ({e.language for e in run.episodes(f"train-{step:05d}")} for step in (1, 2))
    assert first == {""} and "" not in second
    project.crrl("report", str(run.path), "--json")
