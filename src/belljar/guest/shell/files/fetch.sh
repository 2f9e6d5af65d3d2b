#!/bin/sh
# Packs the files of a folder ($0) that are named on stdin, one on each line.
cd "$0" && exec tar -cf - -T - 2>/dev/null
