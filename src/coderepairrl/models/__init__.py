"""Model folders in Hugging Face layout: shipped ones, the user's, and those of the Hugging Face hub.

The hub's are named ``org/name`` or ``org/name@revision``. Tested with a small local hub, not with huggingface.co.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.processes.installs import require_train
from coderepairrl.registry import suggest_nearest, suggest_run

BUILTIN = "builtin:"
_RUN = "run.json"
_ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?")  # org/name or org/name@revision
_NOT_HUB_NAME = re.compile(r"--|\.\.|(?:^|/)[.-]|[.-](?:/|@|$)")  # what huggingface_hub's validate_repo_id refuses
_COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja", ".model")
"""Suffixes of the files of a model that a run reads."""
QUANTISED = "quantised.json"
"""File that records the form to which the weights beside it were rounded."""


def list_model_files(folder: Path) -> list[Path]:
    """Files of a model that a run reads: weights, configuration, tokenizer and template."""
    return [file for file in sorted(folder.iterdir()) if file.suffix in MODEL_SUFFIXES and file.is_file()]


def read_quantised_form(folder: Path) -> str:
    """Form (``nf4``) to which the weights were rounded before they were written, or ""."""
    record = folder / QUANTISED
    return str(json.loads(record.read_text("utf-8"))["form"]) if record.is_file() else ""


def read_quant_method(folder: Path) -> str | None:
    """Method (``awq``, ``fp8``, ...) of quantised weights, or None. Raises OSError and ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    return str(quantization.get("quant_method")) if quantization else None


def require_plain_weights(folder: Path) -> None:
    """Raise `UsageError` for quantised weights. Raises as `read_quant_method`."""
    if method := read_quant_method(folder):
        raise UsageError(
            f"the weights in {folder} are quantised (quant_method={method}), and the learner reads only plain weights",
            fix="name the model's unquantised version; model.quantise=nf4 holds it in 4 bits",
        )


class ModelNotFetched(UsageError):
    """The named model of the hub is not on this machine. Runs download it when they start."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not on this machine: there is no such folder, and the model was not fetched from the hub",
            fix=f"name a folder, or start the run, which fetches the model. By hand: {format_download(name)}",
        )
        self.name = name


class ResolvedModel(NamedTuple):
    """Model that a name resolves to: a folder in Hugging Face layout, and adapters, if any."""

    folder: Path
    adapter: Path | None = None
    run: Path | None = None
    """Run that the checkpoint belongs to."""


def resolve_model(path: str) -> ResolvedModel:
    """Resolve `path`: a folder in Hugging Face layout or of peft adapters, ``builtin:NAME``, a fetched model of the hub
    (``org/name@revision``), a checkpoint, or a run (its newest checkpoint). Raises `UsageError`."""
    location = Path(path).expanduser()
    if (location / _RUN).is_file():
        saved = sorted(
            (each for each in location.glob("checkpoints/[0-9]*") if each.name.isdigit()),
            key=lambda each: int(each.name),
        )
        if not saved:
            if "policy" in json.loads((location / _RUN).read_text("utf-8")):
                raise UsageError(f"{location} is an evaluation: it has trained no model", fix="name the run that has")
            raise UsageError(
                f"{location} has no checkpoint yet", fix="let it reach its first: run.checkpoint_every sets the step"
            )
        location = saved[-1]
    run = location.parent.parent if (location.parent.parent / _RUN).is_file() else None
    if not (location / _ADAPTER).is_file():
        return ResolvedModel(find_model_folder(str(location) if run else path), run=run)
    try:
        if run is None:
            base = json.loads((location / _ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
        elif (run / "model").is_dir():  # a randomly initialised or merged model
            base = run / "model"
        else:
            base = tomllib.loads((run / "config.toml").read_text("utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{location} has adapters, and does not name their base model: {error!r}") from None
    base_model = resolve_model(str(base))
    if base_model.adapter is not None:
        raise UsageError(
            f"{location} has adapters for a model that has adapters itself, {base_model.adapter}",
            fix=f"merge these first: crrl export {base_model.adapter} TARGET",
        )
    return ResolvedModel(base_model.folder, location, run)


MULTIMODAL_TYPES = ("qwen3_5", "qwen3_5_moe")
"""``model_type`` of multimodal models whose language model is a separate architecture."""


def has_separate_language_model(folder: Path) -> bool:
    """Whether the model is multimodal, with a language model that can be read alone. Raises OSError, ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return config.get("model_type") in MULTIMODAL_TYPES and "text_config" in config


def find_model_folder(path: str, *, weights: bool = False) -> Path:
    """Folder of the model that `path` names (`resolve_model`), without adapters.

    Raises `UsageError` if it or its `weights` are missing, `ModelNotFetched` for a model of the hub.
    """
    if path.startswith(BUILTIN):
        shipped = Path(str(resources.files(__name__)))
        name = path.removeprefix(BUILTIN)
        names = (each.parent.name for each in shipped.glob("*/config.json"))
        location, fix = shipped / name, suggest_nearest(name, names)
    elif is_hub_name(path):
        cached = find_cached_model(path)
        if cached is None:
            raise ModelNotFetched(path)
        location, fix = cached, f"fetch it again: {format_download(path)}"
    else:
        location = Path(path).expanduser()
        if (location / _RUN).is_file() or (location / _ADAPTER).is_file():
            location = resolve_model(path).folder
        fix = _suggest_model(path)
    shown = path if path == str(location) else f"{path} ({location})"
    if not (location / "config.json").is_file():
        problem = "it has no config.json" if location.is_dir() else "there is no such folder"
        raise UsageError(f"{shown} is not a model: {problem}", fix=fix)
    if weights and not any(location.glob("*.safetensors")):
        raise UsageError(f"{shown} has no weights (*.safetensors)", fix="download them, or set model.init=random")
    return location


