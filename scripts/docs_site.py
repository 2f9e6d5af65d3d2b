"""Hooks of mkdocs.yml: make pages that are read in the repository fit the site.

In the repository a page may link to any file, a fence may be marked `console here` for the tests, and two pages lie at
the root. On the site those two are pages like the others, links to source files are plain text, and the mark is gone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_MARKED_FENCE = re.compile(r"^```(\w+) \w+$", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository's root."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(root / name).read_text("utf-8").replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites one page: links that leave the site become text, marked fences plain ones."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: _site_link(link, page), part) for part in parts[::2]]
    return _MARKED_FENCE.sub(r"```\1", "".join(parts))


def _site_link(link: re.Match[str], page: Page) -> str:
    text, target = link[1], link[2]
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    for name, other in ROOT_PAGES.items():
        if path.endswith(name):
            up = "../" * page.file.src_uri.count("/")
            return f"[{text}]({up}{other}{'#' + anchor if anchor else ''})"
    if path.endswith("decisions"):
        return f"[{text}]({path}/index.md)"
    leaves = path.startswith("..") and page.file.src_uri.count("/") == 0
    return text if leaves or not path.endswith(".md") else link[0]
