"""The base install, without torch: what works, and which commands name the extra that they need."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coderepairrl.processes.installs import EXTRAS
from e2e.conftest import make_completion
from gateway.test_remote import listening

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Base:
    """A Python with the base install alone."""

    python: str
    environment: Mapping[str, str]

    async def crrl(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run a command that must end with `code`; return its stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            *(self.python, "-m", "coderepairrl.cli", *arguments),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **self.environment}},
        )
        out, err = (each.decode() for each in await process.communicate())
        assert process.returncode == code, (arguments, out, err)
        return out, err


@pytest.fixture(scope="module", params=["hidden", pytest.param("installed", marks=pytest.mark.real)])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """This Python, with the packages of the extra train hidden, or one in which pip installed only the base."""
    if request.param == "hidden":
        return Base(sys.executable, {"PYTHONPATH": str(HERE)})
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = ("-m", "pip", "--quiet", "install", "-c", str(ROOT / "constraints.txt"), "-e", str(ROOT))
    subprocess.run([folder / "bin/python", *install], check=True)
    return Base(str(folder / "bin/python"), {})


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """Serve a model that calls a tool once, if it has tools, and then ends; yield its URL."""

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        more: dict[str, Any] = {}
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            function = {"name": "shell", "arguments": json.dumps({"cmd": "echo '# mended' >> README.md"})}
            more["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        return web.json_response(make_completion("yes", "m", **more))

    async with listening(reply) as url:
        yield url


async def test_remote_policies_are_evaluated_and_collected_from(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """`eval`, `collect`, and what reads their folders: `report`, `view`, `compare`, `grade`."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"q/{number}", "prompt": "is it?", "language": "c", "answer": "yes"} for number in range(8)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with endpoint() as url:
        policy = ("--policy", url, "--model-name", "m", "rollout.turn_tokens=64")
        asked = ("path=questions.jsonl", "agent=direct", 'agent.options={system=""}')
        evaluated = (("handmade", "eval.split=train", "--limit", "2", "-o", name) for name in ("a", "b"))
        await asyncio.gather(
            *(base.crrl("eval", *arguments, *policy) for arguments in evaluated),
            base.crrl("collect", "jsonl", *asked, *policy, "-o", "c"),
        )
    await base.crrl("collect", "--select", "c", "-o", "kept")
    assert Path("kept/examples.parquet").is_file()
    [predictions] = Path("a").rglob("predictions.jsonl")
    assert "+# mended" in predictions.read_text()
    (graded, _), (numbers, _), *_ = await asyncio.gather(
        base.crrl("grade", str(predictions), "handmade", "-o", "graded.jsonl", "--json"),
        base.crrl("report", "a", "--json"),
        base.crrl("compare", "a", "b"),
        base.crrl("report", "a", "c", "-o", "pages"),
        base.crrl("report", "a", "b", "-o", "report.html"),
    )
    assert [each["resolved"] for each in json.loads(graded)["models"]] == [0] and json.loads(numbers)
    assert Path("report.html").is_file() and Path("pages/index.html").is_file()


async def test_tasks_are_listed_verified_and_scored(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.diff").write_text("diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x = 1\n+x = 2\n")
    scored, _ = await base.crrl("score", "--oracle", "a.diff", "--patch", "a.diff")
    assert scored == "1.000000\n"
    await asyncio.gather(
        base.crrl("tasks", "list", "handmade"),
        base.crrl("tasks", "export", "handmade", "tasks.jsonl"),
        base.crrl("tasks", "verify", "handmade"),
        base.crrl("agents", "list"),
        base.crrl("config", "hello"),
        base.crrl("check"),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "hello"),
        ("sft", "sft-tiny"),
        ("eval", "hello", "--policy", "builtin:tiny"),
        ("check", "engine", "tiny"),
        ("check", "crash"),
        ("serve", "builtin:tiny"),
    ],
    ids=" ".join,
)
async def test_commands_with_a_local_model_name_the_extra_they_need(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = await base.crrl(*arguments, code=3)
    assert f"needs the packages {', '.join(EXTRAS['train'])}\n" in err
    assert ("setup.sh train\n" in err) or ("pip install 'coderepairrl[train]'\n" in err)
    assert "Traceback" not in err and not any(tmp_path.iterdir())