def _suggest_model(path: str) -> str:
    location = Path(path).expanduser()
    if advice := suggest_run(location):
        return advice if location.exists() else f"there is no such run: {advice}"
    if not location.exists() and location.parent.name == "runs":
        return f"there is no run in {location.parent}: crrl hello makes one; builtin:tiny needs none"
    return (
        "name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a run, a checkpoint, a "
        "folder of adapters, builtin:tiny, or org/name@revision of the hub "
        "(crrl fix and crrl serve also take the URL of an API: https://.../v1)"
    )


def is_hub_name(path: str) -> bool:
    """Whether `path` names a model of the hub, and no folder."""
    return (
        bool(_HUB_NAME.fullmatch(path))
        and not _NOT_HUB_NAME.search(path)
        and not Path(path).exists()
        and Path(path).parent.name != "runs"
    )


def find_cached_model(name: str) -> Path | None:
    """Folder of the model `name` in the hub's local cache, or None."""
    if find_spec("huggingface_hub") is None:  # nothing was ever fetched
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    repository, revision = _split_revision(name)
    cached_file = try_to_load_from_cache(repository, "config.json", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    return Path(cached_file).parent if isinstance(cached_file, str) else None


def fetch_model(name: str) -> str:
    """Download the files of the model `name` that runs read; return ``org/name@commit``.

    A commit in the cache needs no network. Raises `UsageError` if the hub cannot be reached, refuses, or lacks the
    model, or the disk is too small.
    """
    repository, revision = _split_revision(name)
    if revision and _COMMIT.fullmatch(revision) and (cached := find_cached_model(name)) and _is_complete(cached):
        return name
    require_train()
    from huggingface_hub import HfApi, constants, snapshot_download

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    info: Any = _ask_hub(name, lambda: hub.model_info(repository, revision=revision, files_metadata=True))
    sizes = {
        each.rfilename: each.size or 0
        for each in info.siblings
        if each.rfilename.endswith(MODEL_SUFFIXES) and "/" not in each.rfilename
    }
    if not any(file.endswith(".safetensors") for file in sizes):
        raise UsageError(f"{name} has no weights (*.safetensors) on the hub", fix="name another model, or revision")
    cached = find_cached_model(f"{repository}@{info.sha}")
    missing = sum(size for file, size in sizes.items() if not (cached and (cached / file).is_file()))
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(cache).free):
        raise UsageError(
            f"{name} needs {missing / 1e9:.1f} GB, and {cache} has {free / 1e9:.1f} GB free",
            fix="delete something, or set HF_HOME to a folder on a larger disk",
        )
    fetched = _ask_hub(
        name,
        lambda: snapshot_download(
            repository, revision=revision, allow_patterns=[*sizes], cache_dir=cache, endpoint=hub.endpoint
        ),
    )
    return f"{repository}@{Path(fetched).name}"


def format_download(name: str) -> str:
    """The command that downloads the model `name`."""
    repository, revision = _split_revision(name)
    return f"hf download {repository}" + (f" --revision {revision}" if revision else "")


def _is_complete(folder: Path) -> bool:
    """Whether `folder` has the tokenizer and all weights; a killed download may lack some."""
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return all((folder / file).is_file() for file in (*shards, "tokenizer.json"))


def _split_revision(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.partition("@")
    return repository, revision or None


def go_offline_without_hub() -> str:
    """Switch huggingface_hub offline for this process if the hub does not answer; return why, or ""."""
    from huggingface_hub import constants

    return _probe_hub(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT)


@functools.cache
def _probe_hub(endpoint: str) -> str:
    # asked once: huggingface_hub would wait through its retries for every model and data set
    import httpx2  # a dependency of huggingface_hub
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (OSError, httpx2.HTTPError) as error:
        constants.HF_HUB_OFFLINE = True
        return f"{endpoint} cannot be reached: {type(error).__name__}: {error}"
    return ""


def _ask_hub(name: str, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`, a call of the hub. Raises `UsageError` with advice if it fails."""
    import httpx2  # a dependency of huggingface_hub
    from huggingface_hub import errors

    repository, _ = _split_revision(name)
    unreachable = go_offline_without_hub()
    try:
        return ask()
    except errors.GatedRepoError:
        problem = "its terms must be accepted first"
        fix = f"accept them on {repository}'s page on the hub, then: hf auth login"
    except errors.RevisionNotFoundError:
        problem, fix = "the hub has no such revision", f"hf models info {repository} shows its commit"
    except errors.RepositoryNotFoundError:
        problem = "the hub has no such model, or keeps it private"
        fix = "check its name; for a private one: hf auth login"
    except (OSError, httpx2.HTTPError) as error:  # no network, HF_HUB_OFFLINE, a server error, a full disk
        reason = unreachable or f"{type(error).__name__}: {error}"
        problem = f"it cannot be fetched from the hub: {reason}".splitlines()[0]
        if (cached := find_cached_model(name)) and _is_complete(cached):
            fix = f"name the commit that is here: {repository}@{cached.name}"
        else:
            command = f"{format_download(name)} --local-dir {repository}"
            fix = f"on a machine that can reach it: {command}; then copy that folder, and set model.path={repository}"
    raise UsageError(f"{name}: {problem}", fix=fix)
