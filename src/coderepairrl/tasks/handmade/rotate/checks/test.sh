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

mkdir "$folder/new" "$folder/names"
[ -z "$(sh "$here/rotate.sh" "$folder/new" 2>&1)" ]
[ -z "$(ls "$folder/new")" ]

cd "$folder/names"
echo first > "door camera.log"
echo star > "a*.log"
echo dash > "-v.log"
echo last > "z.log"
sh "$here/rotate.sh" . 2
sh "$here/rotate.sh" . 2
[ "$(cat "door camera.log.2")" = first ]
[ "$(cat "a*.log.2")" = star ]
[ "$(cat ./-v.log.2)" = dash ]
[ "$(cat "z.log.2")" = last ]
[ ! -s "z.log.1" ]
