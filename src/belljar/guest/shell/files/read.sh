#!/bin/sh
# Says how large a file ($1) of a folder ($0) is, then its content; or, below zero, the error that opening it gives.
# No link is followed on the way.
no() {
    echo "-$1"
    exit 0
}
cd "$0" || no 2
at=.
rest=$1
while :; do
    [ -x "$at" ] || no 13
    at=$at/${rest%%/*}
    case $rest in
    */*) rest=${rest#*/} ;;
    *) break ;;
    esac
    [ -L "$at" ] && no 20
    [ -e "$at" ] || no 2
    [ -d "$at" ] || no 20
done
[ -L "$at" ] && no 40
[ -e "$at" ] || no 2
[ -d "$at" ] && no 21
[ -f "$at" ] || no 22
[ -r "$at" ] || no 13
size=$(stat -c %s -- "$at" 2>/dev/null) || size=$(wc -c <"$at")
echo "$size"
exec cat -- "$at"
