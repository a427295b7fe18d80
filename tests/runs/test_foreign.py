"""Files of other programs are read whole, or rejected by a ValueError."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from coderepairrl.runs import codec


@pytest.mark.parametrize("data", [b"\xef\xbb\xbftext", b"text", gzip.compress(b"text", mtime=0)])
def test_text_is_read_however_it_is_written(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    assert codec.read_foreign_text(tmp_path / "file") == "text"


def test_every_prefix_and_every_flipped_byte_of_a_compressed_file_is_a_value_error_or_the_text(tmp_path: Path) -> None:
    whole = gzip.compress("".join(map(str, range(300))).encode(), mtime=0)
    path = tmp_path / "file.gz"
    damaged = [whole[:size] for size in range(2, len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(2, len(whole))]
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            assert codec.read_foreign_text(path) == "".join(map(str, range(300)))
        except ValueError:
            refused += 1
    assert refused > len(damaged) * 0.9
