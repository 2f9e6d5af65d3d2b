#!/bin/sh
# Unpacks an archive from stdin into a folder ($0), after it has removed what is not needed there any more ($@).
cd "$0" || exit 1
for each; do
    rm -rf -- "./$each"
done
umask 022 && exec tar -xpf -
