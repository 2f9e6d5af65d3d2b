"""Pages for people: `/` says where things are, `/docs` shows the API and lets it be tried; all from this server.

Swagger UI's files are those that the package fastapi-offline carries. Only its files are used, and only by their names.
"""

from __future__ import annotations

import html
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from belljar.core import errors
from belljar.core.version import __version__

router: APIRouter = APIRouter(include_in_schema=False)

_PACKAGE = "fastapi_offline"
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_CACHED = {"Cache-Control": "public, max-age=3600"}
_BASE = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Swagger UI sets styles of its own and has its icons as data.
_DOCS_POLICY = (
    f"{_BASE}; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src data:; "
    "connect-src 'self'"
)
_START_POLICY = f"{_BASE}; style-src 'unsafe-inline'"
_LINKS = {
    "docs": ("docs", "the API, to read and to try"),
    "openapi": ("openapi.json", "the same for programs: OpenAPI"),
    "execute": ("api/sandbox/execute", "POST: run a snippet or a command"),
    "languages": ("api/languages", "what can be run here"),
    "backends": ("api/backends", "what runs it, and what holds it"),
    "health": ("healthz", "it is alive"),
    "ready": ("readyz", "it can run code: found out by a real run"),
    "metrics": ("metrics", "for Prometheus"),
}
if find_spec("mcp") is not None:
    _LINKS["mcp"] = ("mcp", "the same for models: the Model Context Protocol")
_DOCS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Belljar: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/assets/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/assets/swagger-ui-bundle.js"></script>
<script src="docs/assets/start.js"></script>
</body>
</html>
"""
_SCRIPT = """window.ui = SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null, persistAuthorization: false,
});
"""
_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Belljar</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1rem; }}
td {{ padding: .2rem 1.5rem .2rem 0; vertical-align: top; }}
pre {{ overflow-x: auto; padding: .8rem; border: 1px solid #8886; border-radius: .4rem; }}
</style>
</head>
<body>
<h1>Belljar {version}</h1>
<p>Runs code that nobody has read yet, where it can do no harm, and returns a typed answer.</p>
<table>
{rows}
</table>
<pre>curl {url}api/sandbox/execute -H 'content-type: application/json' -d '{{"code": "print(6 * 7)"}}'</pre>
<p>Where this server has keys, send yours as <code>Authorization: Bearer bj_…</code>.</p>
</body>
</html>
"""


@router.get("/")
async def start(request: Request) -> Response:
    """Says where things are: to browsers as a page, to everybody else as JSON."""
    vary = {"Vary": "Accept"}
    if "text/html" not in request.headers.get("accept", ""):
        links = {name: f"/{path}" for name, (path, _) in _LINKS.items()}
        return JSONResponse({"name": "belljar", "version": __version__, "links": links}, headers=vary)
    rows = "\n".join(
        f'<tr><td><a href="{path}">/{path}</a></td><td>{html.escape(what)}</td></tr>' for path, what in _LINKS.values()
    )
    page = _START.format(version=__version__, rows=rows, url=html.escape(str(request.base_url)))
    return HTMLResponse(page, headers=vary | {"Content-Security-Policy": _START_POLICY})


@router.get("/docs")
async def docs() -> Response:
    """The API, to read and to try."""
    _folder()
    return HTMLResponse(_DOCS, headers={"Content-Security-Policy": _DOCS_POLICY})


@router.get("/docs/assets/start.js")
async def docs_script() -> Response:
    return Response(_SCRIPT, media_type="text/javascript", headers=_CACHED)


@router.get("/docs/assets/{name}")
async def docs_asset(name: str) -> Response:
    """A file of Swagger UI."""
    if name not in _ASSETS:
        raise errors.NotFound(f"there is no file {name[:80]!r}", fix="GET /docs")
    return FileResponse(_folder() / name, media_type=_ASSETS[name], headers=_CACHED)


def _folder() -> Path:
    """Where Swagger UI's files are, or NotAvailable."""
    spec: Any = find_spec(_PACKAGE)
    if spec is None:
        raise errors.NotAvailable("Swagger UI is not installed here", fix="pip install fastapi-offline")
    return Path(spec.submodule_search_locations[0]) / "static"
