#!/bin/sh
# Puts files ("$@", with their contents in the archive on stdin) into a folder ($0): whole or not at all.
# They are unpacked beside, then moved over what was there. No link is followed on the way.
# `not_a_folder` is set before this text: the exit code for a path that leads through something else than a folder.
: "${not_a_folder:?}"
cd "$0" || exit 1
umask 022
draft=$(mktemp -d ./.belljar-XXXXXX) || exit 1
trap 'rm -rf "$draft"' EXIT
tar -xf - -C "$draft" || exit 1
for path; do
    at=.
    rest=$path
    while :; do
        case $rest in
        */*)
            at=$at/${rest%%/*}
            rest=${rest#*/}
            ;;
        *) break ;;
        esac
        if [ -L "$at" ]; then exit "$not_a_folder"; fi
        if [ -d "$at" ]; then continue; fi
        if [ -e "$at" ]; then exit "$not_a_folder"; fi
        mkdir -- "$at" || exit 1
    done
    if [ -L "./$path" ]; then
        rm -f -- "./$path"
    elif [ -d "./$path" ]; then
        rmdir -- "./$path" || exit 1
    fi
    mv -f -- "$draft/$path" "./$path" || exit 1
done
