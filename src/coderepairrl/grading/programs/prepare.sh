#!/bin/sh
# Input: word, start-up code and plugin, one after another; $1 and $2 are the lengths of the first two in bytes, $0 is
# the plugin's name. Prints the new folder that holds them.
umask 077
folder=$(mktemp -d) && cat >"$folder/all" && cd "$folder" && head -c "$1" all >word &&
    tail -c "+$(($1 + 1))" all | head -c "$2" >sitecustomize.py &&
    tail -c "+$(($1 + $2 + 1))" all >"$0.py" && rm all && pwd
