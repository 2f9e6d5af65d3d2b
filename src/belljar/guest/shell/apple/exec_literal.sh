#!/bin/sh
# Becomes the program that $0 names: to `env`, a name with "=" in it would be a variable.
exec "$0" "$@"
