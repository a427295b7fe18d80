#!/bin/sh
# Builds a virtual environment at /tmp/env for the project in the working folder. Runs in a sandbox, by sh.
#
# Arguments: the program uv, the interpreter, the date (YYYY-MM-DD) as of which packages are taken or nothing, the
# extras of the project in brackets or nothing, its requirement files between colons, of which the first that there is
# counts, the commands that install the project or nothing, then the requirements that are installed before that.
# Standard input: shell commands that edit the project before it is built.
set -eu
uv=$1 python=$2 before=$3 extras=$4 files=$5 commands=$6
shift 6
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
if [ -z "$commands" ]; then
    if [ -f setup.py ] || [ -f pyproject.toml ]; then install ".$extras"; fi
    exit
fi
# pip of those commands is uv's, with this environment, and without what makes an installation editable
git ls-files -z '*requirements*.txt' | xargs -0 --no-run-if-empty sed -i -E 's/^(-e|--editable)[ =]+//'
mkdir /tmp/commands
cat >/tmp/commands/pip <<END
#!/bin/bash
if [ -n "\${PIP_CONSTRAINT:-}" ]; then export UV_CONSTRAINT="\$PIP_CONSTRAINT" UV_BUILD_CONSTRAINT="\$PIP_CONSTRAINT"; fi
words=()
for word; do case "\$word" in -e | --editable | -y) ;; *) words+=("\$word") ;; esac; done
exec "$uv" pip "\${words[0]}" --quiet --python /tmp/env/bin/python "\${words[@]:1}"
END
cat >/tmp/commands/python <<'END'
#!/bin/bash
case "$*" in
"-m pip "*) shift 2 && exec pip "$@" ;;
"setup.py develop") exec pip install . ;;
esac
exec /tmp/env/bin/python "$@"
END
chmod +x /tmp/commands/*
export PATH="/tmp/commands:/tmp/env/bin:$PATH"
exec bash -e -o pipefail -c "$commands"
