"""What a model reads of a run, a file or a problem: MCP content. Pure, and bounded, for guests write most of it.

An answer stays below 1 MiB: that is what the official client takes of one event, and no model wants to read more.
Text for the model is harmless on a terminal, where some clients print it. An image is checked before it is called one:
a picture that a model's API cannot decode would spoil the whole conversation, not only this answer.
"""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Iterable
from typing import Any

from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import Field

from belljar.core import errors
from belljar.core.capabilities import LanguageSupport
from belljar.core.display import IMAGES, is_image, neutralise
from belljar.core.model import Model
from belljar.core.result import Entry, Failure, MimeBundle, Result
from belljar.core.spelling import respell
from belljar.protocol.records import SessionRecord
from belljar.protocol.responses import BackendLanguage, Executed, Listed

TEXT_LIMIT = 16_000  # characters of a stream or a value; what is cut is said where it was
FILE_LIMIT = 64 * 1024  # bytes of a file in one answer
IMAGE_LIMIT = 600_000  # base64 characters of all images of an answer together
_PICTURE_BYTES = IMAGE_LIMIT * 3 // 4
_IMAGES = 8
_LIST_LIMIT = 1000
_PATHS_LIMIT = 100_000
_DEEPEST = 20
_FACTS = 8  # entries of a failure's context, or of each kind of a run's notes
_NOTES_LIMIT = 4000  # characters of all notes together
_NOTES = ("reasons", "denied", "left_out", "warnings")


class Turned(Executed):
    """The result of a turn, and the session to go on with."""

    session_id: str


class FileText(Model):
    """A file, or as much of it as one answer takes: `text`, or `base64` where it is not UTF-8."""

    path: str
    size: int = Field(description="bytes of the whole file")
    text: str | None = None
    base64: str | None = None
    next_offset: int | None = Field(None, description="read on from here; null: this was the rest of it")
    next_line: int | None = Field(None, description="the same, where lines were asked for")
    line_count: int | None = Field(None, description="of the whole file, where lines were asked for")


class Edited(Model):
    """A file in which text was replaced."""

    path: str
    size: int = Field(description="bytes that it has now")
    replaced: int = Field(description="how often")
    line: int = Field(description="where the first one is")


class Written(Model):
    path: str
    size: int


class Folder(Model):
    files: tuple[Listed, ...]
    left_out: int = Field(0, description="entries that did not fit into the answer")


class Closed(Model):
    session_id: str
    closed: bool = True


class SessionOpened(SessionRecord):
    """An open session. `session_id` is its `id`, under the name that the other tools have for it."""

    session_id: str
    living: bool = Field(False, description="processes go on in it: start_process")


class LanguageList(Model):
    languages: tuple[BackendLanguage, ...]


# --- runs ---


def of_run(
    result: Result, id: str, session_id: str | None = None, *, opened: bool = False, hint: str = ""
) -> CallToolResult:
    """A guest's failure is an answer like any other: `isError` is kept for refusals and for our own failures.

    Args:
        result: what came of it.
        id: of the run.
        session_id: the session that it was a turn of.
        opened: whether the session is new, so that the model has yet to learn its name.
        hint: what else a model should know.
    """
    images, bundles, notes = _split(result.results)
    told = result.model_copy(
        update={
            "stdout": cut(result.stdout), "stderr": cut(result.stderr), "results": bundles, "files": (),
            "truncated": result.truncated or max(len(result.stdout), len(result.stderr)) > TEXT_LIMIT,
            "error": short_failure(result),
        }
        | _short_notes(result)
    )  # fmt: skip
    data = told.model_dump(mode="json") | {"id": id}
    if session_id is not None:
        data["session_id"] = session_id
    if session_id is not None and opened:
        notes.append(f"[session_id: {session_id}, to go on with]")
    if hint:
        notes.append(hint)
    return CallToolResult(content=[_text(_prose(told, notes)), *images], structured_content=data)


