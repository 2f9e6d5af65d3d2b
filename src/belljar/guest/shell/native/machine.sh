#!/bin/sh
# The first process of a living sandbox: limits the number of its files, says that it is ready, and takes over what
# others leave behind. Arguments: the folder that holds the machine, and how many files it may have; none: the host says it.
[ -z "$2" ] || mount --options-mode ignore -t tmpfs -o "remount,rw,nosuid,nodev,nr_inodes=$2" tmpfs "$1" || exit 1
echo ready
exec </dev/null >/dev/null 2>&1
# What a guest can end is started again; nothing of ours is on its command line.
# In the foreground: for one in the background a shell opens /dev/null, and where it cannot it starts anew for ever.
exec /bin/sh -c 'while :; do sleep infinity; done' init
