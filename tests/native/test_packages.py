"""Packages by their names, from an index and a registry that these tests make themselves."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.host.packages.store import PackageStore
from belljar.settings import load
from wheels import pip_is_here, wheel

pytestmark = pytest.mark.anyio


def tarball(files: dict[str, str]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return whole.getvalue()


class Registry(NamedTuple):
    """An index of Python packages and a registry of npm's on loopback, and what they were asked."""

    url: str
    files: dict[str, bytes]
    asked: list[str]

    def add_python(self, name: str, *archives: tuple[str, bytes]) -> None:
        links = "".join(f'<a href="/files/{file}">{file}</a>\n' for file, _ in archives)
        self.files[f"/simple/{name}/"] = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.files.update({f"/files/{file}": content for file, content in archives})

    def add_npm(self, name: str, version: str, manifest: dict[str, Any], files: dict[str, str]) -> None:
        about = {"name": name, "version": version, **manifest}
        content = tarball({"package/package.json": json.dumps(about)} | {f"package/{k}": v for k, v in files.items()})
        path = f"/files/{name}-{version}.tgz"
        sums = {"integrity": "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()}
        told = about | {"dist": sums | {"tarball": f"{self.url}{path}", "shasum": hashlib.sha1(content).hexdigest()}}
        self.files[path] = content
        self.files[f"/npm/{name}"] = json.dumps(
            {"name": name, "dist-tags": {"latest": version}, "versions": {version: told}}
        ).encode()


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    files, asked = dict[str, bytes](), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content = files.get(self.path)
            self.send_response(200 if content is not None else 404)
            kind = "application/json" if self.path.startswith("/npm/") else "text/html"
            self.send_header(
                "Content-Type", kind if not self.path.startswith("/files/") else "application/octet-stream"
            )
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    found = Registry(f"http://127.0.0.1:{server.server_port}", files, asked)
    found.add_python("apple", wheel("apple", "1.0"), wheel("apple", "2.1", needs="stone>=1"), wheel("apple", "3.0"))
    found.add_python("stone", wheel("stone", "1.5"))
    yield found
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="belljar-packages-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def engine(state_dir: Path, cache: Path, registry: Registry) -> Engine:
    """Installs from the registry here, and from nowhere else."""
    return make_engine(state_dir, cache, registry)


def make_engine(state_dir: Path, cache: Path, registry: Registry, told: list[str] | None = None, **more: Any) -> Engine:
    installers = {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"{registry.url}/simple/", "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "1",
        "npm_config_registry": f"{registry.url}/npm/", "npm_config_cache": str(cache / "npm"),
        "npm_config_fetch_retries": "0",
    }  # fmt: skip
    settings = {"folder": str(cache / "packages"), "timeout": 120} | more
    options = {"on_setup": told.append} if told is not None else {}
    return Engine(load(state_dir=str(state_dir), packages=settings, installers=installers), **options)  # type: ignore[arg-type]


def need_python(engine: Engine) -> None:
    from belljar.backends.native.backend import Native

    native = engine.backend("native")
    assert isinstance(native, Native)
    native.prepare()
    if native.toolchains.find("python3") is None:
        pytest.skip("SKIPPED: there is no Python that guests may run: apt install python3")
    if not pip_is_here():
        pytest.skip("SKIPPED: there is no pip: apt install python3-pip")


async def test_packages_that_are_named_are_there_with_all_they_need_and_the_second_time_without_a_network(
    engine: Engine, registry: Registry
) -> None:
    need_python(engine)
    code = "import apple, stone, subprocess; print(apple.VERSION, stone.VERSION); subprocess.run('apple')"
    first = await belljar.arun(code, engine=engine, backend="native", packages=["apple<3"])
    assert first.stdout == "2.1 1.5\napple 2.1\n", first.stderr
    asked = len(registry.asked)
    again = await belljar.arun(code, engine=engine, backend="native", packages=["apple <3"])
    assert again.stdout == first.stdout and len(registry.asked) == asked
    other = await belljar.arun("import apple; print(apple.VERSION)", engine=engine, packages=["apple==1.*"])
    assert (other.stdout, other.backend) == ("1.0\n", "native")


async def test_guests_cannot_change_them_and_find_them_compiled(engine: Engine) -> None:
    need_python(engine)
    code = "import apple, os; print(apple.__cached__, os.path.exists(apple.__cached__)); open(apple.__file__, 'a')"
    result = await belljar.arun(code, engine=engine, backend="native", packages=["apple<3"])
    assert result.stdout.splitlines()[0].startswith("/opt/belljar/python/") and result.stdout.endswith("True\n")
    assert result.error is not None and result.error.error_type == "PERMISSION_DENIED"


async def test_sessions_and_sandboxes_find_them_too_living_ones_for_every_shell(engine: Engine) -> None:
    need_python(engine)
    line = "apple && python3 -c 'import stone; print(stone.VERSION)'"
    async with belljar.AsyncSession(engine=engine, backend="native", packages=["apple<3"]) as session:
        assert (await session.run("import apple; apple.VERSION")).results == ({"text/plain": "'2.1'"},)
    async with belljar.AsyncSandbox(engine=engine, backend="native", packages=["apple<3"]) as box:
        assert (await box.exec(["python", "-c", "import apple; apple.main()"])).stdout == "apple 2.1\n"
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True, packages=["apple<3"]) as box:
        assert (await box.exec(["bash", "-c", line])).stdout == "apple 2.1\n1.5\n"


