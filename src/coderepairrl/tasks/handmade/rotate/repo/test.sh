#!/bin/sh
# The tests of rotate.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for day in 1 2 3 4 5; do
    echo "day $day" > "$folder/web.log"
    sh "$here/rotate.sh" "$folder"
done
[ ! -s "$folder/web.log" ]
[ "$(cat "$folder/web.log.1")" = "day 5" ]
[ "$(cat "$folder/web.log.3")" = "day 3" ]
[ ! -e "$folder/web.log.4" ]
