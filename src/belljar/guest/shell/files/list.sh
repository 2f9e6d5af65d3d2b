#!/bin/sh
# Lists what is in a folder ($0): for each entry its owner, type, mode, size and path. $1: how many lines at most.
# GNU's `find` tells all by itself; BusyBox's needs `stat`, which an older gVisor answers with an error.
# Set before this text: `depth`, `most` (lines, if $1 is not given) and `limit` (bytes).
: "${depth:?}" "${most:?}" "${limit:?}"
cd "$0" || exit 1
if find . -maxdepth 0 -printf "" 2>/dev/null; then
    find . -xdev -mindepth 1 -maxdepth "$depth" -printf '%U %y %m %s %p\n'
else
    find . -xdev -mindepth 1 -maxdepth "$depth" -exec stat -c '%u %f %s %n' {} +
fi 2>/dev/null | head -n "${1:-$most}" | head -c "$limit"
