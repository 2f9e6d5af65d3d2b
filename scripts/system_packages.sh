#!/bin/sh
# Installs the system packages the tests run on, where that is possible: as root, on Debian or Ubuntu.
# BELLJAR_INSTALL=no stops it. It never fails: what is missing is named, and its tests are skipped.
set -u

# package:the program or library to look for:what is skipped without it
needed="
bubblewrap:bwrap:the sandbox tests with the system's bubblewrap (the wheel's is used where it works)
util-linux:setpriv:every test that runs a real sandbox
python3:python3:the tests of Python in the native sandbox
python3-pip:/usr/lib/python3/dist-packages/pip:the tests of pip in the native sandbox
git:git:the tests of repositories
libseccomp2:libseccomp.so.2:the comparison of the seccomp profile with its source
golang-go:go:the tests of Go
rustc:rustc:the tests of Rust
redis-server:redis-server:the tests of the service with Redis
postgresql:/usr/lib/postgresql:the tests of the service with PostgreSQL
docker-compose:docker-compose:the tests of deploy/docker-compose.yml by Compose itself
chromium:chromium:the tests of previews in a real browser
kubernetes-client:kubectl:the test that kubectl itself renders deploy/kubernetes
"

# In the system's own directories only: a guest sees no home directory, so what lies there does not count.
is_here() {
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    case $1 in
        lib*) ldconfig -p 2>/dev/null | grep -q "$1" ;;
        *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

# Prints the lines of $needed that are missing.
missing() {
    echo "$needed" | while IFS=: read -r package thing skipped; do
        [ -n "$package" ] || continue
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed && continue
        (is_here "$thing") || echo "$package:$thing:$skipped"
    done
}

tell_skipped() {
    echo "$1" | while IFS=: read -r package thing skipped; do
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
