#!/bin/sh
# Takes away what a guest left where the keeper must put something: run by the guest's own uid, it removes links too.
# $0: the folder. Arguments: the paths below it.
cd "$0" || exit 1
for path; do
    if [ -L "./$path" ] || [ ! -d "./$path" ]; then rm -f -- "./$path"; fi
    while :; do
        case $path in
        */*) path=${path%/*} ;;
        *) break ;;
        esac
        if [ -L "./$path" ] || [ ! -d "./$path" ]; then rm -f -- "./$path"; else chmod 1777 "./$path"; fi
    done
done 2>/dev/null
exit 0
