#!/bin/sh
# Prints those arguments, each followed by a zero byte, that are not there and would lie in no package that is.
for path; do
    [ -e "$path" ] || [ -L "$path" ] && continue
    folder=$path inside=
    while case $folder in */*) folder=${folder%/*} ;; *) false ;; esac; do
        [ -f "$folder/__init__.py" ] && inside=1
    done
    [ "$inside" ] || printf '%s\0' "$path"
done