async def test_no_code_of_a_package_runs_on_the_host_while_it_is_installed(
    engine: Engine, registry: Registry, tmp_path: Path
) -> None:
    need_python(engine)
    mark = tmp_path / "ran"
    betray = f"import pathlib; pathlib.Path({str(mark)!r}).write_text('ran')"
    taking = {f"sly-1.0.data/scripts/{name}": "#!python\nprint('mine')\n" for name in ("python", "python3")}
    sly = {"sly.pth": f"import os; {betray}\n", "sly/bad.py": "((\n", **taking}
    registry.add_python("sly", wheel("sly", "1.0", **sly))
    setup = {"built-1.0/setup.py": betray, "built-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: built\nVersion: 1.0\n"}
    registry.add_python("built", ("built-1.0.tar.gz", tarball(setup)))
    result = await belljar.arun("import sly; print(sly.VERSION)", engine=engine, backend="native", packages=["sly"])
    assert "1.0" in result.stdout and "mine" not in result.stdout
    with pytest.raises(errors.InvalidRequest, match=r"built.*only what has a wheel"):
        await belljar.arun("1", engine=engine, backend="native", packages=["built"])
    assert not mark.exists()


@pytest.mark.parametrize("installer", ["pip", "uv"])
async def test_what_a_wheel_names_by_an_address_is_not_built_either(
    state_dir: Path, open_folder: Path, registry: Registry, tmp_path: Path, installer: str
) -> None:
    """Neither a source package, whose build needs nothing, nor a repository, for which git would be started."""
    engine = make_engine(state_dir, open_folder, registry)
    need_python(engine)
    if installer == "uv":
        engine = uv_engine(state_dir, open_folder, registry)
    mark = tmp_path / "ran"
    betray = f"import pathlib; pathlib.Path({str(mark)!r}).write_text('ran')\n"
    project = "[build-system]\nrequires = []\nbuild-backend = 'own'\nbackend-path = ['.']\n"
    about = "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n"
    source = {
        "own-1.0/pyproject.toml": project,
        "own-1.0/own.py": betray,
        "own-1.0/PKG-INFO": about,
        "own-1.0/setup.py": betray,
    }
    registry.files["/files/own-1.0.tar.gz"] = tarball(source)
    for name, place in (("fig", f"{registry.url}/files/own-1.0.tar.gz"), ("lime", f"git+{registry.url}/own.git")):
        registry.add_python(name, wheel(name, "1.0", needs=f"own @ {place}"))
        with pytest.raises(errors.BelljarError):
            await belljar.arun("1", engine=engine, backend="native", packages=[name])
    assert not mark.exists()


async def test_a_name_that_does_not_exist_is_the_request_s_fault_and_a_silent_index_is_not(
    state_dir: Path, cache: Path, registry: Registry, engine: Engine
) -> None:
    need_python(engine)
    with pytest.raises(errors.InvalidRequest, match=r"packages: .*nosuchthing.*check names and versions"):
        await belljar.arun("1", engine=engine, backend="native", packages=["nosuchthing"])
    nowhere = make_engine(state_dir, cache, registry._replace(url="http://127.0.0.1:9"))
    with pytest.raises(errors.NotAvailable, match="could not be fetched"):
        await belljar.arun("1", engine=nowhere, backend="native", packages=["apple==3.0", "stone"])


async def test_what_is_larger_than_a_set_may_be_is_not_kept(
    state_dir: Path, tmp_path: Path, registry: Registry, engine: Engine
) -> None:
    need_python(engine)
    registry.add_python("huge", wheel("huge", "1.0", **{"huge/data.txt": "x" * 3_000_000}))
    small = make_engine(state_dir, tmp_path, registry, size="2M")
    with pytest.raises(errors.PolicyDenied, match=r"take more than 2M .*packages\.size"):
        await belljar.arun("1", engine=small, backend="native", packages=["huge"])
    kept = PackageStore(tmp_path / "packages", small.settings.packages, {}, "")
    assert kept.list() == () and not list((tmp_path / "packages" / "drafts").iterdir())


async def test_an_administrator_s_list_holds_for_what_would_be_installed(
    state_dir: Path, cache: Path, registry: Registry
) -> None:
    told = list[str]()
    strict = make_engine(state_dir, cache, registry, told, names=["stone"])
    need_python(strict)
    result = await belljar.arun("import stone; print(stone.VERSION)", engine=strict, packages=["stone"])
    assert result.stdout == "1.5\n" and told == ["installing packages for guests: stone"]
    with pytest.raises(errors.PolicyDenied, match="apple may not be installed here"):
        await belljar.arun("1", engine=strict, backend="native", packages=["apple"])
    missing = await belljar.arun("import apple", engine=strict, backend="native")
    assert missing.error is not None and 'packages="/path/to/venv"' in missing.error.suggestion


