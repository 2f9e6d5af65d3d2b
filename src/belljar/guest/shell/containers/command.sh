#!/bin/sh
# Starts one command in a living box: tells its numbers, runs it, and tells its exit code.
#
# $0: a secret word; $1: where; $2: "terminal", if it has one; $3: a file for the exit code, if nobody may be there to hear
# it; then the command. Each line for us begins with the word, and is
# on stderr or the terminal: "ready" with this process' number, then it waits for a line; "runs" with the command's; "ended"
# with its exit code. A guest has the same uid, so it could find the word and end itself in another way than by ending:
# nothing else is to be gained.
cd -- "$1" 2>/dev/null || {
    printf '%s no\n' "$0" >&2
    exit 125
}
terminal=$2 code_file=$3
shift 3
if [ "$terminal" ]; then exec 3>&1; else exec 3>&2; fi
exec 2>/dev/null # what this shell says of a command that a signal ended
printf '%s ready %s\n' "$0" "$$" >&3
IFS= read -r _ || exit 125
# What a terminal or who stops the command sends to all of them is for the command; its own defaults come back there.
trap : HUP INT QUIT TERM USR1 USR2 ALRM TSTP TTIN TTOU
# Programs of ours by their whole names: the first folders on the guest's PATH are its own.
env=/usr/bin/env
[ -x "$env" ] || env=/bin/env
# shellcheck disable=SC2016  # the inner shell's own
/bin/sh -c 'printf "%s runs %s\n" "$0" "$$" >&3; exec "$@" 2>&3 3>&-' "$0" "$env" -- "$@"
code=$?
[ "$code_file" ] && echo "$code" >"$code_file"
# A guest that made the streams non-blocking and left them full must not cost us the last line.
until printf '%s ended %s\n' "$0" "$code" >&3; do :; done
[ "$terminal" ] || until printf '%s\n' "$0"; do :; done
exit "$code"
