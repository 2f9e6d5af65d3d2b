#!/bin/sh
# Real container engines for the tests, in a folder of their own: Docker (runc, and gVisor as runtime `runsc`) and Podman.
#
#   test_engines.sh serve FOLDER    starts them and says so in FOLDER/ready; stops them when its stdin is closed
#   test_engines.sh serve FOLDER SIZE      Docker alone, with its data on a disk of its own of that size (1500M)
#   test_engines.sh serve FOLDER networks  Docker alone, with networks and a firewall, in a network namespace of its own
#   test_engines.sh start FOLDER    the same in the background
#   test_engines.sh stop FOLDER     stops them, and removes all they left: processes, mounts, control groups, files
#   test_engines.sh again FOLDER [podman]  starts Docker, or Podman, once more, after a test has killed it
#   test_engines.sh status FOLDER
#   test_engines.sh install         what they need, where that is possible: as root, on Debian or Ubuntu
#   test_engines.sh prepare         the same, and the guests' image: all that takes long and is done once per machine
#   test_engines.sh keep FOLDER     imports that image there, and keeps what the engines stored for those started later
#   test_engines.sh toolchains      makes an archive with compilers, for images of languages, and says where it is
#
# FOLDER/ready has a line for each engine: its name and its socket, or "missing", its name and why.
# BELLJAR_INSTALL=no stops the installation. Nothing here touches an engine that the machine runs already: sockets,
# images, containers and control groups are our own, and the host gets no network.
# shellcheck disable=SC2086  # lists of words; a folder for the tests has no space in its name
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
IMAGE=belljar-test/base:latest
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/belljar-tests
PACKAGES="docker.io:dockerd docker-cli:docker runsc:runsc runc:runc podman:podman catatonit:catatonit uidmap:newuidmap slirp4netns:slirp4netns
fuse-overlayfs:fuse-overlayfs mmdebstrap:mmdebstrap docker-registry:docker-registry iptables:iptables iproute2:ip e2fsprogs:mkfs.ext4"
INSIDE=bash,ca-certificates,git,nodejs,python3,python3-numpy,python3-pip,python3-pytest
COMPILERS=bash,ca-certificates,golang-go,rustc,gcc,libc6-dev
archive() { echo "$CACHE/$1-$(echo "$2" | cksum | cut -d' ' -f1).tar"; } # another list, another file
BASE=$(archive base "$INSIDE")
versions() { stat -Lc %s-%Y "$BASE" "$(command -v dockerd)" "$(command -v podman)" 2>/dev/null; }
KEPT=${BASE%.tar}-stored-$(versions | cksum | cut -d" " -f1)
# Go's collector is patient: the many programs that live for a moment (runc, the engines' own hooks) never need it, which
# saves a fifth of the CPU time of a container.
export GOGC=400

say() { echo "test engines: $*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }

install_packages() {
    lacking=""
    for pair in $PACKAGES; do
        has "${pair#*:}" || lacking="$lacking $pair"
    done
    [ -n "$lacking" ] || return 0
    if [ "${BELLJAR_INSTALL:-yes}" = no ]; then
        say "BELLJAR_INSTALL=no, so these stay missing:$lacking"
        return 0
    fi
    if [ "$(id -u)" != 0 ] || ! has apt-get; then
        say "only root on Debian or Ubuntu can have these installed here:$lacking"
        return 0
    fi
    say "missing, and will be installed now (BELLJAR_INSTALL=no stops that):$lacking"
    # A package must not start daemons of the machine's own: ours are started below, and only for the tests.
    policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && own_policy=yes; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null 2>&1
    for pair in $lacking; do # an earlier one may have brought the program of a later one
        has "${pair#*:}" || apt-get install -q -y --no-install-recommends "${pair%:*}" >/dev/null 2>&1
        has "${pair#*:}" || say "${pair%:*} cannot be had"
    done
    [ "${own_policy:-no}" = no ] || rm -f "$policy"
}

# One at a time: several processes of the tests may come here together.
alone() {
    mkdir -p "$CACHE" || return 1
    (flock 9 && "$@") 9>"$CACHE/lock"
}

# An image of the guests', from Debian's packages, made once: no registry of images is asked for anything.
make_archive() {
    name=$1 include=$2 target=$(archive "$1" "$2")
    [ -s "$target" ] && return 0
    has mmdebstrap || { say "mmdebstrap is missing, so there is no image"; return 1; }
    say "making the image $name from Debian's packages, once (about a minute)"
    draft=$(mktemp "$CACHE/$name.XXXXXX") || return 1
    # shellcheck disable=SC1091  # the machine's own
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
    if mmdebstrap --quiet --format=tar --variant=essential --include="$include" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$codename" - >"$draft" 2>"$draft.log"; then
        mv "$draft" "$target"
        rm -f "$draft.log"
    else
        say "the image $name could not be made: $(tail -n 1 "$draft.log")"
        rm -f "$draft" "$draft.log"
        return 1
    fi
}

# Puts what engines stored when they imported the image into KEPT: half a second instead of ten for each new engine.
keep_stored() {
    { start_docker && start_podman; } >/dev/null
    end_engines
    draft=$(mktemp -d "$CACHE/stored.XXXXXX") || return 1
    rm -rf "$folder/podman/root/libpod" # has paths in it
    for name in docker/data podman/root; do
        [ ! -d "$folder/$name" ] || mv "$folder/$name" "$draft/${name%/*}"
    done
    rm -rf "$CACHE"/base-*-stored-* && mv "$draft" "$KEPT"
}

keep() {
    [ -d "$KEPT" ] || sh "$0" keep "$(mktemp -d "${TMPDIR:-/tmp}/bj-keep.XXXXXX")" 9>&-
}

# Gives a new engine's folder what was kept: links to the files of layers, which no engine writes to, and copies of all else.
hand_out() {
    engine=$1 layers=$2 target=$3
    [ -d "$KEPT/$engine" ] && [ ! -e "$target/$layers" ] && mkdir -p "$target" || return 0
    for name in "$KEPT/$engine"/*; do
        [ "${name##*/}" = "$layers" ] || cp -a "$name" "$target/"
    done
    cp -al "$KEPT/$engine/$layers" "$target/" 2>/dev/null || cp -a "$KEPT/$engine/$layers" "$target/"
}

