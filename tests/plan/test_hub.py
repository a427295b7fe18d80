"""Models of the hub: a small hub on loopback, and the real client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import UsageError
from coderepairrl.stages.life_cycle import pin_models

COMMIT = "4f" * 20


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, about one repository; the fields of `state` may change."""

    state: SimpleNamespace

    def do_GET(self) -> None:
        state, parts = self.state, self.path.partition("?")[0].strip("/").split("/")
        state.asked.append(self.path)
        if parts == [""]:
            self._answer(200, b"")
        elif parts[:3] == ["api", "models", "org"] and parts[3] != "name":
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif parts[:2] == ["api", "models"] and len(parts) == 6 and parts[5] not in ("main", COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif parts[:2] == ["api", "models"] and state.gated:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif parts[:2] == ["api", "models"] and "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": name} for name, data in state.files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif parts[:2] == ["api", "models"]:
            siblings = [{"rfilename": name, "size": state.size or len(data)} for name, data in state.files.items()]
            self._answer(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            data = state.files[parts[-1]]
            headers = {"X-Repo-Commit": COMMIT, "ETag": hashlib.sha1(data).hexdigest()}
            self._answer(200, data, headers)

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


@pytest.fixture
def hub(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    files = {file.name: file.read_bytes() for file in models.list_model_files(miniature)}
    state = SimpleNamespace(asked=[], gated=False, size=0, files=files | {"README.md": b"...", "onnx.bin": b"..."})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Hub,), {"state": state}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield state
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_a_run_records_the_commit_and_asks_for_it_once(name: str, hub: SimpleNamespace, miniature: Path) -> None:
    with pytest.raises(UsageError, match="not fetched") as refused:
        models.find_model_folder(name)
    assert "hf download org/name" in refused.value.fix
    assert not hub.asked, "a plan asks no server"
    config = pin_models(configs.load_config("hello", [f"model.path={name}"]))
    assert config.model.path == f"org/name@{COMMIT}"
    folder = models.find_model_folder(config.model.path, weights=True)
    assert {file.name for file in folder.iterdir()} == {file.name for file in models.list_model_files(miniature)}
    assert (folder / "model.safetensors").read_bytes() == (miniature / "model.safetensors").read_bytes()
    count = len(hub.asked)
    assert pin_models(config) == config and len(hub.asked) == count
    (folder / "tokenizer.json").unlink()
    assert pin_models(config) == config and (folder / "tokenizer.json").is_file(), "a download that was killed goes on"
    assert not any(map(models.is_hub_name, ("org/a--b", "org/a..b", "org/a.", "-org/a")))


def test_failures_of_the_hub_are_named_with_the_fix(
    hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(name: str) -> UsageError:
        with pytest.raises(UsageError) as refused:
            models.fetch_model(name)
        assert name in str(refused.value)
        return refused.value

    assert "no such model" in str(refusal("org/other"))
    assert "no such revision" in str(refusal("org/name@gone"))
    hub.gated = True
    assert "hf auth login" in refusal("org/name").fix
    hub.gated, hub.size = False, 10**18
    assert "GB" in str(refusal("org/name")) and not [*tmp_path.glob("cache/**/blobs/*")]
    hub.size = 0
    weights = hub.files.pop("model.safetensors")
    assert "no weights" in str(refusal("org/name"))
    hub.files["model.safetensors"] = weights
    models.fetch_model("org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert f"org/name@{COMMIT}" in refusal("org/name").fix
    assert "hf download org/other" in refusal("org/other").fix
    assert "127.0.0.1:9 cannot be reached" in str(refusal("org/other")) and constants.HF_HUB_OFFLINE, "asked once"
    assert models.fetch_model(f"org/name@{COMMIT}") == f"org/name@{COMMIT}"
