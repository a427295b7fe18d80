#!/bin/sh
# Runs the command "$1" ... with standard input as the first module that Node loads. Exit code 86: a process of its test
# runner ended abnormally.
folder=$(mktemp -d) && cat >"$folder/guard.cjs" || exit 1
export CRRL_NODE_OPTIONS="$NODE_OPTIONS" NODE_OPTIONS="--require $folder/guard.cjs $NODE_OPTIONS"
"$@"
code=$?
set -- "$folder"/*.begun
[ ! -e "$1" ] || code=86
rm -rf "$folder"
exit $code
