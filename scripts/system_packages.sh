#!/bin/sh
# Installs the system packages the tests run on, where that is possible: as root, on Debian or Ubuntu.
# BELLJAR_INSTALL=no stops it. It never fails: what is missing is named, and its tests are skipped.
set -u

# package:command:what is skipped without it
needed="
bubblewrap:bwrap:every test that runs a real sandbox
util-linux:setpriv:every test that runs a real sandbox
python3:/usr/bin/python3:the tests of Python in the native sandbox
golang-go:go:the tests of Go
rustc:rustc:the tests of Rust
"

# Prints the lines of $needed whose package is missing. A command of another origin counts where it is not
# Debian's dpkg that knows, but only in the system's own directories: a guest sees no home directory.
missing() {
    echo "$needed" | while IFS=: read -r package command skipped; do
        [ -n "$package" ] || continue
        if command -v dpkg-query >/dev/null 2>&1; then
            dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed && continue
        fi
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin command -v "$command" >/dev/null 2>&1 && continue
        echo "$package:$command:$skipped"
    done
}

tell_skipped() {
    echo "$1" | while IFS=: read -r package command skipped; do
        echo "system packages: $package is missing, so these are skipped: $skipped"
    done
}

lacking=$(missing)
[ -n "$lacking" ] || exit 0
packages=$(echo "$lacking" | cut -d: -f1 | tr '\n' ' ')

if [ "${BELLJAR_INSTALL:-yes}" = no ]; then
    echo "system packages: BELLJAR_INSTALL=no, so nothing is installed"
    tell_skipped "$lacking"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "system packages: only root on Debian or Ubuntu can have them installed here; missing: $packages"
    tell_skipped "$lacking"
    exit 0
fi

echo "system packages: missing, and will be installed now (BELLJAR_INSTALL=no stops that): $packages"
DEBIAN_FRONTEND=noninteractive
export DEBIAN_FRONTEND
log=$(mktemp) || exit 0
trap 'rm -f "$log"' EXIT
apt-get update -q >"$log" 2>&1 || tail -n 3 "$log"
# shellcheck disable=SC2086  # a list of names
if ! apt-get install -q -y --no-install-recommends $packages >"$log" 2>&1; then
    tail -n 5 "$log"
    # One that does not exist here must not keep out the others.
    for package in $packages; do
        apt-get install -q -y --no-install-recommends "$package" >"$log" 2>&1 || true
    done
fi
lacking=$(missing)
[ -z "$lacking" ] || tell_skipped "$lacking"
exit 0
