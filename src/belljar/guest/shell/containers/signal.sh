#!/bin/sh
# Sends a signal ($0) to one process ($1), or with "tree" before it to a command's: all that are of its session or were
# started by one of them, but for the first ($2) itself, until none is left or, if the signal is not KILL, once.
if [ "$1" != tree ]; then
    kill -s "$0" -- "$1" 2>/dev/null || exit 3
    exit 0
fi
first=$2
for _ in 1 2 3 4 5 6 7 8 9 10; do
    family=" $first "
    found=""
    grown=yes
    while [ "$grown" ]; do
        grown=""
        for each in /proc/[0-9]*/stat; do
            { read -r line <"$each"; } 2>/dev/null || continue
            pid=${each#/proc/}
            pid=${pid%/stat}
            # shellcheck disable=SC2086  # words: state, parent, group, session
            set -- ${line##*) }
            case $family in *" $pid "*) continue ;; esac
            case $1 in Z | X) continue ;; esac
            case $family in *" $2 "* | *" $4 "*)
                family="$family$pid "
                found="$found $pid"
                grown=yes
                ;;
            esac
        done
    done
    [ "$found" ] || exit 0
    # shellcheck disable=SC2086  # words
    kill -s "$0" -- $found 2>/dev/null
    [ "$0" = KILL ] || exit 0
done
