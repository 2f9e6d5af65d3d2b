#!/bin/sh
# Stands in for go: `go test` has its events (-json) kept in a report as well. All else is go's own.
here=$(dirname "$0")
PATH=$(printf %s "$PATH" | sed "s|^$here:||;s|:$here:|:|g")
export PATH
if [ "$1" != test ] || [ -z "$BELLJAR_GO_OUT" ]; then
    exec go "$@"
fi
shift
out=$BELLJAR_GO_OUT
unset BELLJAR_GO_OUT # what a test starts does not report
for word; do
    case $word in -json | --json | -json=true | -c | -h | -help) exec go test "$@" ;; esac
done
if [ -n "$BELLJAR_GO_COVERAGE" ]; then
    set -- -coverprofile="$out/cover-$$.out" "$@"
fi
fifo=$out/.events-$$
mkfifo "$fifo" || exit 125
tee "$out/test-$$.go.json" <"$fifo" | sed -n 's/^{.*"Output":"\(.*\)"}$/\1/p' | sed 's/\\n$//;s/\\t/\t/g;s/\\u003c/</g;s/\\u003e/>/g;s/\\u0026/\&/g;s/\\"/"/g;s/\\\\/\\/g' &
reader=$!
go test -json "$@" >"$fifo"
code=$?
wait "$reader"
rm -f "$fifo"
exit "$code"
