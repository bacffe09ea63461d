"""mkdocs hooks: the README is the first page, and linked files outside of `docs/` are part of the
site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FILES = "files"
"""The folder of the site for files outside of `docs/`."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^()\s#]+)(#[^()\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the README and the files that pages link to."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    pages = [page for page in files if page.is_documentation_page()]
    for page in pages:
        for link in _LINK.finditer(page.content_string):
            path = _target(page.src_uri, link[1])
            uri = _in_site(path)
            if uri and (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                pages += [files.src_uris[uri]] * uri.endswith(".md")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to the places in the site. A link to a folder becomes plain text."""
    here = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        uri = _in_site(_target(page.file.src_uri, link[1]))
        return os.path.relpath(uri, here or ".") + (link[2] or "") if uri else ""

    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", _LINK.sub(moved, markdown))


def _in_site(path: str) -> str:
    """Return the place of a repository path in the site; empty for a folder without a page."""
    if (ROOT / path).is_dir():
        path += "/README.md"
        if not (ROOT / path).is_file():
            return ""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FILES}/{path}"


def _target(page: str, link: str) -> str:
    """Return the repository path of a link in a page."""
    own = "README.md" if page == "index.md" else page.removeprefix(f"{FILES}/")
    own = own if own != page or page == "index.md" else f"docs/{page}"
    return os.path.normpath(os.path.join(os.path.dirname(own), link)).replace(os.sep, "/")
