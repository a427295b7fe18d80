"""Commands that tests start as users start them."""

from __future__ import annotations

import sys

CRRL = [sys.executable, "-m", "coderepairrl.cli"]
