"""Prints SWE-bench's specifications of environments for Python, as JSON; run with the path of an installed package.

``specifications`` by repository and version, and where a repository keeps its requirements (``requirements``).
"""

import json
import runpy
import sys
from pathlib import Path

found = runpy.run_path(str(Path(sys.argv[1], "harness/constants/python.py")))
about = {
    "specifications": found["MAP_REPO_VERSION_TO_SPECS_PY"],
    "requirements": found["MAP_REPO_TO_REQS_PATHS"],
}
json.dump(about, sys.stdout)
