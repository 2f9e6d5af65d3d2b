"""Part of the session's agent: what a value looks like, in as many forms as it has."""

import base64
import io
import json
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

TEXT_LIMIT = 1_000_000
DEPTH_LIMIT = 64  # of a JSON form; the host reads little more than this
VALUE_LIMIT = 100_000
ROW_LIMIT = 1000  # of a table as data
TABLE = "application/vnd.dataresource+json"
_HOOKS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}
_KINDS = {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "M": "datetime", "m": "duration"}


def bundle(value: object) -> "dict[str, Any]":
    """Returns a value as a MIME bundle: its repr, and whatever richer forms it offers."""
    data: dict[str, Any] = {}
    try:
        data["text/plain"] = repr(value)[:TEXT_LIMIT]
    except Exception as error:
        data["text/plain"] = f"<repr failed: {type(error).__name__}>"
    if not isinstance(value, type):
        data |= _own_bundle(value)
        for hook, mime in _HOOKS.items():
            if mime not in data and (shown := _asked(value, hook)) is not None:
                data[mime] = shown
        data |= _figure(value) | _table(value)
    if isinstance(value, (dict, list)) and "application/json" not in data:
        text = json_text(value)
        if text and len(text) <= TEXT_LIMIT:
            data["application/json"] = json.loads(text)
    return sendable(data)


def sendable(data: "dict[Any, Any]") -> "dict[str, Any]":
    """Returns what of a bundle can be sent: bytes become base64, and what JSON cannot say is left out."""
    shown: dict[str, Any] = {}
    for mime, form in data.items():
        if isinstance(form, (bytes, bytearray)):
            shown[str(mime)] = base64.b64encode(form).decode()
        elif isinstance(form, str) or json_text(form):
            shown[str(mime)] = form
    return shown


def _asked(value: object, hook: str) -> "Any":
    """What a method such as `_repr_html_` returns, without the metadata that may come with it; None if nothing."""
    try:
        method = getattr(value, hook, None)
        shown = method() if callable(method) else None
    except Exception:
        return None
    return shown[0] if isinstance(shown, tuple) and shown else shown


def _own_bundle(value: object) -> "dict[str, Any]":
    """What `_repr_mimebundle_` returns: all forms at once."""
    try:
        method = getattr(value, "_repr_mimebundle_", None)
        shown = method(include=None, exclude=None) if callable(method) else None
    except Exception:
        return {}
    shown = shown[0] if isinstance(shown, tuple) and shown else shown
    return dict(shown) if isinstance(shown, dict) else {}


def _figure(value: object) -> "dict[str, Any]":
    """A figure of matplotlib as a picture."""
    module = sys.modules.get("matplotlib.figure")
    if module is None or not isinstance(value, getattr(module, "Figure", ())):
        return {}
    try:
        return {"image/png": picture(value)}
    except Exception:
        return {}


def picture(figure: "Any") -> bytes:
    """Draws a figure of matplotlib as a PNG."""
    image = io.BytesIO()
    figure.savefig(image, format="png", bbox_inches="tight")
    return image.getvalue()


def figures() -> "Iterator[dict[str, str]]":
    """Yields every open matplotlib figure as a PNG; then they are closed, so that the next turn starts clean."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        yield {"image/png": base64.b64encode(picture(figure)).decode(), "text/plain": repr(figure)}
    pyplot.close("all")


# --- tables ---


def _table(value: object) -> "dict[str, Any]":
    """A table of pandas or polars as data: its columns with their types, and its first rows."""
    for name, read in (("pandas", _of_pandas), ("polars", _of_polars)):
        module = sys.modules.get(name)
        kinds = tuple(getattr(module, kind) for kind in ("DataFrame", "Series") if hasattr(module, kind))
        if isinstance(value, kinds):
            try:
                return {TABLE: read(value)}
            except Exception:  # a table that cannot be told in JSON has its text and HTML
                return {}
    return {}


def _of_pandas(value: "Any") -> "dict[str, Any]":
    frame = value if hasattr(value, "columns") else value.to_frame(value.name if value.name is not None else "values")
    first = frame.head(_rows(len(frame.columns)))
    flat = first.reset_index()
    flat.columns = [_label(column) for column in flat.columns]
    told = json.loads(flat.to_json(orient="split", date_format="iso", default_handler=str))
    kinds = [_KINDS.get(kind.kind, "string") for kind in flat.dtypes]
    fields = [{"name": name, "type": kind} for name, kind in zip(told["columns"], kinds, strict=False)]
    rows = [dict(zip(told["columns"], row, strict=False)) for row in told["data"]]
    return {"schema": {"fields": fields}, "data": rows, "total_rows": len(frame)}


def _of_polars(value: "Any") -> "dict[str, Any]":
    frame = value if hasattr(value, "columns") else value.to_frame()
    first = frame.head(_rows(len(frame.columns)))
    fields = [{"name": name, "type": _polars_type(kind)} for name, kind in first.schema.items()]
    rows = json.loads(json.dumps(first.to_dicts(), default=str))
    return {"schema": {"fields": fields}, "data": rows, "total_rows": frame.height}


def _polars_type(kind: "Any") -> str:
    asked = {"is_integer": "integer", "is_float": "number", "is_temporal": "datetime"}
    known = next((name for ask, name in asked.items() if getattr(kind, ask, bool)()), "")
    return known or ("boolean" if str(kind) == "Boolean" else "string")


def _rows(columns: int) -> int:
    return max(1, min(ROW_LIMIT, VALUE_LIMIT // (2 * columns + 4)))


def _label(column: object) -> str:
    return ", ".join(str(part) for part in column if part != "") if isinstance(column, tuple) else str(column)


# --- JSON ---


def json_text(value: object) -> str:
    """Returns a value as JSON; nothing for what JSON cannot say, or what is too deep or too much for the host."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return ""
    small = sum(map(text.count, ",[{")) <= VALUE_LIMIT
    return text if small and is_shallow(value, DEPTH_LIMIT) else ""


def is_shallow(value: object, depth: int) -> bool:
    """Says whether no more than so many lists and dicts are in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth > 0 and all(is_shallow(item, depth - 1) for item in inner)
