#!/bin/sh
# Starts a program in a process group of its own, so that an interrupt reaches it and what it started, and no more.
# Its stdin becomes descriptor 3, from which it hears the host; the guest's own stdin is empty.
exec 3<&0 </dev/null
# shellcheck disable=SC2034  # the fields before and after it
read -r pid name state parent group rest </proc/self/stat
if [ "$pid" != "$group" ] && command -v setsid >/dev/null; then
  exec setsid "$@"
fi
exec "$@"