def _short_notes(result: Result) -> dict[str, tuple[str, ...]]:
    """The first notes of each kind, for as long as there is room."""
    room = _NOTES_LIMIT
    short: dict[str, tuple[str, ...]] = {}
    for name in _NOTES:
        notes = [cut(note, 500) for note in getattr(result, name)[:_FACTS]]
        while sum(map(len, notes)) > room:
            notes.pop()
        room -= sum(map(len, notes))
        short[name] = tuple(notes)
    return short


def short_failure(result: Result) -> Failure | None:
    """Returns what went wrong with a run, as much of it as fits into an answer, in the words of the tools."""
    if result.error is None:
        return None
    context = {
        cut(name, 100): plain if (plain := _plain(value, 2000)) is not None else "(left out)"
        for name, value in list(result.error.context.items())[:_FACTS]
    }
    short: dict[str, Any] = {"message": cut(result.error.message, 4000), "suggestion": _suggestion(result.error)}
    told = result.error.exception
    if told is not None:
        cuts = {"value": cut(told.value, 2000), "traceback": cut(told.traceback, 4000)}
        short["exception"] = told.model_copy(update=cuts)
    return result.error.model_copy(update=short | {"context": context})


def _suggestion(failure: Failure) -> str:
    """In the words of the tools' own arguments."""
    return cut(respell(failure.suggestion, "mcp"), 2000)


def _prose(result: Result, notes: list[str]) -> str:
    parts = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    if result.stderr.strip():
        parts.append(f"[stderr]\n{result.stderr.rstrip()}")
    parts += [f"[result] {bundle['text/plain']}" for bundle in result.results if "text/plain" in bundle]
    parts += notes
    if not result.ok:
        code = f", exit code {result.exit_code}" if result.exit_code is not None else ""
        parts.append(f"[{result.status}{code}]")
    if result.error:
        parts.append(f"{result.error.error_type}: {result.error.message}\nSuggestion: {_suggestion(result.error)}")
    if result.truncated:
        parts.append("[the output was cut]")
    return "\n".join(parts) or "(it ran, and printed nothing)"


def _split(results: Iterable[MimeBundle]) -> tuple[list[ContentBlock], tuple[MimeBundle, ...], list[str]]:
    """Images as blocks of their own, and bundles that say where their images went: one copy is enough."""
    images: list[ContentBlock] = []
    bundles: list[MimeBundle] = []
    notes: list[str] = []
    room = IMAGE_LIMIT
    text_room = TEXT_LIMIT
    for bundle in results:
        kept: MimeBundle = {}
        for mime, value in bundle.items():
            if mime in IMAGES:
                good = room > 0 and len(images) < _IMAGES and is_image(mime, value, room)
                if good:
                    images.append(ImageContent(type="image", data=value, mime_type=mime))
                    room -= len(value)
                    kept[mime] = f"(image {len(images)} of this answer)"
                else:
                    notes.append(f"[an {mime} was left out: it is broken or too large; save it smaller]")
            elif text_room > 0 and (plain := _plain(value, text_room)) is not None:
                kept[cut(mime, 100)] = plain
                text_room -= len(json.dumps(plain))
        if any(mime in kept for mime in IMAGES):
            kept.pop("text/plain", None)  # "<Figure size 640x480 …>" tells nothing to who sees it
        bundles.append(kept)
    return images, tuple(bundles[:64]), notes[:3]


def _plain(value: object, room: int) -> Any:
    """A value of a guest's bundle that every JSON reader takes, or None."""
    if isinstance(value, str):
        return cut(value, room)
    if not _shallow(value, _DEEPEST):
        return None
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):  # half a surrogate pair is a ValueError too
        return None
    return value if len(text) <= room else None


def _shallow(value: object, deepest: int) -> bool:
    if not isinstance(value, dict | list | tuple):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(_shallow(item, deepest - 1) for item in inside)


# --- files and the rest ---