# Waits up to 30 s for an engine that is still alive to answer.
answers() {
    engine=$1
    shift
    tries=0
    while ! "$@" >/dev/null 2>&1; do
        kill -0 "$engine" 2>/dev/null || return 1
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || return 1
        sleep 0.1
    done
}

# A disk that a test can fill to its last block: a file, mounted by a loop device that goes with the mount.
mount_disk() {
    mkdir -p "$folder/docker/data" && truncate -s "$size" "$folder/disk" && mkfs.ext4 -q -m 0 "$folder/disk" &&
        mount -o loop "$folder/disk" "$folder/docker/data"
}

apart() { exec unshare --net sh -c 'ip link set lo up && exec "$@"' sh "$@"; }

start_docker() {
    if ! { has dockerd && has docker; }; then
        echo "missing docker apt install docker.io" >>"$folder/found"
        return
    fi
    mkdir -p "$folder/docker"
    [ -z "$size" ] || [ "$size" = networks ] || mount_disk 2>>"$folder/docker.log" || {
        echo "missing docker no disk of $size could be mounted: $(tail -n 1 "$folder/docker.log")" >>"$folder/found"
        return
    }
    hand_out docker overlay2 "$folder/docker/data"
    runtimes='{}'
    # ptrace works everywhere: inside virtual machines there is often no KVM. Without network=none this runsc takes every
    # network namespace of a recent kernel for the host's, and refuses.
    has runsc && runtimes='{"runsc": {"path": "'$(command -v runsc)'", "runtimeArgs": ["--platform=ptrace", "--network=none", "--oci-seccomp"]}}'
    echo '{"runtimes": '"$runtimes"'}' >"$folder/docker/daemon.json"
    # Guests have no network, so the host gets no bridge and no firewall rule.
    place="" networks="--bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false"
    [ "$size" != networks ] || place=apart networks=""
    $place dockerd --config-file "$folder/docker/daemon.json" --data-root "$folder/docker/data" \
        --exec-root "$folder/docker/exec" --pidfile "$folder/docker/pid" -H "unix://$folder/docker.sock" \
        $networks \
        --cgroup-parent "$groups" </dev/null >"$folder/docker.log" 2>&1 &
    echo "$!" >>"$folder/pids"
    if answers "$!" docker -H "unix://$folder/docker.sock" version; then
        if docker -H "unix://$folder/docker.sock" image inspect "$IMAGE" >/dev/null 2>&1 ||
            docker -H "unix://$folder/docker.sock" import --change 'CMD ["bash"]' "$BASE" "$IMAGE" >/dev/null; then
            echo "docker $folder/docker.sock" >>"$folder/found"
        fi
        has runsc || echo "missing runsc apt install runsc" >>"$folder/found"
    else
        echo "missing docker $(tail -n 1 "$folder/docker.log" | cut -c1-300)" >>"$folder/found"
    fi
}

start_podman() {
    has podman || { echo "missing podman apt install podman" >>"$folder/found"; return; }
    mkdir -p "$folder/podman"
    hand_out podman overlay "$folder/podman/root"
    # Two monitors of each command live on for this long after it, else five minutes: thousands of them slow everything.
    printf '[engine]\nexit_command_delay = 30\n' >"$folder/podman/containers.conf"
    # From its own folder: its monitor leaves a file "oom" wherever it was started.
    (cd "$folder/podman" && export CONTAINERS_CONF="$folder/podman/containers.conf" &&
        exec podman $podman system service --time=0 "unix://$folder/podman.sock") \
        </dev/null >"$folder/podman.log" 2>&1 &
    echo "$!" >"$folder/podman/pid"
    echo "$!" >>"$folder/pids"
    if answers "$!" test -S "$folder/podman.sock" && { podman $podman image exists "docker.io/$IMAGE" ||
        podman $podman import --change 'CMD ["bash"]' "$BASE" "docker.io/$IMAGE" >/dev/null 2>>"$folder/podman.log"; }
    then
        echo "podman $folder/podman.sock" >>"$folder/found"
    else
        echo "missing podman $(tail -n 1 "$folder/podman.log" | cut -c1-300)" >>"$folder/found"
    fi
}

