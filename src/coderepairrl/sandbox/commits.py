"""Local cache of commits of remote repositories."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from coderepairrl.errors import CodeRepairError, PrerequisiteError, SandboxFault, TaskError
from coderepairrl.printable import remove_login
from coderepairrl.processes import hostgit
from coderepairrl.processes.caches import git_cache
from coderepairrl.processes.hostgit import create_bare_repository, explain_git_error, git

_COMMIT = re.compile(r"[0-9a-fA-F]{40}([0-9a-fA-F]{24})?")
_CACHE_FIX = "free some disk space there, or set CRRL_CACHE to a folder that can be written"
_NOT_THERE = ("not our ref", "couldn't find remote ref", "does not exist", "not found", "unadvertised object")
"""Messages of git and servers for a commit that is missing or not served."""
_UNREADABLE = re.compile(r"unable to read [0-9a-f]{40,}|missing blob object '[0-9a-f]+'")
"""Message of a repository that lacks a blob of a commit."""
_RETRY_FIX = "run the command again where that host can be reached; fetched commits are kept"
_LOGIN = re.compile(r"(?P<scheme>https?://)(?P<login>[^/?#@]+)@", re.IGNORECASE)


def fetch_commits(url: str, commits: Sequence[str]) -> Path:
    """Fetch the `commits` of `url` that are not cached, all or none. Returns the cache's git directory.

    Raises `TaskError` for a missing commit, `SandboxFault` if fetching failed for possibly transient reasons, and
    `PrerequisiteError` if the cache is full or not writable.
    """
    shown_url = remove_login(url)
    for commit in commits:
        if not _COMMIT.fullmatch(commit):
            raise TaskError(f"{commit!r} of {shown_url} is not a commit", fix="write all digits of its id: git:URL@SHA")
    cache = find_commit_cache(url)
    try:
        if len(select_cached_commits(url, commits)) < len(commits):
            _fetch_locked(url, commits, cache)
        return cache
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _make_no_room_error(shown_url) from error
        raise PrerequisiteError(f"cannot write to {cache.parent}: {error.strerror}", fix=_CACHE_FIX) from error


def _fetch_locked(url: str, commits: Sequence[str], cache: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_suffix(".lock").open("w") as lock:  # other runs fetch too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cache.exists():
            partial = cache.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            create_bare_repository(partial).rename(cache)
        cached = select_cached_commits(url, commits)
        if not (missing := [commit for commit in commits if commit not in cached]):
            return
        # git writes there only under this lock, so these files were left by a killed git
        for stale in (*cache.glob("*.lock"), *cache.glob("objects/pack/tmp_*"), *cache.glob("objects/??/tmp_*")):
            stale.unlink()
        try:
            _fetch(url, missing, cache, lock.fileno())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            # `error` shows the login
            raise _explain_failed_fetch(remove_login(url), ", ".join(missing), error) from None


def select_cached_commits(url: str, commits: Sequence[str]) -> list[str]:
    """Select the `commits` of `url` that are cached. Needs no lock, as commits are never removed."""
    cache = find_commit_cache(url)
    if not cache.exists():
        return []
    query = "".join(f"{commit}^{{tree}}\n" for commit in commits)
    answers = git("cat-file", "--batch-check=%(objecttype)", folder=cache, stdin=query.encode()).splitlines()
    return [commit for commit, answer in zip(commits, answers, strict=True) if answer == b"tree"]


def find_commit_cache(url: str) -> Path:
    """Cache folder for commits of `url`."""
    return git_cache() / hashlib.sha256(url.encode()).hexdigest()[:20]


def _make_no_room_error(shown_url: str) -> PrerequisiteError:
    return PrerequisiteError(f"no room to fetch a commit of {shown_url} to {git_cache()}", fix=_CACHE_FIX)


def _explain_failed_fetch(
    shown_url: str, commits: str, error: subprocess.CalledProcessError | subprocess.TimeoutExpired
) -> CodeRepairError:
    if isinstance(error, subprocess.TimeoutExpired):
        return SandboxFault(f"fetching {commits} of {shown_url} took more than {error.timeout:.0f} s", fix=_RETRY_FIX)
    printed, cause = error.stderr.decode(errors="replace"), remove_login(explain_git_error(error))
    if "No space left" in printed or "Disk quota" in printed:
        return _make_no_room_error(shown_url)
    if any(sign in printed for sign in _NOT_THERE):
        return TaskError(
            f"{shown_url} has no commit {commits}: {cause}",
            fix="a force push may have removed it: name a clone that has it (clone=FOLDER/{repository}), or leave the "
            "task out",
        )
    if lost := _UNREADABLE.search(printed):
        return TaskError(
            f"{shown_url} lacks the content of a file of {commits}: {lost[0]}",
            fix="name a clone that was made without a filter and has all files: clone=FOLDER/{repository}",
        )
    fix = "compare this machine's clock with another one (date)" if "certificate" in printed else _RETRY_FIX
    return SandboxFault(f"cannot fetch {commits} of {shown_url}: {cause}", fix=fix)


def _fetch(url: str, commits: Sequence[str], cache: Path, lock: int) -> None:
    # the caller holds `lock`

    def fetch(place: str, env: dict[str, str]) -> None:
        # keep the pack, which appears all at once: as loose objects, a commit could appear before its files
        command = ("-c", "fetch.unpackLimit=1", "fetch", "--quiet", "--depth=1", "--no-tags", "--", place, *commits)
        git(*command, folder=cache, env=env, timeout=1800, lock=lock)

    if (local := hostgit.find_local_repository(url)) is not None:
        with hostgit.open_view(local) as view:
            return fetch(str(view.folder), {})
    # the user's environment has proxies, certificates and ssh keys; no code of a task runs here
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "LC_"))}
    login = _LOGIN.match(url)
    if login is None:
        return fetch(url, env)
    # other users can read command lines (ps), but not the environment
    place = f"{login['scheme']}{url[login.end() :]}"
    user, _, password = login["login"].partition(":")
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    header = {"GIT_CONFIG_KEY_0": f"http.{place}.extraHeader", "GIT_CONFIG_VALUE_0": f"Authorization: Basic {basic}"}
    return fetch(place, env | header | {"GIT_CONFIG_COUNT": "1"})
