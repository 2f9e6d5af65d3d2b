#!/bin/sh
# shellcheck disable=SC3045  # a shell has -u or -p, and all that we meet have the others
# Becomes the guest's parent. It sets what must hold for the guest before any word of the guest's is looked at (its
# environment, too, comes after), prints the mark, and ends whatever the guest started when the guest has ended.
# The shell's own stderr is shut: what it says of a killed child is not the guest's word.
# $0: the mark. Arguments: the limit of processes, whether setpriv is needed ("yes" or empty), the program that loads a
# seccomp filter, the filter, the folder to run in, whether there is input, then the variables and the command.
pids=$1 sure=$2 loader=$3 filter=$4 cwd=$5 input=$6
shift 6
exec 3>&2 2>/dev/null
no() {
    echo "$1" >&3
    exit 125
}
ulimit -u "$pids" || ulimit -p "$pids" || no "no limit on processes can be set"
ulimit -n 1024
ulimit -c 0
mkdir -p -- "$cwd"
cd -- "$cwd" || no "there is no folder $cwd"
[ -n "$input" ] || exec </dev/null
set -- /usr/bin/env "$@"
python=
for one in /usr/bin/python3 /usr/local/bin/python3; do
    [ -x "$one" ] && python=$one
done
if [ -n "$python" ] && [ -n "$filter" ]; then
    set -- "$python" -I -S -c "$loader" "$filter" "$@"
fi
for one in /usr/bin/setpriv /bin/setpriv; do
    if [ -x "$one" ]; then
        set -- "$one" --no-new-privs "$@"
        sure=
        break
    fi
done
[ -z "$sure" ] || no "the image has no setpriv"
trap : TERM # who stops the run sends it to all: the guest may end itself then, and we tell its exit code
printf "%s\n" "$0" >&3
"$@" 2>&3 3>&-
code=$?
kill -9 -1
exit "$code"
