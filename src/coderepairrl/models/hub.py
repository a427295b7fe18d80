"""Models of the Hugging Face hub by their names there: ``org/name``, or ``org/name@revision``.

Tested against a small hub on loopback, not against huggingface.co.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.processes.extras import require_train

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
_REFUSED = re.compile(r"--|\.\.|(?:^|/)[.-]|[.-](?:/|@|$)")  # as huggingface_hub's validate_repo_id
_COMMIT = re.compile(r"[0-9a-f]{40}")
READ = (".safetensors", ".json", ".txt", ".jinja", ".model")
"""Endings of the files of a model that a run reads."""


def is_name(path: str) -> bool:
    """Whether `path` names a model of the hub: there is no such folder."""
    return (
        bool(_NAME.fullmatch(path))
        and not _REFUSED.search(path)
        and not Path(path).exists()
        and Path(path).parent.name != "runs"
    )


def find_cached(name: str) -> Path | None:
    """The folder of the model `name` in the local cache, or None."""
    if find_spec("huggingface_hub") is None:  # nothing was ever fetched
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    repository, revision = _split(name)
    cached_file = try_to_load_from_cache(repository, "config.json", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    return Path(cached_file).parent if isinstance(cached_file, str) else None


def fetch(name: str) -> str:
    """Download what a run reads of the model `name`; returns ``org/name@commit``. A cached commit needs no network.

    Raises `UsageError` if the hub cannot be reached, refuses, or lacks it, or the disk is too small.
    """
    repository, revision = _split(name)
    if revision and _COMMIT.fullmatch(revision) and (cached := find_cached(name)) and _is_complete(cached):
        return name
    require_train()
    from huggingface_hub import HfApi, constants, snapshot_download

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    info: Any = _asked(name, lambda: hub.model_info(repository, revision=revision, files_metadata=True))
    files = {
        each.rfilename: each.size or 0
        for each in info.siblings
        if each.rfilename.endswith(READ) and "/" not in each.rfilename
    }
    if not any(file.endswith(".safetensors") for file in files):
        raise UsageError(f"{name} has no weights (*.safetensors) on the hub", fix="name another model, or revision")
    cached = find_cached(f"{repository}@{info.sha}")
    need = sum(size for file, size in files.items() if not (cached and (cached / file).is_file()))
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if need > (free := shutil.disk_usage(cache).free):
        raise UsageError(
            f"{name} needs {need / 1e9:.1f} GB, and {cache} has room for {free / 1e9:.1f} GB",
            fix="make room, or set HF_HOME to a folder on a larger disk",
        )
    folder = _asked(
        name,
        lambda: snapshot_download(
            repository, revision=revision, allow_patterns=[*files], cache_dir=cache, endpoint=hub.endpoint
        ),
    )
    return f"{repository}@{Path(folder).name}"


def download_command(name: str) -> str:
    """The command that downloads the model `name`."""
    repository, revision = _split(name)
    return f"hf download {repository}" + (f" --revision {revision}" if revision else "")


def _is_complete(folder: Path) -> bool:
    """Whether `folder` has the tokenizer and all weights: a download may have been killed."""
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return all((folder / file).is_file() for file in (*shards, "tokenizer.json"))


def _split(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.partition("@")
    return repository, revision or None


def _asked(name: str, ask: Callable[[], Any]) -> Any:
    """The hub's answer. Raises `UsageError` with advice if it fails."""
    import httpx2  # huggingface_hub's own
    from huggingface_hub import errors

    repository, _ = _split(name)
    try:
        return ask()
    except errors.GatedRepoError:
        problem, fix = (
            "its terms are to be accepted",
            f"accept them at {repository}'s page on the hub, then: hf auth login",
        )
    except errors.RevisionNotFoundError:
        problem, fix = "the hub has no such revision of it", f"hf models info {repository} shows its commit"
    except errors.RepositoryNotFoundError:
        problem, fix = (
            "the hub has no such model, or keeps it private",
            "check its name; for a private one: hf auth login",
        )
    except (OSError, httpx2.HTTPError) as error:  # no network, HF_HUB_OFFLINE, a server's own trouble, a full disk
        problem = f"it cannot be fetched from the hub: {type(error).__name__}: {error}".splitlines()[0]
        cached = find_cached(name)
        fix = (
            f"name the commit that is here: {repository}@{cached.name}"
            if cached and _is_complete(cached)
            else f"where it can be reached: {download_command(name)} --local-dir {repository}; then copy that"
            f" folder, and set model.path={repository}"
        )
    raise UsageError(f"{name}: {problem}", fix=fix)
