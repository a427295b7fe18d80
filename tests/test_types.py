"""The package imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys


def test_import_is_light() -> None:
    heavy = {"torch", "transformers", "vllm", "matplotlib", "renderers", "openai"}
    code = f"import sys, coderepairrl, coderepairrl.protocols; print(sorted(set({heavy!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
