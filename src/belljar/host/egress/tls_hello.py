"""Reads the first words of a TLS connection: the ClientHello, and the name of the server in it.

It decides nothing. What it is given is hostile: records may be cut anywhere, lengths may lie, and all of it is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_BYTES = 32_768  # of all records that the message is spread over
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_MAX_RECORD_BYTES = 16_384 + 256
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D


class NotTlsError(ValueError):
    """These bytes are no ClientHello."""


class ClientHello(NamedTuple):
    """What a client says of itself."""

    server_name: str  # empty: it named none
    encrypted: bool  # does it carry another hello that only the server can read (ECH)?


class _Bytes:
    """Takes pieces off some bytes; NotTlsError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise NotTlsError("a length in it is wrong")
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Bytes:
        return _Bytes(self.take(self.number(size)))


def read_hello(data: bytes) -> ClientHello | None:
    """Reads a ClientHello from the first bytes of a connection.

    Returns:
        What it says; None where more bytes are needed.

    Raises:
        NotTlsError: they are none, or it is larger than any.
    """
    message = b""
    for piece in _records(data):
        message += piece
        if message[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise NotTlsError("it does not begin with a ClientHello")
        if len(message) >= _MESSAGE_HEADER:
            size = int.from_bytes(message[1:_MESSAGE_HEADER], "big")
            if size > MAX_BYTES:
                raise NotTlsError(f"its ClientHello has {size} bytes")
            if len(message) - _MESSAGE_HEADER >= size:
                return _hello(_Bytes(message[_MESSAGE_HEADER : _MESSAGE_HEADER + size]))
    if len(data) > MAX_BYTES:
        raise NotTlsError("its ClientHello is too long")
    return None


def _records(data: bytes) -> Iterator[bytes]:
    """The content of the records that are there, of the last one as much as has come."""
    at = 0
    while at < len(data):
        head = data[at : at + _RECORD_HEADER]
        if head[0] != _HANDSHAKE or head[1:2] not in (b"", b"\x03"):
            raise NotTlsError("it does not speak TLS")
        if len(head) < _RECORD_HEADER:
            return
        size = int.from_bytes(head[3:], "big")
        if not 0 < size <= _MAX_RECORD_BYTES:
            raise NotTlsError("a record in it has no possible length")
        at += _RECORD_HEADER
        yield data[at : at + size]
        at += size


def _hello(body: _Bytes) -> ClientHello:
    body.take(2 + 32)  # version, random
    body.vector(1)  # session
    body.vector(2)  # ciphers
    body.vector(1)  # compression
    name, encrypted, seen = "", False, set[int]()
    extensions = body.vector(2) if body.left else _Bytes(b"")
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in seen:
            raise NotTlsError("it says something twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(content)
        encrypted = encrypted or kind == _ENCRYPTED_HELLO
    if body.left:
        raise NotTlsError("a length in it is wrong")
    return ClientHello(name, encrypted)


def _server_name(content: _Bytes) -> str:
    names = content.vector(2)
    if content.left or names.number(1) != 0:
        raise NotTlsError("the name of the server in it cannot be read")
    raw = names.take(names.number(2))
    if names.left or not raw:  # one name, as the standard says: of two, each reader takes another
        raise NotTlsError("it names more than one server")
    return raw.decode("ascii", "backslashreplace").lower().rstrip(".")