class FileWindow:
    """Looks at a file as it passes by, and keeps what one answer takes of it."""

    def __init__(self, offset: int) -> None:
        self.offset: int = offset
        self.size: int = 0
        self.part: bytearray = bytearray()  # from the offset on
        self.head: bytearray = bytearray()  # the whole file, if it may be a picture that is small enough
        self._checker: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def take(self, piece: bytes) -> None:
        """Goes on with the next piece."""
        self._check(piece)
        if self.offset == 0 and len(self.head) <= _PICTURE_BYTES:
            self.head += piece[: _PICTURE_BYTES + 1 - len(self.head)]
        skipped = max(0, self.offset - self.size)
        self.part += piece[skipped : skipped + FILE_LIMIT - len(self.part)]
        self.size += len(piece)

    def _check(self, piece: bytes, *, last: bool = False) -> None:
        try:
            if self._checker:
                self._checker.decode(piece, last)
        except UnicodeDecodeError:
            self._checker = None

    def text(self) -> str | None:
        """The part as text, without a character that its end cuts in two; None where the file is not text."""
        self._check(b"", last=True)
        if self._checker is None or b"\0" in self.part:
            return None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(bytes(self.part))
        if left := len(decoder.getstate()[0]):
            del self.part[-left:]
        return text


class LineWindow:
    """Looks at a file as it passes by, and keeps some of its lines, as much of them as one answer takes."""

    def __init__(self, first: int, most: int | None) -> None:
        self.first: int = first
        self.size: int = 0
        self.part: bytearray = bytearray()  # the lines that are kept
        self.long: bool = False  # one line is longer than an answer
        self._end = None if most is None else first + most  # the line before which it ends
        self._breaks = 0  # of lines, so far
        self._last = b""  # the file's last byte
        self._full = False

    @property
    def line_count(self) -> int:
        """The lines of the file; the last one need not end."""
        return self._breaks + (self._last not in (b"", b"\n"))

    @property
    def next_line(self) -> int | None:
        """The line after those that are kept; None: there is none."""
        unended = bool(self.part) and not self.part.endswith(b"\n")
        after = self.first + self.part.count(b"\n") + unended
        return after if after <= self.line_count else None

    def take(self, piece: bytes) -> None:
        """Goes on with the next piece. Lines are counted, not walked through: there may be millions."""
        line, breaks = self._breaks + 1, piece.count(b"\n")
        self.size += len(piece)
        self._breaks += breaks
        self._last = piece[-1:] or self._last
        if line + breaks < self.first or self._full:
            return
        wanted = piece if line >= self.first else piece.split(b"\n", self.first - line)[-1]
        left = None if self._end is None else self._end - max(line, self.first)
        if left is not None and wanted.count(b"\n") >= left:
            wanted = wanted[: len(wanted) - len(wanted.split(b"\n", left)[-1])] if left > 0 else b""
            self._full = True
        self.part += wanted
        if len(self.part) > FILE_LIMIT:
            self._shorten()

    def _shorten(self) -> None:
        """Ends at the last whole line that fits."""
        self._full = True
        end = self.part.rfind(b"\n", 0, FILE_LIMIT) + 1
        self.long = not end
        del self.part[end or FILE_LIMIT :]


def of_lines(path: str, window: LineWindow) -> CallToolResult:
    """Lines of a file, and where they are.

    Raises:
        InvalidRequest: it is no text.
    """
    if b"\0" in window.part:
        raise errors.InvalidRequest(f"path: {cut(path, 300)} is not text", fix="read it without first_line and lines")
    told = FileText(
        path=path, size=window.size, text=window.part.decode("utf-8", "replace"), next_line=window.next_line,
        line_count=window.line_count,
    )  # fmt: skip
    end = window.line_count if told.next_line is None else told.next_line - 1
    where = f"[lines {window.first} to {end} of {window.line_count}"
    if window.first > window.line_count:
        where = f"[it has {window.line_count} lines"
    where += f"; read on with first_line={told.next_line}" if told.next_line else ""
    where += "; the line is cut: offset reads all of it" if window.long else ""
    return of_model(told, f"{told.text}{'' if (told.text or chr(10)).endswith(chr(10)) else chr(10)}{where}]")