start_all() {
    mkdir -p "$folder" || exit 1
    : >"$folder/pids"
    if [ "$(id -u)" != 0 ]; then
        echo "missing docker only root can start one for the tests" >"$folder/found"
        echo "missing podman only root can start one for the tests" >>"$folder/found"
    elif ! alone make_archive base "$INSIDE"; then
        echo "missing docker there is no image" >"$folder/found"
        echo "missing podman there is no image" >>"$folder/found"
    else
        start_docker &
        docker_start=$!
        [ -n "$size" ] || start_podman
        wait "$docker_start"
    fi
    mv "$folder/found" "$folder/ready"
}

# Whatever was started from the folder names it on its command line; what runs in its containers is in its groups.
ours() {
    # The pattern on stdin: on grep's own command line it would find itself.
    # shellcheck disable=SC2062  # files, not a pattern
    echo "$folder/" | grep -laF -f - /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3
    find /sys/fs/cgroup -name cgroup.procs -path "*/$groups/*" -exec cat {} + 2>/dev/null
}

gone() {
    tries=0
    while [ -n "$(ours)" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt "$1" ] || return 1
        sleep 0.1
    done
}

empty() {
    sockets=$(cut -d' ' -f2 "$folder/ready" 2>/dev/null)
    case $sockets in *docker.sock*) docker -H "unix://$folder/docker.sock" ps -aq | xargs -r docker -H "unix://$folder/docker.sock" rm -f ;; esac
    case $sockets in *podman.sock*) podman $podman rm --all --force --time 0 ;; esac
} >/dev/null 2>&1

end_engines() {
    [ ! -f "$folder/pids" ] || while read -r pid; do kill "$pid" 2>/dev/null; done <"$folder/pids"
    for pid in $(ours); do # Podman's monitors of commands that have ended listen to nobody
        ! grep -qaF -e --exit-delay "/proc/$pid/cmdline" 2>/dev/null || kill -KILL "$pid" 2>/dev/null
    done
    if ! gone 150; then # an engine that does not listen, or one that died and left its containers
        for pid in $(ours); do kill -KILL "$pid" 2>/dev/null; done
        gone 50 || say "these did not die: $(ours | tr '\n' ' ')"
    fi
    awk -v under="$folder/" 'index($2, under) == 1 { print $2 }' /proc/self/mounts | sort -r |
        while read -r mount; do umount -l "$mount"; done
}

end_all() {
    [ -d "$folder" ] || return 0
    empty & # an engine that hangs must not keep us
    emptying=$!
    tries=0
    while kill -0 "$emptying" 2>/dev/null && [ "$tries" -lt 100 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    end_engines
    find /sys/fs/cgroup -depth -type d -path "*/$groups*" -exec rmdir {} + 2>/dev/null
    # Podman's own is shared by all that run here: it goes with the last.
    pidof podman conmon >/dev/null ||
        find /sys/fs/cgroup -depth -type d -path '*/libpod_parent*' -exec rmdir {} + 2>/dev/null
    rm -rf "$folder"
}

command=${1:-}
folder=${2:-}
size=""
groups=belljar-engines-$(basename "${folder:-none}")
podman="--root $folder/podman/root --runroot $folder/podman/run --tmpdir $folder/podman/tmp --cgroup-manager cgroupfs
--events-backend file --runtime $(command -v runc || command -v crun)"
case $command in
    install) alone install_packages; exit 0 ;;
    prepare)
        alone install_packages
        [ "$(id -u)" != 0 ] || { alone make_archive base "$INSIDE" && alone keep; }
        exit 0
        ;;
    toolchains) alone make_archive toolchains "$COMPILERS" && archive toolchains "$COMPILERS"; exit ;;
    keep | serve | start | again | stop | status) [ -n "$folder" ] || { say "which folder?"; exit 2; } ;;
    *) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
case $command in
    serve)
        size=${3:-}
        trap 'end_all; exit 0' INT TERM HUP
        start_all
        cat >/dev/null # until whoever started us is gone
        end_all
        ;;
    keep)
        keep_stored
        end_all
        ;;
    start)
        start_all
        cat "$folder/ready"
        ;;
    again)
        # The killed ones left their pids, which may be zombies for a while, and sockets that nobody listens on.
        : >"$folder/found"
        if [ "${3:-docker}" = podman ]; then
            rm -f "$folder/podman.sock"
            start_podman
        else
            rm -f "$folder/docker/pid" "$folder/docker.sock" "$folder"/docker/exec/containerd/containerd.pid
            start_docker
        fi
        grep -v '^missing' "$folder/found" || { cat "$folder/found"; exit 1; }
        rm -f "$folder/found"
        ;;
    stop) end_all ;;
    status)
        [ -f "$folder/ready" ] || { echo "nothing runs in $folder"; exit 1; }
        cat "$folder/ready"
        ;;
esac
