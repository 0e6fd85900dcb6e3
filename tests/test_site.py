"""Tests of the documentation site: it builds without warnings and network, and displays correctly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=surroundings, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, shared by all test processes."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    made = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (made / "done").exists():
            done = build(ROOT / "mkdocs.yml", made)
            assert done.returncode == 0, done.stderr
            assert "WARNING" not in done.stderr + done.stdout, done.stderr
            (made / "done").touch()
    return made


def test_every_document_has_a_page(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / f"{path.stem}.html").stat().st_size > 2000
    assert not list(site.rglob("*.py"))


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[nowhere](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\ntheme:\n  name: material\n  font: false\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"', text)
        loaded += re.findall(
            r'<link[^>]+rel="(?:stylesheet|preconnect|icon|preload)"[^>]*href="([^"]+)"', text
        )
        assert [address for address in loaded if "//" in address] == [], page.name


def test_included_files_are_whole(site: Path) -> None:
    for name, words in (
        ("contributing", "Adding an op"),
        ("changelog", "Numerics version 1"),
        ("example", "class SpatialTransformer"),
        ("api", "scale_of_range"),
    ):
        text = re.sub(r"<[^>]+>", "", (site / f"{name}.html").read_text())
        assert words in text, f"{name}.html has no {words!r}"


#: JavaScript that runs in the page and collects what is visible.
LOOK = """
<script>
window.addEventListener("load", () => {
  const box = e => e.getBoundingClientRect();
  const article = document.querySelector("article");
  const drawings = [...article.querySelectorAll("svg.hf-drawing")].map(e => ({
    width: box(e).width, height: box(e).height, title: e.querySelector("title").textContent,
    marks: e.querySelectorAll("circle, line, rect").length,
    ink: getComputedStyle(e.querySelector("text.hf-ink")).fill,
    text: [...e.querySelectorAll("text")].map(t => t.textContent).join(" "),
    letters: Math.min(...[...e.querySelectorAll("text")].map(t => box(t).height)),
    cut: [...e.querySelectorAll("text")].filter(t => box(t).right > box(e).right + 1 ||
      box(t).left < box(e).left - 1).map(t => t.textContent)}));
  const found = {title: document.title, text: article.innerText, drawings,
    page: getComputedStyle(document.body).backgroundColor,
    wide: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    tables: article.querySelectorAll("table").length};
  document.body.innerHTML = "<pre>FOUND</pre>";
  document.body.firstChild.append(encodeURIComponent(JSON.stringify(found)), "DNUOF");
});
</script>
"""


def looked_at(
    browser: str, page: Path, tmp_path: Path, dark: bool = False, width: int = 1400
) -> dict[str, Any]:
    """Open ``page`` in a browser with a light or a dark colour scheme, and describe it."""
    probed = page.with_name(f"probed-{os.getpid()}-{page.name}")
    probed.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        probed.as_uri(),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        probed.unlink()
    text = re.search(r"FOUND(\S+)DNUOF</pre>", done.stdout)
    assert text, f"{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(unquote(text[1]))
    return seen


#: For each page: expected words in the text and in the charts.
PAGES = {
    "index": (
        ["Start in five minutes", "A whole training run has the same bits"],
        ["fake_quantize backward", "NVIDIA H200"],
    ),
    "grid_sample": (
        ["Formula", "Guarantee", "GridSampleBackwardPlan"],
        ["share of copy bandwidth", "NVIDIA H200"],
    ),
    "results": (["Why some shares are above 100 %", "torch.compile"], ["quantize per tensor", "AMD EPYC"]),
}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_a_browser(browser: str, site: Path, tmp_path: Path, name: str, dark: bool) -> None:
    seen = looked_at(browser, site / f"{name}.html", tmp_path, dark)
    words, charted = PAGES[name]
    assert all(word in seen["text"] for word in words)
    shown = " ".join(drawing["text"] for drawing in seen["drawings"])
    assert all(word in shown for word in charted)
    assert len(seen["drawings"]) == (ROOT / "docs" / f"{name}.md").read_text().count("](assets/") >= 1
    for drawing in seen["drawings"]:
        assert drawing["width"] > 300 and drawing["height"] > 100 and drawing["marks"] > 10, drawing["title"]
        assert drawing["cut"] == [], drawing["title"]
        assert (brightness(drawing["ink"]) > 500) == dark, "the drawing has the colours of the page"
    assert seen["broken"] == [] and seen["wide"] <= 0 and seen["tables"] >= 1
    assert (brightness(seen["page"]) < 200) == dark


@pytest.mark.parametrize("name", [*PAGES, "install", "qat"])
def test_a_page_on_a_phone(browser: str, site: Path, tmp_path: Path, name: str) -> None:
    seen = looked_at(browser, site / f"{name}.html", tmp_path, width=420)
    assert seen["wide"] <= 0, "the page scrolls sideways"
    for drawing in seen["drawings"]:
        assert drawing["letters"] > 7, f"{drawing['title']}: the text is too small to read"


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_browser_can_find_fault(browser: str, site: Path, tmp_path: Path) -> None:
    spoiled = site / "spoiled.html"
    text = (
        (site / "index.html").read_text().replace("NVIDIA H200, torch", "NVIDIA H200, torch" + " wide" * 200)
    )
    spoiled.write_text(text.replace("</article>", '<img src="nowhere.png"></article>'))
    seen = looked_at(browser, spoiled, tmp_path)
    assert seen["drawings"][0]["cut"] and seen["broken"]
