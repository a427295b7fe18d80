"""The files of a folder on nodes that do not have them: broadcast by the first process through the process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from coderepairrl.errors import UsageError
from coderepairrl.processes.scratch import scratch

_PIECE = 1 << 26
"""Bytes that are sent at once."""

Files = Mapping[str, tuple[int, int]]
"""Size and time of change in nanoseconds of files, by name."""


@contextmanager
def broadcast_folder(
    folder: Path,
    leaders: distributed.ProcessGroup,
    gather: Callable[[Any], list[Any]],
    *,
    rank: int,
    leader: int,
) -> Iterator[Path]:
    """`folder` as process 0 has it: itself on a node that has the same files, by names, sizes and times, such as those
    of a common file system; elsewhere a copy in a temporary folder, which is removed at the end of the block.

    All processes take part: `gather` is among all, and `leaders` has the first of each node, which this process's is
    `leader`. Raises OSError in all when one cannot read or write.
    """
    found: list[Files | None] = gather(_files(folder))
    wanted = found[0]
    if wanted is None or all(files == wanted for files in found):  # there is nothing, which each finds for itself
        yield folder
        return
    with ExitStack() as kept:
        copy, problem = None, ""
        if rank == leader:
            if found[rank] != wanted:
                try:
                    copy = kept.enter_context(scratch("broadcast")) / "files"
                    copy.mkdir()
                except (OSError, UsageError) as error:  # told to all below: who raised it here would be waited for
                    problem = str(error)
            failed = _broadcast(folder, copy, wanted, leaders)
            problem = problem or failed
        told = gather((str(copy or ""), problem))
        if reason := next((why for _, why in told if why), ""):
            raise OSError(f"{folder} did not reach every node: {reason}")
        there, _ = told[leader]
        try:
            yield Path(there) if there else folder
        finally:
            gather(None)  # others of this node may still read it


def _files(folder: Path) -> Files | None:
    try:
        files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
        return {name: (about.st_size, about.st_mtime_ns) for name, about in files}
    except OSError:
        return None


def _broadcast(folder: Path, copy: Path | None, files: Files, leaders: distributed.ProcessGroup) -> str:
    """Send the files, or receive them into `copy`, if there is one; returns why it failed, or "".

    Every process sends or receives all pieces, whatever happens: else the others would wait.
    """
    first, problem = distributed.get_rank() == 0, ""
    for name, (size, _) in files.items():
        source = folder / name if first else None
        target = copy / name if copy is not None else None
        for start in range(0, size, _PIECE):
            piece = torch.zeros(min(_PIECE, size - start), dtype=torch.uint8)
            if source is not None and not problem:
                try:
                    with source.open("rb") as file:
                        file.seek(start)
                        if file.readinto(piece.numpy().data) != len(piece):
                            problem = f"{name} became shorter"
                except OSError as error:
                    problem = f"{name}: {error}"
            distributed.broadcast(piece, 0, group=leaders)
            problem = problem or _append(target, piece)
        if not size:
            problem = problem or _append(target, torch.zeros(0, dtype=torch.uint8))
    return problem


def _append(target: Path | None, piece: torch.Tensor) -> str:
    if target is None:
        return ""
    try:
        with target.open("ab") as file:
            file.write(piece.numpy().data)
    except OSError as error:
        return str(error)
    return ""
