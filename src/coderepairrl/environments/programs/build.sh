#!/bin/sh
# Builds a virtual environment at /tmp/env for the project in the working folder. Runs in a sandbox, by sh.
#
# Arguments, each but the first two may be empty: the program uv; the interpreter; the date (YYYY-MM-DD) before which
# packages were uploaded; the extras of the project, in brackets; its requirement files, joined by colons, of which the
# first that exists is installed; the commands that install the project; a frozen list of requirements; and last, any
# number of requirements to install after the list and before the project.
# Standard input: shell commands that edit the project before it is built.
#
# Raise `_BUILDS` in processes/caches.py with each change that alters what is built: all environments are then built
# again. A change that only lets more projects be built needs no new number.
set -eu
uv=$1 python=$2 before=$3 extras=$4 files=$5 commands=$6 frozen=$7
shift 7
export UV_CACHE_DIR=/tmp/uv-cache UV_NO_PROGRESS=1 UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never
export UV_HTTP_CONNECT_TIMEOUT=60 UV_HTTP_TIMEOUT=120 # other builds may keep the machine busy
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
# Prints the lines of the file $2 that the text in $1 mentions.
mentioned() {
    awk 'NR == FNR { text = text " " tolower($0); next }
        { name = tolower($0); gsub("_", "-", name); if (index(text, name)) print }' "$1" "$2"
}
# Installs the requirements in the file $1, without their dependencies. If that fails, those that the error mentions (or
# else half of all) and the rest are tried apart, down to one: it is replaced by the next release of its series, or left
# out. A fault of the network ends the build.
freeze() {
    if install --no-deps --requirement "$1" 2>"$1.refusal"; then
        cat "$1" >>/tmp/kept
    elif ! grep -q 'No solution found\|Failed to build\|Failed to download and build' "$1.refusal" ||
        grep -q 'Failed to fetch\|Request failed after\|timed out\|Hash mismatch\|error reading a body' "$1.refusal"; then
        cat "$1.refusal" >&2
        exit 1
    elif [ "$(wc -l <"$1")" -eq 1 ]; then
        (unset UV_EXCLUDE_NEWER && install --no-deps --resolution lowest "$(sed 's/==/~=/' "$1")" 2>/dev/null) ||
            cat "$1" >>/tmp/left-out
    else
        mentioned "$1.refusal" "$1" >"$1.1"
        if [ ! -s "$1.1" ] || cmp -s "$1" "$1.1"; then head -n "$(($(wc -l <"$1") / 2))" "$1" >"$1.1"; fi
        grep -vxF -f "$1.1" "$1" >"$1.2" || : # nothing is left of a list that repeats itself
        freeze "$1.1"
        freeze "$1.2"
    fi
}
if [ -n "$frozen" ]; then
    printf '%s\n' "$frozen" >/tmp/frozen
    freeze /tmp/frozen
fi
if [ $# -gt 0 ]; then install "$@"; fi
if [ -z "$commands" ]; then
    if [ -f setup.py ] || [ -f pyproject.toml ]; then install ".$extras"; fi
    if [ -f /tmp/kept ]; then install --no-deps --requirement /tmp/kept; fi
    exit
fi
# In those commands, pip is uv's, for this environment; options that make an installation editable are removed.
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