async def test_packages_of_npm_are_found_by_require_and_import_and_their_scripts_are_not_run(
    engine: Engine, registry: Registry, tmp_path: Path
) -> None:
    if shutil.which("npm", path=engine.settings.path) is None:
        pytest.skip("SKIPPED: there is no npm: apt install npm")
    mark = tmp_path / "ran"
    registry.add_npm("pebble", "1.2.0", {"main": "i.js"}, {"i.js": "module.exports = 'pebble'"})
    registry.add_npm(
        "pear", "2.0.0",
        {"main": "i.js", "bin": "cli.js", "dependencies": {"pebble": "^1.0.0"},
         "scripts": {"postinstall": f"touch {mark}", "preinstall": f"touch {mark}"}},
        {"i.js": "module.exports = 'pear and ' + require('pebble')",
         "cli.js": "#!/usr/bin/env node\nconsole.log('cli')\n"},
    )  # fmt: skip
    packages = ["npm:pear@^2"]
    code = "console.log(require('pear')); require('child_process').execSync('pear', {stdio: 'inherit'})"
    result = await belljar.arun(code, engine=engine, backend="native", language="javascript", packages=packages)
    assert result.stdout == "pear and pebble\ncli\n", result.stderr
    asked = len(registry.asked)
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True, packages=packages) as box:
        await box.files.write("a.mjs", "import pear from 'pear'; console.log(pear)")
        assert (await box.exec(["bash", "-c", "node a.mjs && pear"])).stdout == "pear and pebble\ncli\n"
    assert len(registry.asked) == asked and not mark.exists()
    registry.add_npm("lemon", "1.0.0", {"dependencies": {"own": f"git+{registry.url}/own.git"}}, {})
    with pytest.raises(errors.BelljarError):
        await belljar.arun("1", engine=engine, backend="native", language="javascript", packages=["npm:lemon"])
    assert not [path for path in registry.asked if path.startswith("/own.git")], "git was started"
    with pytest.raises(errors.InvalidRequest, match="pear"):
        await belljar.arun("1", engine=engine, backend="native", language="javascript", packages=["npm:pear@3"])


def uv_engine(state_dir: Path, folder: Path, registry: Registry) -> Engine:
    settings = load(state_dir=str(state_dir))
    path = f"{Path(sys.executable).parent}:{settings.path}"
    if shutil.which("uv", path=path) is None:
        pytest.skip("SKIPPED: there is no uv: pip install uv")
    installers = {
        "UV_DEFAULT_INDEX": f"{registry.url}/simple/",
        "UV_CACHE_DIR": str(folder / "uv"),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    packages = {"folder": str(folder / "packages")}
    return Engine(load(state_dir=str(state_dir), packages=packages, installers=installers, path=path))


async def test_uv_is_taken_where_it_is_and_was_told_of_the_index(
    state_dir: Path, open_folder: Path, registry: Registry
) -> None:
    engine = uv_engine(state_dir, open_folder, registry)
    need_python(engine)
    code = "import apple, stone, subprocess; print(apple.VERSION, stone.VERSION); subprocess.run('apple')"
    result = await belljar.arun(code, engine=engine, backend="native", packages=["apple<3"])
    assert result.stdout == "2.1 1.5\napple 2.1\n", result.stderr
    with pytest.raises(errors.InvalidRequest, match=r"nosuchthing.*check names"):
        await belljar.arun("1", engine=engine, backend="native", packages=["nosuchthing"])


async def test_a_real_package_comes_from_the_index_that_this_machine_is_configured_for(
    state_dir: Path, open_folder: Path
) -> None:
    engine = Engine(load(state_dir=str(state_dir), packages={"folder": str(open_folder / "packages"), "timeout": 60}))
    need_python(engine)
    try:
        result = await belljar.arun(
            "import six; print(six.__file__)", engine=engine, backend="native", packages=["six"]
        )
    except errors.BelljarError as error:
        pytest.skip(f"SKIPPED: no index can be reached from here: {error}")
    assert result.stdout.startswith("/opt/belljar/python/"), result.stderr


# --- packages that a project's tests need ---


def test_what_a_projects_files_list_is_installed_for_its_tests_once_and_found_without_an_index_then(
    engine: Engine, registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("apple==2.1  # the sweet one\n-e .\n")
    (tmp_path / "test_it.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        import apple, stone\n"
        "        self.assertEqual(apple.VERSION, '2.1')\n"
    )
    without = belljar.test(tmp_path, engine=engine)
    assert (without.status, without.failed) == ("failed", 1) and "apple" in without.failures[0].message
    report = belljar.test(tmp_path, engine=engine, install=True)
    assert report.ok, report.output
    assert report.reasons[-1] == "installed beforehand: apple==2.1"
    assert any("'-e .' is not installed" in warning for warning in report.warnings)
    registry.asked.clear()
    assert belljar.test(tmp_path, engine=engine, install=True).ok and registry.asked == []
    with pytest.raises(errors.InvalidRequest, match="install"):
        belljar.test(tmp_path, engine=engine, install=True, packages=str(tmp_path))
