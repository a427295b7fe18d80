#!/bin/sh
# Move each log of a folder to NAME.1, the one before to NAME.2, and so on. Keeps the newest KEEP (default 3).
# usage: rotate.sh FOLDER [KEEP]
set -eu

folder=${1:?usage: rotate.sh FOLDER [KEEP]}
keep=${2:-3}

cd "$folder"
for log in $(ls *.log); do
    rm -f $log.$keep
    n=$keep
    while [ $n -gt 1 ]; do
        older=$n
        n=$((n - 1))
        if [ -e $log.$n ]; then
            mv $log.$n $log.$older
        fi
    done
    mv $log $log.1
    : > $log
done
