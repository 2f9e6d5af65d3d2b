"""What a browser sees while a preview's server starts, and when it has died. Whatever guests wrote is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from belljar.core.display import neutralise
from belljar.preview.headers import Headers

_MAX_LINE_CHARACTERS = 500
_RELOAD_SECONDS = 1
_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:4rem auto;"
    "padding:0 1rem}pre{font:13px/1.45 ui-monospace,monospace;background:#8882;padding:1rem;overflow:auto;"
    "white-space:pre-wrap}h1{font-size:1.4rem}"
)


def page(title: str, text: str, *, advice: str = "", lines: Sequence[str] = (), reload: bool = False) -> bytes:
    """Returns a page that says how a preview is.

    Args:
        title: its heading.
        text: what has happened.
        advice: what can be done.
        lines: the last that the server wrote, hostile.
        reload: whether the browser is to look again, and again.
    """
    again = f'<meta http-equiv="refresh" content="{_RELOAD_SECONDS}">' if reload else ""
    shown = "\n".join(html.escape(neutralise(line[:_MAX_LINE_CHARACTERS])) for line in lines)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{_text(title)}</title>',
        f"<style>{_STYLE}</style><h1>{_text(title)}</h1><p>{_text(text)}</p>",
        f"<p>{_text(advice)}</p>" if advice else "",
        f"<pre>{shown}</pre>" if shown else "",
    ]
    return "".join(parts).encode()


def headers(body: bytes, frames: Sequence[str]) -> Headers:
    """Returns the headers of such a page: it runs nothing, loads nothing and is not kept."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors {' '.join(('self', *frames))}"
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"content-security-policy", policy.replace("frame-ancestors self", "frame-ancestors 'self'").encode()),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]


def _text(text: str) -> str:
    return html.escape(neutralise(text))
