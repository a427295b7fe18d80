"""A folder that reaches every node, or is an error on each of them: nobody waits for one that could not take it."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from coderepairrl.learn.broadcast import broadcast_folder


def take(rank: int, path: Path, temporary: Path, heard: Any) -> None:
    """What process `rank`, the leader of a node of its own, finds in its folder, or why it has none."""
    tempfile.tempdir = str(temporary if rank else path)
    distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None, None]
        distributed.all_gather_object(found, value)
        return found

    try:
        with broadcast_folder(path / str(rank), group, gather, rank=rank, leader=rank) as there:
            heard.put((rank, {file.name: file.read_bytes() for file in there.iterdir()}))
    except OSError as error:
        heard.put((rank, str(error)))
    distributed.destroy_process_group()


def taken(tmp_path: Path, temporary: Path) -> dict[int, Any]:
    context = multiprocessing.get_context("fork")
    heard = context.Queue()
    processes = [context.Process(target=take, args=(rank, tmp_path, temporary, heard)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(heard.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "0").mkdir()
    written = {"weights": bytes(range(256)) * 100, "empty": b"", "config": b"{}"}
    for name, content in written.items():
        (tmp_path / "0" / name).write_bytes(content)
    return written


def test_another_node_has_a_copy_until_all_have_read_it(tmp_path: Path, files: dict[str, bytes]) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert taken(tmp_path, temporary) == {0: files, 1: files}
    assert not list(temporary.iterdir())


def test_a_node_without_room_is_an_error_on_each(tmp_path: Path, files: dict[str, bytes]) -> None:
    found = taken(tmp_path, tmp_path / "gone")
    for rank in range(2):
        assert f"{tmp_path / str(rank)} did not reach every node: cannot make {tmp_path}/gone/crrl-" in found[rank]
