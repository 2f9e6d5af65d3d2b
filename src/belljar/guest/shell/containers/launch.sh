#!/bin/sh
# The first program of a guest's container: waits for its command, runs it, and tells its exit code.
#
# It reads two lines from stdin: a secret word, when the files are in place, and the order (see `spec.order`). It says
# the word on stderr and runs the guest. When that has ended, it ends what the guest started, and says the word again
# with the exit code. A guest has the same uid, so it could find the word and end itself in another way than by ending:
# nothing else is to be gained. A guest that made the streams non-blocking and left them full must not cost us the last
# line: it is tried again. Then it waits to be removed; or ends in the same way, in a container that will be kept ($0).
IFS= read -r word || exit 125
IFS= read -r order || exit 125
# shellcheck disable=SC2034  # the order names it, for a newline inside of a word
n='
'
eval "set -- $order" || exit 125
if [ ! -d "$1" ]; then
    mkdir -p -- "$1" || exit 125
fi
cd -- "$1" || exit 125
shift
# Who stops the run sends SIGTERM to all processes: the guest may end itself then, and we tell its exit code.
trap : TERM
exec 3>&2 2>/dev/null
printf '%s\n' "$word" >&3
(exec "$@" 2>&3 3>&-)
code=$?
kill -s KILL -- -1
until printf '%s %s\n' "$word" "$code" >&3; do :; done
until printf '%s\n' "$word"; do :; done
[ "$0" = keep ] && exit "$code"
exec sleep 20 3>&-
