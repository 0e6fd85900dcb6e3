"""Tests of the page of ``holdfast verify --report``: its text, and its layout in a browser."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import holdfast
from holdfast.core import machine
from holdfast.core.contract import printed_bound
from holdfast.core.machine import Machine
from holdfast.proof import digests
from holdfast.proof.catalogue import catalogue
from holdfast.proof.conformance import Difference
from holdfast.proof.page import benchmarks, combined, count, duration, page, times
from holdfast.proof.verify import PlanReport, Report

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found() -> Report:
    """A report of every plan with the pinned digests."""
    plans = []
    for entry in catalogue():
        known = digests.pinned()[entry.plan]
        plans.append(
            PlanReport(
                entry.plan, len(known), 5 * len(known), 7, 7, pinned=len(known), digests=known, promise=entry
            )
        )
    ways = ["reference", "cpu on 1 thread", "cpu on 2 threads"]
    here = Machine.here(holdfast=holdfast.__version__)
    return Report(ways, plans, "no GPU", here, "2026-11-16T01:02:03+00:00", seconds=184.2)


@pytest.fixture(scope="module")
def html(found: Report) -> str:
    fuzz = {"problems": 4321, "seed": 7, "seconds": 60.0, "differences": 0}
    return page(replace(found, fuzz=fuzz), benchmarks(None))


class Text(HTMLParser):
    """Parses a page: its text, its attributes, and whether every element is closed."""

    VOID = {"meta", "br"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.said))


def test_it_names_the_machine_and_every_version(found: Report, html: str) -> None:
    said = str(Text(html))
    here = found.machine
    for fact in (here.cpu, here.system, f"{here.threads} of {here.cores} logical cores"):
        assert fact in said
    assert {"holdfast", "python", "torch", "triton", "numba", "numpy"} == set(here.versions)
    for version in filter(None, here.versions.values()):
        assert version in said
    assert "version 1" in said and "2026-11-16 01:02:03 UTC" in said and "3 min 4 s" in said


def test_it_names_every_plan_with_its_guarantee(found: Report, html: str) -> None:
    said = str(Text(html))
    for plan in found.plans:
        promise = plan.promise
        assert promise is not None
        name = plan.plan.removesuffix("Plan")
        row = re.search(rf"\b{name} {promise.op} {promise.direction} .*? held", said)
        assert row, plan.plan
        for fact in (
            f"same bits {promise.bit_stable}",
            *promise.compute_dtypes,
            promise.rounding,
            *(f"{name} {printed_bound(ulp)}" for name, ulp in promise.ulp.items()),
            "7 of 7",
            combined(plan),
            f"{plan.cases} of {plan.cases} as pinned",
        ):
            assert fact in row[0], f"{plan.plan}: {fact}"


def test_it_counts(found: Report, html: str) -> None:
    said = str(Text(html))
    cases = sum(plan.cases for plan in found.plans)
    assert f"digests equal to the pinned ones {cases:,} of {cases:,}" in said
    assert f"plans held {len(found.plans)} of {len(found.plans)}" in said
    assert "4,321 problems were drawn at random" in said and "seed 7" in said and "None differs" in said
    assert "No sweep was run" in said


def test_it_says_whether_the_gpu_ran(found: Report, html: str) -> None:
    assert "The gpu backend did not run: no GPU." in str(Text(html))
    ran = replace(found, ways=[*found.ways, "gpu"], device="NVIDIA H200")
    assert "= gpu (NVIDIA H200)." in str(Text(page(ran)))


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._driver() is None, "no tool, no version"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine._driver() == "580.65.06"


def test_it_shows_sweeps(found: Report) -> None:
    swept = [replace(found.plans[0], swept=4_213_248, sweeps=3), *found.plans[1:]]
    assert "3 sweeps tried 4.2 million values" in str(Text(page(replace(found, plans=swept))))


def test_it_shows_what_differs_and_escapes_it(found: Report) -> None:
    wrong = Difference(found.plans[0].plan, "<b>many</b>", "cpu on 2 threads", "q[3]: 1 & 2")
    plans = [replace(found.plans[0], differences=[wrong]), *found.plans[1:]]
    fuzz = {"problems": 10, "seed": 1, "seconds": 1.0, "differences": ["<script>alert(1)</script>"]}
    fuzz["machine"] = {"gpu": "a GPU elsewhere", "cpu": "any"}
    made = page(replace(found, plans=plans, fuzz=fuzz))
    said = str(Text(made))
    assert "Not every bit held." in said and "Every bit" not in said
    assert "1 differs" in said and "<b>many</b>" in said and "q[3]: 1 & 2" in said
    assert ", on a GPU elsewhere." in said
    assert "<script" not in made and "<b>many" not in made


def test_it_needs_nothing_beside_itself(html: str) -> None:
    assert "default-src 'none'; style-src 'unsafe-inline'" in html
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img", html)


def test_bars_have_text(html: str) -> None:
    stored = json.loads((ROOT / "benchmarks" / "cpu.json").read_text())
    said = str(Text(html))
    for row in stored["rows"]:
        assert row["name"] in said
        assert f"holdfast: {100 * row['of_copy']:.0f} % of the ceiling" in said
    assert stored["device"] in said and "torch operator: " in said


def test_without_a_benchmark_it_says_how_to_make_one(found: Report) -> None:
    assert "holdfast bench --json bench.json" in str(Text(page(found)))


def test_ids_are_unique_and_labels_lead_somewhere(html: str) -> None:
    attributes = Text(html).attributes
    ids = [value for name, value in attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert {value for name, value in attributes if name == "aria-labelledby"} <= set(ids)


def test_the_combined_digest_depends_on_every_case_but_not_on_their_order() -> None:
    plan = PlanReport("P", digests={"a": "1", "b": "2"})
    assert combined(plan) == combined(PlanReport("P", digests={"b": "2", "a": "1"}))
    assert combined(plan) != combined(PlanReport("P", digests={"a": "2", "b": "1"}))


def test_numbers_are_readable() -> None:
    assert [count(n) for n in (0, 1721, 4_213_248)] == ["0", "1,721", "4.2 million"]
    assert count(90_254_123_008) == "90.3 billion"
    assert [duration(s) for s in (2e-6, 5.04e-3, 9.4, 1800)] == ["2 µs", "5.04 ms", "9.4 s", "30 min 0 s"]
    assert [times(r)[:-1] for r in (None, 0.94, 35.61)] == ["", "0.94", "35.6"]
    assert printed_bound(0.50001) == "0.5001", "a bound is rounded up"


#: JavaScript that finds layout problems. It runs when the page is complete: before, texts may still move.
LOOK = """
<script>
window.addEventListener("load", () => {
  function light(text) {
    const part = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  }
  const page = getComputedStyle(document.body).backgroundColor, faint = [], cut = [];
  for (const e of document.body.querySelectorAll("*")) {
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const own = [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
    if (!own || box.width < 2 || e.closest(".aside, script")) continue;
    const [a, b] = [light(style.color), light(page)].sort((a, b) => a - b);
    if ((b + 0.05) / (a + 0.05) < 4.5) faint.push(e.outerHTML.slice(0, 80));
    const over = style.display != "inline" && e.scrollWidth > e.clientWidth + 1;
    if (over || box.right > innerWidth + 1)
      cut.push(e.outerHTML.slice(0, 80));
  }
  const bars = [...document.querySelectorAll("details[open] .bars b")].map(b => b.getBoundingClientRect());
  const found = {page, faint, cut, wide: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
    bars: bars.length, hidden: bars.filter(b => b.width < 1 || b.height < 3).length,
    loaded: performance.getEntriesByType("resource").length};
  document.body.innerHTML = "<pre>FOUND</pre>";
  document.body.firstChild.append(encodeURIComponent(JSON.stringify(found)), "DNUOF");
});
</script>
"""


def looked_at(browser: str, html: str, tmp_path: Path, width: int, dark: bool) -> dict[str, Any]:
    """Problems of the layout in a window of ``width`` pixels."""
    unlocked = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    probed = unlocked.replace("</body>", f"{LOOK}</body>")
    (tmp_path / "proof.html").write_text(probed)
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom",
        (tmp_path / "proof.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = re.search(r"FOUND(\S+)DNUOF</pre>", done.stdout)
    assert text, f"{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(unquote(text[1]))
    return seen


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1000, 1400])
def test_it_looks_right_in_a_browser(browser: str, html: str, tmp_path: Path, width: int, dark: bool) -> None:
    # Benchmarks of other machines are folded. Open all of them.
    seen = looked_at(browser, html.replace("<details>", "<details open>"), tmp_path, width, dark)
    assert seen["width"] <= max(width, 520), "some browsers have no narrower window"
    assert seen["loaded"] == 0
    assert seen["wide"] <= 0, f"{seen['wide']} pixels beside the window"
    assert seen["cut"] == [] and seen["faint"] == []
    assert seen["bars"] > 150 and seen["hidden"] == 0
    bright = sum(map(int, re.findall(r"\d+", seen["page"])[:3]))
    assert bright < 150 if dark else bright > 600


@pytest.mark.parametrize(
    ("style", "finding"),
    [
        ("p { color: #ccc; }", "faint"),
        ("table { min-width: 3000px; }", "cut"),
        (".bars b { width: 0; min-width: 0; }", "hidden"),
    ],
)
def test_the_browser_can_find_fault(
    browser: str, html: str, tmp_path: Path, style: str, finding: str
) -> None:
    spoiled = html.replace("</style>", f"{style}</style>").replace("<details>", "<details open>")
    assert looked_at(browser, spoiled, tmp_path, 1400, dark=False)[finding]
