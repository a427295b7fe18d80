"""Naive diff for controls: reads files as text, names by line, and trusts the repository's git."""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name != ".git"]
        for name in "\n".join(files).split("\n"):
            if name:
                open(os.path.join(folder, name), encoding="utf-8").read()
                name.encode()
    subprocess.run(["git", "add", "-A"], check=True)
    diff = subprocess.run(["git", "diff", "--cached", "HEAD"], check=True, capture_output=True).stdout
    sys.stdout.buffer.write(diff)
