"""deploy/belljar.service under a live systemd, in a container that boots one: installed as the unit's first lines say.

Its walls are the unit's own; the container's are taken down as far as systemd and bubblewrap need it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service_image import Host, host, import_packages, lay_in
from witness import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.exhaustive("the image of the service is built and a systemd booted"),
]
NAME, BASE, IMAGE = "bj-systemd", "belljar-test/systemd-base", "belljar-test/systemd"
# Whatever a boot does to a machine (clock, devices, settings of its kernel) is left out: the kernel is the host's.
DOCKERFILE = f"""
FROM {BASE}
COPY deploy/wheelhouse /wheels
RUN useradd --system --home-dir /var/lib/belljar --shell /usr/sbin/nologin belljar && \
    python3 -m venv /opt/belljar && \
    /opt/belljar/bin/pip install -q --no-index --find-links /wheels 'belljar-sandbox[service]' && rm -rf /wheels
RUN cd /usr/lib/systemd/system && rm -rf /etc/systemd/system/*.wants && \
    for each in *.target.wants/*; do case $each in *journald*|*tmpfiles-setup.service) ;; *) rm -f $each ;; esac; done
COPY deploy/belljar.service deploy/belljar-prune.service deploy/belljar-prune.timer /etc/systemd/system/
"""
# systemd raises these two of the kernel as it starts, which are the host's too: it gets others to write to.
RAISED = ("/proc/sys/fs/file-max", "/proc/sys/fs/nr_open")
BOOT = f"""
mount -o remount,rw /sys/fs/cgroup
for each in {" ".join(RAISED)}; do mount --bind /dev/null $each || exit; done
exec /sbin/init
"""
OPEN = ["seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"]


def words() -> list[str]:
    line = ["--cap-add", "SYS_ADMIN", "--cgroupns", "private", "--network", "none", "-e", "container=docker"]
    return [*line, *(word for each in OPEN for word in ("--security-opt", each)), "--tmpfs", "/run", "--tmpfs", "/tmp"]


@pytest.fixture(scope="module")
def booted() -> Iterator[Host]:
    here = host()
    import_packages(here, BASE, "passwd", "systemd", "systemd-sysv", "python3", "python3-venv", variant="essential")
    (here.context / "deploy" / "Dockerfile.systemd").write_text(DOCKERFILE)
    here.docker("build", "-q", "-f", f"{here.context}/deploy/Dockerfile.systemd", "-t", IMAGE, str(here.context))
    before = [Path(path).read_text() for path in RAISED]
    try:
        here.docker("run", "-d", "--name", NAME, *words(), IMAGE, "sh", "-c", BOOT)
        up = eventually(lambda: systemctl(here, "is-system-running") in ("running", "degraded"), 60)
        assert before == [Path(path).read_text() for path in RAISED]
        if not up:
            pytest.skip(f"NOTHING of the unit was checked: no systemd in a container here: {here.docker('logs', NAME)}")
        here.docker("exec", NAME, "umount", *RAISED)  # a guest's /proc cannot be mounted while they are covered
        systemctl(here, "start", "belljar")
        assert eventually(lambda: "alive" in here.ask_inside(NAME, "/healthz"), 60), journal(here)
        yield here
    finally:
        here.docker("rm", "-f", "-v", NAME, check=False)
        here.docker("rmi", "-f", IMAGE, BASE, check=False)


def systemctl(here: Host, *words: str) -> str:
    return here.docker("exec", NAME, "systemctl", *words, check=False)


def journal(here: Host) -> str:
    return here.docker("exec", NAME, "journalctl", "--no-pager", "-u", "belljar", check=False)


def fact(here: Host, name: str) -> str:
    return systemctl(here, "show", "--value", "-p", name, "belljar")


def run(here: Host, **body: Any) -> dict[str, Any]:
    said = here.ask_inside(NAME, "/api/sandbox/execute", language="python", code="print(6 * 7)", **body)
    return dict(json.loads(said))


def test_started_as_the_unit_says_it_runs_guests_in_a_jail_of_their_own(booted: Host) -> None:
    assert json.loads(booted.ask_inside(NAME, "/readyz"))["ready"] is True, journal(booted)
    result = run(booted, backend="native")
    assert result.get("stdout") == "42\n", (result, journal(booted))
    walls = {"pid namespace", "net namespace", "user namespace", "no capabilities", "seccomp filter", "read-only root"}
    assert walls <= {*result["guarantees"]["walls"]}


def test_the_kernel_holds_the_units_walls(booted: Host) -> None:
    look = ["cat", f"/proc/{fact(booted, 'MainPID')}/status"]
    text = booted.docker("exec", NAME, *look)
    said = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert (said["CapEff"], said["CapBnd"], said["NoNewPrivs"], said["Seccomp"]) == ("0" * 16, "0" * 16, "1", "2")
    assert "0" not in said["Uid"].split()
    modes = booted.docker("exec", NAME, "stat", "-c", "%U %a", "/var/lib/belljar", "/var/cache/belljar", "/run/belljar")
    assert modes.splitlines() == ["belljar 700", "belljar 700", "belljar 711"]


def test_webassembly_is_compiled_code_and_runs_behind_these_walls_too(booted: Host) -> None:
    uid, gid = (int(booted.docker("exec", NAME, "id", flag, "belljar")) for flag in ("-u", "-g"))
    with tempfile.TemporaryDirectory(prefix="bj-cache-") as name:
        cache = Path(name) / "belljar"
        cache.mkdir()
        lay_in(cache, uid, gid)
        booted.docker("cp", "-a", f"{cache}/.", f"{NAME}:/var/cache/belljar")
    setup = ["runuser", "-u", "belljar", "--", "env", "XDG_CACHE_HOME=/var/cache/belljar", "/opt/belljar/bin/belljar"]
    booted.docker("exec", NAME, *setup, "setup", "wasm")
    result = run(booted, backend="wasm")
    assert result.get("stdout") == "42\n", (result, journal(booted))
    assert result["guarantees"]["isolation"] == "namespace"  # the jail around it, too


def test_the_timer_prunes_the_records_of_the_running_server(booted: Host) -> None:
    systemctl(booted, "start", "belljar-prune.timer")
    assert systemctl(booted, "is-active", "belljar-prune.timer").strip() == "active"
    systemctl(booted, "start", "belljar-prune.service")
    said = systemctl(booted, "show", "-p", "Result", "-p", "ExecMainStatus", "belljar-prune.service")
    log = booted.docker("exec", NAME, "journalctl", "--no-pager", "-u", "belljar-prune", check=False)
    assert {"Result=success", "ExecMainStatus=0"} <= set(said.split()), log
    assert "remove" in log, log
    assert json.loads(booted.ask_inside(NAME, "/readyz"))["ready"] is True, journal(booted)


def test_killed_it_is_started_again_and_stopped_it_ends_in_good_order(booted: Host) -> None:
    first = fact(booted, "MainPID")
    systemctl(booted, "kill", "-s", "KILL", "--kill-who=main", "belljar")
    assert eventually(lambda: fact(booted, "MainPID") not in ("0", first), 30)
    assert eventually(lambda: "alive" in booted.ask_inside(NAME, "/healthz"), 60), journal(booted)
    systemctl(booted, "stop", "belljar")
    assert (fact(booted, "Result"), fact(booted, "ExecMainStatus")) == ("success", "0")
    assert fact(booted, "ActiveState") == "inactive"
