"""mkdocs hooks: convert links to files outside docs/, and inline the drawings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

#: Files outside docs/ and their pages in the site.
PAGES = {
    "../README.md": "index.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
}
#: The page that shows the sources of all examples, each under a heading with its name.
EXAMPLES = "example.md"
#: Pages that include a file of the repository root. Links in these files are relative to the root.
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

_LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")
_DRAWING = re.compile(r'<img alt="[^"]*" src="(assets/[a-z0-9_]+\.svg)"\s*/?>')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include files of the repository root, and convert links out of docs/ to links to pages."""
    included = INCLUDED.get(page.file.src_uri)
    if included:
        text = (DOCS.parent / included).read_text()
        markdown = _LINK.sub(lambda link: _from_root(link[0], link[1], link[2]), text)
    markdown = _LINK.sub(lambda link: f"]({_page_of(link[1])}{link[2]})", markdown)
    return f"{markdown}\n{_sources()}" if page.file.src_uri == EXAMPLES else markdown


def _page_of(target: str) -> str:
    """The page of a link out of docs/. The heading of an example is its name, whose dot an anchor lacks."""
    if target.startswith("../examples/"):
        return f"{EXAMPLES}#{Path(target).stem}py"
    return PAGES.get(target, target)


def _sources() -> str:
    files = sorted((DOCS.parent / "examples").glob("*.py"))
    return "\n".join(f"## {file.name}\n\n```python\n{file.read_text()}```\n" for file in files)


def _from_root(whole: str, target: str, anchor: str) -> str:
    if "://" in target:
        return whole
    inside = target.removeprefix("docs/")
    return f"]({inside if inside != target else '../' + target}{anchor})"


def on_page_content(html: str, **_: Any) -> str:
    """Inline the drawings, so that they use the colours of the page."""
    return _DRAWING.sub(lambda image: (DOCS / image[1]).read_text(), html)
