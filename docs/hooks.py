"""Hooks of mkdocs: links to files outside docs/, and drawings as part of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

#: Files outside docs/ that have a page in the site.
PAGES = {
    "../README.md": "index.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "../examples/spatial_transformer.py": "example.md",
}
#: Pages that include a file of the repository's root, whose links start there.
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
#: Pages that end with the source of a program.
SOURCES = {"example.md": "examples/spatial_transformer.py"}

_LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")
_DRAWING = re.compile(r'<img alt="[^"]*" src="(assets/[a-z0-9_]+\.svg)"\s*/?>')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include a file of the root where the page is one, and lead links out of docs/ to their pages."""
    included = INCLUDED.get(page.file.src_uri)
    if included:
        text = (DOCS.parent / included).read_text()
        markdown = _LINK.sub(lambda link: _from_root(link[0], link[1], link[2]), text)
    markdown = _LINK.sub(lambda link: f"]({PAGES.get(link[1], link[1])}{link[2]})", markdown)
    source = SOURCES.get(page.file.src_uri)
    return f"{markdown}\n```python\n{(DOCS.parent / source).read_text()}```\n" if source else markdown


def _from_root(whole: str, target: str, anchor: str) -> str:
    if "://" in target:
        return whole
    inside = target.removeprefix("docs/")
    return f"]({inside if inside != target else '../' + target}{anchor})"


def on_page_content(html: str, **_: Any) -> str:
    """Put the drawings into the page, so that they follow its colours."""
    return _DRAWING.sub(lambda image: (DOCS / image[1]).read_text(), html)
