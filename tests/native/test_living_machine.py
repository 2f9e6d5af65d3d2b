"""What a living sandbox of the native backend is like from inside: a machine that programs feel at home on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import belljar
from belljar.engine.engine import Engine
from wheels import wheel

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(engine: Engine) -> AsyncIterator[belljar.AsyncSandbox]:
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True) as box:
        yield box


async def sh(box: belljar.AsyncSandbox, line: str) -> str:
    """What a line of bash prints; it must succeed."""
    result = await box.exec(["bash", "-c", line])
    assert result.ok, f"{line}: {result.stdout}{result.stderr}"
    return result.stdout.strip()


async def test_the_first_process_of_a_machine_sleeps_while_nothing_is_to_be_done(box: belljar.AsyncSandbox) -> None:
    """One that could not sleep began anew for ever, and took a processor."""
    begun = await sh(box, "for i in {1..50}; do pgrep -fx 'sleep infinity' && exit; sleep 0.1; done; exit 1")
    await sh(box, "(sleep 0.1 &) ; (exit 3 &) ; sleep 0.3")  # what is left behind is reaped
    assert await sh(box, "pgrep -fx 'sleep infinity'") == begun
    assert await sh(box, "ps -e -o stat= | grep -c Z || true") == "0"


async def test_everybody_is_somebody_with_a_home_a_name_and_a_language(box: belljar.AsyncSandbox) -> None:
    assert await sh(box, "whoami; id -un; id -u; cd; pwd; echo $HOME $USER $SHELL") == (
        "user\nuser\n1000\n/home/user\n/home/user user /bin/bash"
    )
    assert (await sh(box, "getent passwd user")).split(":")[2:6:3] == ["1000", "/home/user"]
    assert await sh(box, "hostname; cat /etc/hostname") == "belljar\nbelljar"
    assert await sh(box, "python3 -c 'import socket; print(socket.gethostbyname(\"localhost\"))'") == "127.0.0.1"
    assert "ID=" in await sh(box, "cat /etc/os-release")
    result = await box.exec(["bash", "-c", "python3 -c 'import locale; print(locale.setlocale(locale.LC_ALL, \"\"))'"])
    assert (result.stdout, result.stderr) == ("C.UTF-8\n", ""), "a language that is there, and nobody warns"


async def test_what_programs_write_to_is_writable_and_what_they_trust_is_there(box: belljar.AsyncSandbox) -> None:
    places = ("/tmp", "/var/tmp", "/run", "/dev/shm", "~/.cache/deep/er", "~/.config", "/workspace")
    for place in places:
        assert await sh(box, f"mkdir -p {place} && echo 1 > {place}/file && cat {place}/file") == "1"
    certificates = await sh(box, "python3 -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()))'")
    here = await sh(box, "ls /etc/ssl/certs 2>/dev/null | wc -l")
    assert (int(certificates) > 0) is (int(here) > 0)
    refused = await box.exec(["bash", "-c", "echo 1 > /usr/local/file"])
    assert not refused.ok and refused.error is not None and refused.error.error_type == "PERMISSION_DENIED"


async def test_every_shell_finds_the_toolchains_and_both_names_of_python(
    engine: Engine, box: belljar.AsyncSandbox
) -> None:
    versions = await sh(
        box, "python --version; python3 --version; sh -c 'python --version'; bash -lc 'python --version'"
    )
    assert len(set(versions.splitlines())) == 1 and versions.startswith("Python 3")
    wanted = {"node": "javascript", "go": "go", "rustc": "rust", "git": ""}
    rows = {row.name: row for row in await engine.languages_of("native")}
    for program, language in wanted.items():
        if language and rows[language].available:
            assert await sh(box, f"bash -c 'command -v {program}'")


async def test_git_commits_at_home_without_being_told_who_and_a_user_may_say_so(box: belljar.AsyncSandbox) -> None:
    if not (await box.exec(["bash", "-c", "command -v git"])).ok:
        pytest.skip("SKIPPED: there is no git: apt install git")
    begin = "cd && git init repo && cd repo && echo a > a && git add a && git commit -qm one"
    result = await box.exec(["bash", "-c", begin])
    assert result.ok and result.stderr == "", result.stderr
    told = "git config --global user.name Ada; git config --global user.email ada@example.org"
    assert await sh(box, f"cd ~/repo; {told}; echo b > a; git commit -qam two; git log --format=%an") == "Ada\nuser"
    assert await sh(box, "git clone -q ~/repo /workspace/copy && cat /workspace/copy/a") == "b"


async def test_pip_installs_from_an_index_inside_and_its_programs_are_on_path(box: belljar.AsyncSandbox) -> None:
    if not (await box.exec(["bash", "-c", "python3 -m pip --version"])).ok:
        pytest.skip("SKIPPED: the system's Python has no pip: apt install python3-pip")
    file, content = wheel("plum", "1.0")
    await box.files.write(f"/workspace/index/{file}", content)
    await box.files.write("/workspace/index/simple/plum/index.html", f'<a href="/{file}">{file}</a>')
    server = await box.start(["python3", "-m", "http.server", "--directory", "index", "8000"])
    await box.wait_for_port(8000)
    index = "--index-url http://127.0.0.1:8000/simple/ --no-cache-dir"
    await sh(box, f"env -u PIP_NO_INDEX PIP_CONFIG_FILE=/dev/null pip install --user {index} plum")
    assert await sh(box, "plum; command -v plum") == "plum 1.0\n/home/user/.local/bin/plum"
    await sh(box, "python3 -m venv --system-site-packages ~/own 2>/dev/null || python3 -m venv --without-pip ~/own")
    assert await sh(box, "~/own/bin/python -c 'import sys; print(sys.prefix)'") == "/home/user/own"
    await server.kill()


async def test_npm_installs_globally_at_home(box: belljar.AsyncSandbox) -> None:
    if not (await box.exec(["bash", "-c", "npm --version"])).ok:
        pytest.skip("SKIPPED: there is no npm: apt install npm")
    await box.files.write("/workspace/p/package.json", '{"name": "p", "version": "1.0.0", "bin": {"peach": "c.js"}}')
    await box.files.write("/workspace/p/c.js", "#!/usr/bin/env node\nconsole.log('peach')\n")
    await sh(box, "npm pack --silent ./p && npm install -g --silent --no-audit --no-fund ./p-1.0.0.tgz")
    assert await sh(box, "peach; command -v peach") == "peach\n/home/user/.local/bin/peach"


async def test_root_inside_is_called_so_owns_its_files_and_has_no_capability(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True, user="root") as box:
        assert await sh(box, "whoami; id -u; id -g") == "root\n0\n0"
        assert await sh(box, "grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status | tr -d ' \\t'") == (
            "CapEff:0000000000000000\nCapBnd:0000000000000000\nNoNewPrivs:1"
        )
        assert await sh(box, "cd; touch f; chown root:root f; chown 0 f; stat -c '%U %G' f") == "root root"
        assert not (await box.exec(["chown", "1000", "/home/user/f"])).ok, "there is nobody else"
        unpacking = (
            "import tarfile as t; f = t.TarInfo('x'); f.uid = f.gid = 77; a = t.open('a.tar', 'w'); a.addfile(f)"
        )
        assert await sh(box, f'python3 -c "{unpacking}; a.close()" && tar xf a.tar && stat -c %U x') == "root"
        for line in ("sudo -n true", "mount -t tmpfs x /mnt", "mknod d c 1 3", "touch /usr/x /etc/x", "hostname x"):
            assert not (await box.exec(["bash", "-c", line])).ok, line
