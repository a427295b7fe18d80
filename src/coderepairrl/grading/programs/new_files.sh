#!/bin/sh
# Prints, NUL-terminated, the arguments that do not exist and would lie in no existing Python package.
for path; do
    [ -e "$path" ] || [ -L "$path" ] && continue
    folder=$path inside=
    while case $folder in */*) folder=${folder%/*} ;; *) false ;; esac; do
        [ -f "$folder/__init__.py" ] && inside=1
    done
    [ "$inside" ] || printf '%s\0' "$path"
done
