#!/bin/sh
# Stands in for cargo: what `cargo test` prints is kept in a report as well. All else is cargo's own.
here=$(dirname "$0")
PATH=$(printf %s "$PATH" | sed "s|^$here:||;s|:$here:|:|g")
export PATH
first=$1
case $first in +*) first=$2 ;; esac
case $first in
    test | t) ;;
    *) exec cargo "$@" ;;
esac
if [ -z "$BELLJAR_CARGO_OUT" ]; then
    exec cargo "$@"
fi
out=$BELLJAR_CARGO_OUT
unset BELLJAR_CARGO_OUT # what a test starts does not report
fifo=$out/.printed-$$
mkfifo "$fifo" || exit 125
tee "$out/test-$$.cargo.txt" <"$fifo" &
reader=$!
cargo "$@" >"$fifo"
code=$?
wait "$reader"
rm -f "$fifo"
exit "$code"
