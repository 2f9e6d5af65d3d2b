"""HTTP/1.1 as the client speaks it: what a request looks like on the wire, and answers read by llhttp (httptools)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import httptools

from belljar.core import errors

Headers = list[tuple[bytes, bytes]]
_MAX_HEAD_BYTES = 100 * 1024  # of an answer
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_TARGET = re.compile(rb"[\x21-\x7e]+")


class Broken(Exception):
    """The server said what is no answer, or hung up before its end."""


class Answer(NamedTuple):
    """What a server answered. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def request_line(method: str, target: str) -> bytes:
    """Returns the first line of a request.

    Raises:
        InvalidRequest: the target could end the line.
    """
    if not _TARGET.fullmatch(address := target.encode("utf-8", "surrogatepass")):
        raise errors.InvalidRequest(f"path: {target[:80]!r} cannot be sent")
    return b"%b %b HTTP/1.1\r\n" % (method.encode("ascii"), address)


def lines_of(headers: Headers) -> bytes:
    """Returns headers as they are sent.

    Raises:
        InvalidRequest: one of them could end its line.
    """
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise errors.InvalidRequest(f"the header {name[:80]!r} cannot be sent")  # its value may be a secret
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


class AnswerReader:
    """Takes the bytes of one answer, however they come."""

    def __init__(self) -> None:
        self.reusable: bool = False  # after a whole answer: whether the connection may be asked again
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._head_bytes = self._status = 0
        self._has_head = False
        self._is_whole = False
        self._has_more = False
        self._stays_open = False

    def feed(self, data: bytes) -> Answer | None:
        """Takes the next bytes, none at the end of the connection; returns the answer if it is whole.

        Raises:
            Broken: that is no answer.
        """
        if not data:
            return self._end()
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeError) as error:
            raise Broken(f"it does not speak HTTP: {type(error).__name__}") from None
        if not self._has_head and self._head_bytes > _MAX_HEAD_BYTES:
            raise Broken("its headers do not end")
        return self._answer() if self._is_whole else None

    def _end(self) -> Answer:
        """An answer that does not say how long it is ends with its connection."""
        if not self._has_head or {"content-length", "transfer-encoding"} & self._headers.keys():
            raise Broken("it hung up")
        return self._answer()

    def _answer(self) -> Answer:
        self.reusable = self._is_whole and not self._has_more and self._stays_open
        return Answer(self._status, self._headers, b"".join(self._body))

    # --- what the parser calls ---

    def on_message_begin(self) -> None:
        """Another answer begins: after one that was only informational, or one that nobody asked for."""
        self._has_more = self._is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        if not self._is_whole:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Forgets what is only informational."""
        if self._has_head:
            return
        self._status, self._stays_open = self._parser.get_status_code(), self._parser.should_keep_alive()
        self._has_head = self._status >= 200
        if not self._has_head:
            self._headers.clear()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body."""
        if not self._is_whole:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Notes the end."""
        self._is_whole = self._has_head
