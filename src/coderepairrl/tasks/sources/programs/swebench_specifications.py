"""Print Python environment specifications as JSON, from the path of the harness's file.

``specifications`` by repository and version; paths of ``requirements`` and conda ``environments`` by repository.
"""

import json
import runpy
import sys

found = runpy.run_path(sys.argv[1])
about = {
    "specifications": found.get("MAP_REPO_VERSION_TO_SPECS_PY") or found["MAP_REPO_VERSION_TO_SPECS"],
    "requirements": found["MAP_REPO_TO_REQS_PATHS"],
    "environments": found["MAP_REPO_TO_ENV_YML_PATHS"],
}
json.dump(about, sys.stdout)
