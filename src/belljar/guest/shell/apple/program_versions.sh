#!/bin/sh
# Prints a line for each program that is there: its name, and the first line that it says of its version.
for one; do
    command -v "$one" >/dev/null || continue
    flag=--version
    [ "$one" != go ] || flag=version
    echo "$one $("$one" "$flag" 2>&1 | head -n 1)"
done
