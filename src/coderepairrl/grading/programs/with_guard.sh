#!/bin/sh
# Runs the command "$1" ... with standard input as what Node loads first.
folder=$(mktemp -d) && cat >"$folder/guard.cjs" || exit 1
export CRRL_NODE_OPTIONS="$NODE_OPTIONS" NODE_OPTIONS="--require $folder/guard.cjs $NODE_OPTIONS"
exec "$@"
