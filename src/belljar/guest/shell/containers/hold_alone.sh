#!/bin/sh
# Keeps a living sandbox that may go on without its server, for as long as anybody has its pipe ($0) open: the server, and a
# program that sleeps for a while ($1, seconds), which the server renews. No guest can come to the pipe.
mkfifo -m 600 "$0" || exit 1
sleep "$1" >"$0" &
read -r _ <"$0"
