"""How a result is shown to people: as text for `print(result)`, as HTML for notebooks.

Whatever a guest wrote is shown, never obeyed: no escape sequence reaches a terminal, all text is escaped in HTML, an
image is checked to be one, and HTML of a guest is put into a frame that runs no script and loads nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from belljar.core.values import MIB

if TYPE_CHECKING:
    from belljar.core.result import Result

_MAX_TEXT_CHARACTERS = 100_000  # of one text in a notebook
_MAX_IMAGE_CHARACTERS = 8 * MIB  # of one image, in base64
IMAGES: dict[str, bytes] = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
_RED, _GREEN = "#c62828", "#2e7d32"
_PRE = "margin:0;white-space:pre-wrap"
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'\">"
)

# Controls that would act on a terminal, shown as the symbols Unicode has for them; newline and tab pass.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)
# Characters that reorder or hide what is around them.
_VISIBLE |= dict.fromkeys((*range(8234, 8239), *range(8294, 8298), 8203, 8232, 8233), 65533)


def as_text(result: Result) -> str:
    """Returns a result for people to read: how it ended, what it printed, what was wrong."""
    parts = [summary(result), *(neutralise(text).rstrip("\n") for text in (result.stdout,) if text.strip())]
    if result.stderr.strip():
        parts.append(f"[stderr]\n{neutralise(result.stderr).rstrip()}")
    parts += [
        f"[result] {neutralise(str(bundle['text/plain']))}" for bundle in result.results if "text/plain" in bundle
    ]
    if result.error:
        parts.append(neutralise(f"{result.error.error_type}: {result.error.message}"))
        parts.append(neutralise(f"Suggestion: {result.error.suggestion}"))
    return "\n".join([*parts, *(f"[{kind}] {neutralise(note)}" for kind, note in _notes(result))])


def summary(result: Result) -> str:
    """Returns one line on how a run ended, such as "error (exit code 1) on native in 35 ms"."""
    code = "" if result.exit_code is None else f" (exit code {result.exit_code})"
    where = f" on {result.backend}" if result.backend else ""
    return f"{result.status}{code}{where} in {result.duration_ms:.0f} ms"


def as_html(result: Result) -> str:
    """Returns a result as HTML that is safe to show: figures, tables, output, and an error in red."""
    colour = _GREEN if result.ok else _RED
    parts = [f'<div style="color:{colour};font-weight:bold">{_escaped(summary(result))}</div>']
    parts += [_pre(text, style) for text, style in ((result.stdout, ""), (result.stderr, "color:#8d6e63")) if text]
    parts += [_bundle(bundle) for bundle in result.results]
    if result.error:
        told = f"<b>{_escaped(result.error.error_type)}</b>: {_escaped(result.error.message)}"
        parts.append(f'<div style="color:{_RED};border-left:4px solid;padding-left:8px">{told}<br>')
        parts.append(f"<i>{_escaped(result.error.suggestion)}</i></div>")
    parts += [f"<div><small><b>{kind}</b> {_escaped(note)}</small></div>" for kind, note in _notes(result)]
    return f"<div>{''.join(parts)}</div>"


def _notes(result: Result) -> Iterator[tuple[str, str]]:
    """Yields what people should know of beside the output; why a backend was chosen is not part of it."""
    for kind, notes in (("denied", result.denied), ("left out", result.left_out), ("warning", result.warnings)):
        for note in notes:
            yield kind, note
    if result.truncated:
        yield "warning", "the output was cut"


def _bundle(bundle: Mapping[str, Any]) -> str:
    """Returns the richest form of a displayed value that can be shown safely."""
    for mime in IMAGES:
        if mime in bundle and is_image(mime, bundle[mime]):
            return f'<img src="data:{mime};base64,{bundle[mime]}" style="max-width:100%">'
    drawing = bundle.get("image/svg+xml")
    if isinstance(drawing, str) and len(drawing) <= _MAX_IMAGE_CHARACTERS:
        data = base64.b64encode(drawing.encode("utf-8", "replace")).decode()  # in an image no script runs
        return f'<img src="data:image/svg+xml;base64,{data}" style="max-width:100%">'
    page = bundle.get("text/html")
    if isinstance(page, str) and len(page) <= _MAX_TEXT_CHARACTERS:
        frame = "border:0;width:100%;height:20em"
        return f'<iframe sandbox="" style="{frame}" srcdoc="{_quoted(_POLICY + page)}"></iframe>'
    return _pre(str(bundle.get("text/plain", "")), "")


def is_image(mime: str, value: object, most: int = _MAX_IMAGE_CHARACTERS) -> bool:
    """Says whether a value is base64 of an image of that kind, in at most so many characters."""
    if not isinstance(value, str) or len(value) > most:
        return False
    try:
        return base64.b64decode(value, validate=True).startswith(IMAGES[mime])
    except ValueError:
        return False


def _pre(text: str, style: str) -> str:
    return f'<pre style="{_PRE};{style}">{_escaped(text)}</pre>'


def _escaped(text: str) -> str:
    left_out = len(text) - _MAX_TEXT_CHARACTERS
    shown = text if left_out <= 0 else f"{text[:_MAX_TEXT_CHARACTERS]}\n[… {left_out} characters …]"
    return _quoted(neutralise(shown))


def _quoted(text: str) -> str:
    import html  # whose table of entities is large, and which only notebooks need

    return html.escape(text, quote=True)


def neutralise(text: str) -> str:
    """Returns guest text that can be printed on a terminal: no escape sequence in it can do anything.

    A carriage return before a newline is dropped; any other is shown, since it could overwrite what was printed.
    """
    return text.replace("\r\n", "\n").translate(_VISIBLE)
