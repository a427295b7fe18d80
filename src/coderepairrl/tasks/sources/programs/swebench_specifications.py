"""Print Python environment specifications as JSON, from the path of the harness's file.

``specifications`` by repository and version; paths of ``requirements`` and conda ``environments`` by repository.
"""

import json
import runpy
import sys

constants = runpy.run_path(sys.argv[1])
specifications = {
    "specifications": constants.get("MAP_REPO_VERSION_TO_SPECS_PY") or constants["MAP_REPO_VERSION_TO_SPECS"],
    "requirements": constants["MAP_REPO_TO_REQS_PATHS"],
    "environments": constants["MAP_REPO_TO_ENV_YML_PATHS"],
}
json.dump(specifications, sys.stdout)
