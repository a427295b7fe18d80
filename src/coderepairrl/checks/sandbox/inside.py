"""Probes of the exam, run in a sandbox: ``python3 -c <this file> NAME ARGUMENT...``.

Functions print what they saw. Needs Python 3.8 only.
"""

from __future__ import annotations

import os
import socket
import sys
import time


def converse(host: str, port: str) -> None:
    """Print two lines of an answer, whether the second came later, and the rest."""
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"hello\n")
    answer = connection.makefile("rb")
    first, at = answer.readline(), time.monotonic()
    second = answer.readline()
    print(first, second, time.monotonic() - at > 0.1, answer.read())


def hog(mebibytes: str) -> None:
    """Hold memory for ten seconds."""
    block = bytearray(int(mebibytes) << 20)
    print("got it", flush=True)
    time.sleep(10)
    print("kept", len(block), flush=True)


def fill(size: str, each: str) -> None:
    """Fill `size` bytes of disk with deleted files of `each` bytes; print the final errno."""
    left = int(size)
    try:
        while left > 0:
            file = os.open("fill", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.unlink("fill")
            room = int(each)
            while room > 0:
                written = os.write(file, bytes(1 << 20))
                room -= written
                left -= written
        print("all of it")
    except OSError as error:
        print(error.errno)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
