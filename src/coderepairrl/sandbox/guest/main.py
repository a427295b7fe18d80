"""Command line: our end of the socket, and optionally a system call filter by path or descriptor."""

from __future__ import annotations

import sys

from coderepairrl.sandbox.guest.confined import Confined
from coderepairrl.sandbox.guest.forked import ForkServer
from coderepairrl.sandbox.guest.frames import Control, connected
from coderepairrl.sandbox.guest.kernel import refuse_calls
from coderepairrl.sandbox.guest.service import Guest

if __name__ == "__main__":
    if len(sys.argv) == 2:
        Guest(Control(connected(sys.argv[1]))).serve()
    if sys.argv[2].isdigit():
        ForkServer(connected(sys.argv[1]), int(sys.argv[2])).serve()
    end_of_ours = Control(connected(sys.argv[1]))
    if not sys.argv[1].isdigit():  # in a container
        with open(sys.argv[2], "rb") as rules:
            refuse_calls(rules.read())
        Guest(end_of_ours).serve()
    confined = Confined(end_of_ours, sys.argv[2])
    try:
        confined.serve()
    finally:
        confined.end()