def of_file(path: str, window: FileWindow) -> CallToolResult:
    text = window.text()
    end = window.offset + len(window.part)
    told = FileText(
        path=path, size=window.size, text=text, next_offset=end if end < window.size else None,
        base64=None if text is not None else base64.b64encode(window.part).decode(),
    )  # fmt: skip
    blocks: list[ContentBlock] = [_text(_file_prose(told))]
    if text is None and window.offset == 0:
        blocks += _picture(bytes(window.head))
    return CallToolResult(content=blocks, structured_content=told.model_dump(mode="json"))


def _file_prose(file: FileText) -> str:
    if file.text is None:
        return f"{cut(file.path, 300)}: {file.size} bytes that are not text (base64 in the structured answer)"
    more = f"\n[{file.size} bytes in all: read on with offset={file.next_offset}]" if file.next_offset else ""
    return (file.text or "(empty)") + more


def _picture(content: bytes) -> list[ContentBlock]:
    if len(content) > _PICTURE_BYTES:
        return []
    mime = next((mime for mime, magic in IMAGES.items() if content.startswith(magic)), None)
    data = base64.b64encode(content).decode()
    return [ImageContent(type="image", data=data, mime_type=mime)] if mime else []


def of_folder(entries: Iterable[Entry]) -> CallToolResult:
    kept: list[Listed] = []
    room, left_out = _PATHS_LIMIT, 0
    for entry in entries:
        room -= len(entry.path)
        if room < 0 or len(kept) >= _LIST_LIMIT:
            left_out += 1
        else:
            kept.append(Listed(path=_encodable(entry.path), kind=entry.kind, size=entry.size))
    rows = [f"{row.size:>10}  {row.path}{'' if row.kind == 'file' else f'  ({row.kind})'}" for row in kept]
    rows += [f"[{left_out} more were left out]"] if left_out else []
    return of_model(Folder(files=tuple(kept), left_out=left_out), "\n".join(rows) or "(there are no files)")


def of_session(record: SessionRecord, *, living: bool = False) -> CallToolResult:
    what = f"A {record.kind} on {record.backend}; it ends when nobody uses it for a while."
    if living:
        what = (
            f"A living sandbox on {record.backend}: give this session_id to start_process, run_command, wait_for_port "
            "and the file tools. It ends when nobody uses it for a while."
        )
    elif record.kind == "sandbox":
        what += " It keeps files; processes end with their command."
    text = f"session_id: {record.id}\n{what}"
    return of_model(SessionOpened(**dict(record), session_id=record.id, living=living), text)


def of_languages(rows: Iterable[tuple[str, LanguageSupport]]) -> CallToolResult:
    told = LanguageList(languages=tuple(BackendLanguage(backend=name, **row.model_dump()) for name, row in rows))
    here = [f"{row.name} {row.version} ({row.backend})" for row in told.languages if row.available]
    missing = {row.name: row.fix for row in told.languages}
    for row in told.languages:
        if row.available:
            missing.pop(row.name, None)
    gone = [f"not here: {name}{f' ({fix})' if fix else ''}" for name, fix in missing.items()]
    return of_model(told, "\n".join([*here, *gone]))


def of_model(model: Model, text: str) -> CallToolResult:
    return CallToolResult(content=[_text(text)], structured_content=model.model_dump(mode="json"))


def of_problem(error: errors.BelljarError) -> CallToolResult:
    """Refused, or our own failure: what happened and what to do, for the model to read.

    The same as data is in `_meta`: clients hold whatever is in `structuredContent` against the tool's schema.
    """
    text = f"{error.kind}: {error.message}" + (f"\nFix: {respell(error.fix, 'mcp')}" if error.fix else "")
    if isinstance(error, errors.Busy):
        text += f"\nTry again in {max(1, round(error.retry_after))} s."
    told = {name: plain for name, value in error.as_dict().items() if (plain := _plain(value, 4000)) is not None}
    return CallToolResult(content=[_text(cut(text, 8000))], is_error=True, _meta={"belljar/problem": told})


# --- text ---


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=neutralise(text))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """Its beginning and its end: what a program did first, and how it ended."""
    text = _encodable(text)
    if len(text) <= limit:
        return text
    half = max(limit // 2 - 30, 1)
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
