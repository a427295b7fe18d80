#!/bin/sh
# Runs the command "$3" ... with the plugin $1 of the folder $0 in the workspace $2.
export CRRL_PYTHONPATH="$PYTHONPATH" CRRL_PYTEST_ADDOPTS="$PYTEST_ADDOPTS" PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" PYTEST_ADDOPTS="-p $1 $PYTEST_ADDOPTS" CRRL_WORKSPACE="$2"
shift 2
exec "$@"
