#!/bin/sh
# Puts files ("$@", with their contents in the archive on stdin) into a folder ($0): whole or not at all, but for those
# that have several names (hard links), which are written in place.
# They are unpacked beside, then moved over what was there, with the permissions that this had. No link is followed.
# It ends with the number of the error, where it knows it.
cd "$0" || exit 1
umask 022
draft=$(mktemp -d ./.belljar-XXXXXX) || exit 1
trap 'rm -rf "$draft"' EXIT
tar -xf - -C "$draft" || exit 1
for path; do
    at=.
    rest=$path
    while :; do
        [ -x "$at" ] || exit 13
        case $rest in
        */*)
            at=$at/${rest%%/*}
            rest=${rest#*/}
            ;;
        *) break ;;
        esac
        [ -L "$at" ] && exit 20
        [ -d "$at" ] && continue
        [ -e "$at" ] && exit 20
        mkdir -- "$at" || exit 1
    done
    file=./$path
    [ -L "$file" ] && exit 40
    [ -d "$file" ] && exit 21
    if [ -e "$file" ]; then
        [ -f "$file" ] || exit 6
        [ -w "$file" ] || exit 13
        links=$(find "$file" -prune -printf %n 2>/dev/null) || links=$(stat -c %h -- "$file") || exit 1
        mode=$(find "$file" -prune -printf %m 2>/dev/null) || mode=$(stat -c %a -- "$file") || exit 1
        [ -x "$draft/$path" ] && run=+x || run=
        chmod "$mode" "$draft/$path" || exit 1
        [ -z "$run" ] || chmod "$run" "$draft/$path" || exit 1
        if [ "$links" -gt 1 ]; then # in place, so that all its names stay names of one file
            cat "$draft/$path" >"$file" || exit 1
            [ -z "$run" ] || chmod "$run" "$file" || exit 1
            continue
        fi
    fi
    mv -f -- "$draft/$path" "$file" || exit 1
done
