#!/bin/sh
# Builds a virtual environment at /tmp/env for the project in the working folder. Runs in a sandbox, by sh.
#
# Arguments: the program uv, the interpreter, the date (YYYY-MM-DD) as of which packages are taken or nothing, the
# extras of the project in brackets or nothing, its requirement files between colons, of which the first that there is
# counts, then the requirements that are installed after that and before the project.
# Standard input: shell commands that edit the project before it is built.
set -eu
uv=$1 python=$2 before=$3 extras=$4 files=$5
shift 5
export UV_CACHE_DIR=/tmp/uv-cache UV_NO_PROGRESS=1 UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never
if [ -n "$before" ]; then export UV_EXCLUDE_NEWER="$before"; fi
"$uv" venv --quiet --relocatable --python "$python" /tmp/env
git ls-files -z >/tmp/project-files
cat >/tmp/edits
sh -eu /tmp/edits
install() { "$uv" pip install --quiet --python /tmp/env/bin/python "$@"; }
install setuptools wheel
IFS=:
for file in $files; do
    if [ -f "$file" ]; then
        install --requirement "$file"
        break
    fi
done
unset IFS
if [ $# -gt 0 ]; then install "$@"; fi
if [ -f setup.py ] || [ -f pyproject.toml ]; then install ".$extras"; fi
