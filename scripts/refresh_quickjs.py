"""Fetches QuickJS (for JavaScript) and sucrase (for TypeScript) anew: `python scripts/refresh_quickjs.py`.

Both come from npm, by the `npm` client and whatever registry it is set up with. What is kept is committed, with its
SHA-256 in VERSION.json, so that neither an installation nor a run fetches anything.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "belljar" / "backends" / "wasm" / "vendor"
QUICKJS = "quickjs-wasi@3.6.2"
SUCRASE = "sucrase@3.35.1"
_REQUIRE = re.compile(r"""\brequire\('(\.{1,2}/[^']+)'\)""")

# Source maps, option checks and token dumps of sucrase want other packages. We ask for none of the three, so what they
# would load is an object that accepts everything.
_LOADER = """
const anything = new Proxy(function () {}, { get: (_, name) => (name === Symbol.toPrimitive ? () => "" : anything),
  apply: () => anything, construct: () => anything });
const loaded = {};
function load(name) {
  if (loaded[name]) return loaded[name].exports;
  const module = (loaded[name] = { exports: {} });
  const [links, body] = modules[name];
  body(module.exports, (wanted) => (links[wanted] ? load(links[wanted]) : anything), module);
  return module.exports;
}
core.sucrase = load("index.js");
"""


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        entries = [_quickjs(Path(place)), _sucrase(Path(place))]
    (FOLDER / "VERSION.json").write_text(json.dumps(entries, indent=2) + "\n")
    for entry in entries:
        print(f"{entry['file']}: {entry['package']} {entry['version']}, {entry['licence']}, {entry['sha256']}")
    return 0


def _fetch(package: str, place: Path) -> Path:
    """The package's own folder, unpacked."""
    said = subprocess.run(
        ["npm", "pack", "--json", "--ignore-scripts", package], cwd=place, check=True, capture_output=True, text=True
    )
    name = json.loads(said.stdout)[0]["filename"]
    target = place / package.partition("@")[0]
    with tarfile.open(place / name) as archive:
        archive.extractall(target, filter="data")
    return target / "package"


def _entry(source: Path, file: str, licence: str) -> dict[str, str]:
    facts = json.loads((source / "package.json").read_text())
    return {
        "package": facts["name"], "version": facts["version"], "licence": facts["license"], "licence_file": licence,
        "file": file, "sha256": hashlib.sha256((FOLDER / file).read_bytes()).hexdigest(),
    }  # fmt: skip


def _quickjs(place: Path) -> dict[str, str]:
    source = _fetch(QUICKJS, place)
    (FOLDER / "quickjs.wasm").write_bytes((source / "quickjs.wasm").read_bytes())
    (FOLDER / "LICENSE").write_bytes((source / "LICENSE").read_bytes())
    return _entry(source, "quickjs.wasm", "LICENSE")


def _sucrase(place: Path) -> dict[str, str]:
    source = _fetch(SUCRASE, place)
    (FOLDER / "sucrase.js").write_text(_bundle(source / "dist", SUCRASE))
    (FOLDER / "LICENSE.sucrase").write_bytes((source / "LICENSE").read_bytes())
    return _entry(source, "sucrase.js", "LICENSE.sucrase")


def _bundle(dist: Path, name: str) -> str:
    """All modules that its index needs, in one file that is evaluated like those of our prelude."""
    parts, wanted, seen = [], ["index.js"], {"index.js"}
    while wanted:
        module = wanted.pop(0)
        text = (dist / module).read_text()
        links = {link: _resolve(dist, module, link) for link in dict.fromkeys(_REQUIRE.findall(text))}
        links = {link: target for link, target in links.items() if target}
        for target in links.values():
            if target not in seen:
                seen.add(target)
                wanted.append(target)
        body = f"function (exports, require, module) {{\n{text}\n}}"
        parts.append(f"{json.dumps(module)}: [{json.dumps(links)}, {body}],")
    head = f"// {name}, MIT, in one file: made by scripts/refresh_quickjs.py, not to be edited. See LICENSE.sucrase.\n"
    listed = "\n".join(parts)
    return f"{head}(function (host, core) {{\nconst modules = {{\n{listed}\n}};\n{_LOADER}}})\n"


def _resolve(dist: Path, module: str, link: str) -> str:
    """The file a relative name means, or nothing: some stand only in comments."""
    base = (dist / module).parent / link
    for found in (base.with_name(base.name + ".js"), base / "index.js"):
        if found.is_file():
            return found.resolve().relative_to(dist.resolve()).as_posix()
    return ""


if __name__ == "__main__":
    sys.exit(main())
