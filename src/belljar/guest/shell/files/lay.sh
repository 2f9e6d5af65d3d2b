#!/bin/sh
# Unpacks an archive from stdin into a folder ($0), with its permissions.
cd "$0" && umask 022 && exec tar -xpf -
