#!/bin/sh
# Keeps a mount namespace alive: mounts the folders, says that it is ready, then waits until its stdin is closed.
# Arguments: the bytes and the number of files that each folder may hold, then the folders.
size=$1
inodes=$2
shift 2
for folder; do
    mount -t tmpfs -o "rw,nosuid,nodev,mode=0755,size=$size,nr_inodes=$inodes" tmpfs "$folder" || exit 1
done
echo ready
read -r _
