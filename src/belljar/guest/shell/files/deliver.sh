#!/bin/sh
# Takes away what the keeper put into a folder ($0) for the last command, then unpacks there what is for the next.
# Then says how much is in the folders in memory (the arguments): blocks, free ones, and their size.
# `keeper` is set before this text: the uid that owns such files, and that runs this.
: "${keeper:?}"
cd "$0" || exit 1
umask 022
find . -xdev -uid "$keeper" -type f -delete 2>/dev/null
find . -xdev -mindepth 1 -depth -uid "$keeper" -type d -exec rmdir {} + 2>/dev/null
tar -xpf - || exit
stat -f -c '%b %f %S' -- "$@" 2>/dev/null
exit 0
