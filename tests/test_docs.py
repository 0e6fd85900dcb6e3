"""Tests of the documents: their code runs, and their generated parts are up to date."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
import sys
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch

import holdfast as hf

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: Modules whose import needs a compiler or starts a program.
KERNELS = re.compile(r"\.(cpu|gpu)|\.__main__$")
#: Accepted languages of code blocks: code that runs, commands, or a formula.
LANGUAGES = {"python", "console", ""}


def fences(text: str) -> list[tuple[str, str]]:
    """The language and text of each code block, after newlines that give errors the right line number."""
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(match[2], "\n" * text.count("\n", 0, match.start(3)) + dedent(match[3])) for match in found]


def python_blocks(text: str) -> list[str]:
    return [block for language, block in fences(text) if language == "python"]


def modules() -> list[str]:
    names = [m.name for m in pkgutil.walk_packages(hf.__path__, "holdfast.")]
    return ["holdfast", *(name for name in names if not KERNELS.search(name))]


def script(name: str) -> ModuleType:
    """Import a program of docs/ as a module."""
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    return importlib.import_module(name)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if python_blocks(p.read_text())], ids=lambda p: p.name)
def test_code_of_documents_runs(path: Path) -> None:
    namespace: dict[str, object] = {}
    for block in python_blocks(path.read_text()):
        exec(compile(block, str(path), "exec"), namespace)


def test_most_documents_have_code() -> None:
    without = {path.name for path in DOCUMENTS if not python_blocks(path.read_text())}
    assert without <= {
        "api.md", "api_distributed.md", "api_export.md", "api_nn.md", "api_qat.md", "changelog.md",
        "contributing.md", "example.md", "layers.md", "results.md",
    }  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_all_code_is_in_blocks_that_run(path: Path) -> None:
    text = path.read_text()
    marks = re.findall(r"^ *```", text, re.MULTILINE)
    assert len(marks) == 2 * len(fences(text)), "a block is not closed"
    for language, block in fences(text):
        assert language in LANGUAGES, f"{path.name} has a block of {language}; accepted are {LANGUAGES}"
        assert language == "python" or not re.search(r"\bhf\.|^import |^from ", block, re.MULTILINE), block


def test_every_command_of_the_documents_exists() -> None:
    from holdfast.cli import app

    known = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    texts = [path.read_text() for path in DOCUMENTS]
    commands = [block for text in texts for language, block in fences(text) if language != "python"]
    commands += [f"\n{quoted}" for text in texts for quoted in re.findall(r"`([^`\n]+)`", text)]
    named = set(re.findall(r"^holdfast (\w+)", "\n".join(commands), re.MULTILINE))
    assert {"verify", "bench", "plans"} <= named <= known
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test"} <= set(re.findall(r"^make (\w+)", "\n".join(commands), re.MULTILINE)) <= targets


@pytest.mark.parametrize("indent", ["", "    "], ids=["plain", "in a list"])
def test_a_wrong_example_is_noticed(indent: str) -> None:
    text = f"text\n{indent}```python\n{indent}assert 1 + 1 == 3\n{indent}```\n"
    (block,) = python_blocks(text)
    with pytest.raises(AssertionError):
        exec(compile(block, "wrong.md", "exec"), {})


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.failed == 0


def test_some_docstring_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    tests = [t for name in modules() for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(tests) >= 2


def test_generated_parts_are_current() -> None:
    generate = script("generate")
    for path in DOCUMENTS:
        text = path.read_text()
        assert generate.regenerated(text) == text, f"{path.name} is stale; run: python docs/generate.py"


def test_drawings_are_current() -> None:
    wanted = script("generate").drawn()
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.name} is stale; run: python docs/generate.py"
    assert {*(DOCS / "assets").glob("*.svg")} == {path for path in wanted if path.suffix == ".svg"}


def test_a_stale_table_is_noticed() -> None:
    generate = script("generate")
    (begin, end) = ("<!-- generated: errors -->\n", "<!-- /generated -->")
    made = generate.regenerated(f"{begin}stale{end}")
    assert "hf.InvalidArgs" in made and "stale" not in made and made.startswith(begin) and made.endswith(end)


def test_every_drawing_is_shown_somewhere() -> None:
    shown = {
        name
        for path in DOCUMENTS
        for name in re.findall(r"\((?:docs/)?assets/(\w+\.svg)\)", path.read_text())
    }
    assert shown == {path.name for path in (DOCS / "assets").glob("*.svg")}


def _row(**more: Any) -> dict[str, Any]:
    peers = {"compiled": {"speedup": 2.0}, "torch op": {"reason": "none"}}
    return {"op": "quantize", "granularity": "per token", "function": False, "packed": True, "shape": [4, 8],
            "real_dtype": "bfloat16", "code_dtype": "int4", "of_copy": 0.5, "seconds": 2e-6, "peers": peers,
            **more}  # fmt: skip


def test_tables_and_charts_can_be_made_of_old_and_new_runs() -> None:
    rows = [_row(), _row(family="warp", dtypes="bfloat16", op="warp", function=True)]
    made = script("generate").measured_table(rows)
    assert "| quantize per token | bfloat16, packed int4 | 4x8 | 2 µs | 50 % | 2.00x | n/a |" in made
    assert "| hf.warp per token | bfloat16 | 4x8 | 2 µs | 50 % | 2.00x | n/a |" in made
    report = {"device": "a", "threads": None, "date": "2026-11-15", "rows": rows,
              "versions": {"torch": "2", "triton": "3", "numba": "0"}}  # fmt: skip
    speed = script("drawings.speed")
    assert {"quantize", "warp"} == speed.by_page(report).keys()
    drawn = speed.chart(report, rows)
    assert "hf.warp per token" in drawn and "a, torch 2, Triton 3, 2026-11-15" in drawn


def _step(forward: float, backward: float, peak: int) -> dict[str, Any]:
    times = {"forward": forward, "backward": backward, "host": forward}
    return {**{part: {"median": time} for part, time in times.items()},
            "memory": {"step": 9, "backward": peak, "gradients": 4}}  # fmt: skip


def _model_report() -> dict[str, Any]:
    raises, left_out = {"reason": "raises: no kernel"}, {"reason": "left out by --no-compile"}
    slow = {"holdfast": _step(2e-6, 4e-3, 8), "eager": _step(3e-6, 1.2e-3, 4),
            "deterministic": raises, "compiled": left_out}  # fmt: skip
    fast = {"holdfast": _step(2e-6, 1e-3, 4), "eager": _step(2e-6, 8e-3, 4),
            "deterministic": _step(4e-6, 9e-3, 4), "compiled": left_out}  # fmt: skip
    return {"device": "a", "threads": None, "date": "2026-11-16",
            "versions": {"torch": "2", "triton": "3", "holdfast": "1"},
            "rows": [{"name": "slow", "steps": slow}, {"name": "fast", "steps": fast}]}  # fmt: skip


def test_training_steps_of_models_in_a_table_and_a_chart() -> None:
    report = _model_report()
    made = script("model_results").table(report)
    assert "| case | forward | backward | eager | deterministic | host | memory |" in made
    assert "| slow | 2 µs | 4 ms | 1.50x / 0.30x | raises | 2 µs, 0.67x | 2.00 / 1.00 |" in made
    assert "| fast | 2 µs | 1 ms | 1.00x / 8.00x | 2.00x / 9.00x | 2 µs, 1.00x | 1.00 / 1.00 |" in made
    assert made.endswith("Not measured in this run: `compiled`.")
    drawn = script("drawings.model_steps").chart(report)
    for ratio, colour in (("0.30x", "hf-b"), ("8.00x", "hf-a")):
        assert re.search(f'<text class="{colour}"[^>]*>{ratio}<', drawn)
    assert drawn.count('class="hf-line-b"') == drawn.count('class="hf-line-a"') == 1
    assert "a, torch 2, Triton 3, 2026-11-16" in drawn


def test_the_stored_training_steps_name_machine_versions_date_and_missing_cases() -> None:
    from holdfast.bench.models import model_cases

    report = script("drawings.model_steps").stored("h200")
    text = (DOCS / "results.md").read_text().split("## Training steps of real models")[1].split("\n## ")[0]
    for fact in (report["device"], *(report["versions"][p] for p in ("torch", "triton", "holdfast"))):
        assert fact in text
    assert report["date"][:10] in text and "assets/models_h200.svg" in text
    for date in {row["date"] for row in report["rows"] if "date" in row}:
        assert f"were measured on {date[:10]}." in text
    names = [row["name"] for row in report["rows"]]
    assert {*names} <= {case.name for case in model_cases()}, "a stored row is of no case of today"
    assert f"{len(names)} of the {len(model_cases())} cases" in text
    assert all(f"| {name} |" in text for name in names)


def test_the_results_page_counts_the_cases_of_a_cpu() -> None:
    from holdfast.bench.models import model_cases

    report = script("drawings.model_steps").stored("cpu")
    cases = len(model_cases())
    coverage = script("model_results").coverage
    assert coverage(report) == f"This run has {cases} of the {cases} cases."
    most = [row for row in report["rows"] if row["op"] != "embedding"]
    lacking = cases - len(most)
    said = f"This run has {len(most)} of the {cases} cases. Not stored: {lacking} of {lacking} of embedding."
    assert coverage({**report, "rows": most}) == said


def test_no_section_about_models_without_a_stored_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = script("model_results")
    monkeypatch.setattr(script("drawings.model_steps"), "STORED", tmp_path)
    assert results.section() == "" and script("drawings.model_steps").drawings() == {}


def test_the_chart_of_the_readme_names_machine_versions_date_and_sizes() -> None:
    drawn = (DOCS / "assets" / "speed.svg").read_text()
    report = script("drawings.speed").stored("h200")
    for fact in (
        report["device"],
        report["versions"]["torch"],
        report["versions"]["triton"],
        report["date"][:10],
    ):
        assert fact in drawn
    for kind in ("fake_quantize backward", "embedding_bag backward", "grid_sample"):
        assert f">{kind}</text>" in drawn
    assert "2^28 elements" in drawn


@pytest.mark.parametrize("ste", list(hf.SteKind))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_picture_shows_what_the_kernels_give(bits: int, ste: hf.SteKind) -> None:
    plot = script("drawings.estimators")
    x, shown = plot.gradients(bits, ste.value)
    most = 2 ** (bits - 1) - 1
    desc = hf.plans.FakeQuantizeBackwardDescriptor(shape=x.shape, q_min=-most, q_max=most, ste=ste)
    stream = hf.Stream.current("cpu")
    plan = hf.plans.FakeQuantizeBackwardPlan.select(stream, desc, hf.PlanPreference(backend="reference"))
    dx = torch.empty_like(x)
    plan.run(stream, None, hf.plans.FakeQuantizeBackwardArgs(dy=torch.ones_like(x), x=x, scale=1.0, dx=dx))
    assert shown.equal(dx)
    assert ste.value in plot.ORDER and x.min() < -most and x.max() > most


def test_the_drawings_of_sums_have_the_sizes_of_the_kernels() -> None:
    from holdfast.ops.segment_sum import reference as ordered
    from holdfast.ops.tree_sum import reference as tree

    sums = script("drawings.sums")
    assert (sums.CHUNK, sums.LANES, sums.ROWS) == (ordered.CHUNK, tree.LANES, tree.ROWS)


def test_every_plan_and_every_field_is_listed() -> None:
    listed, described = (DOCS / "plan_list.md").read_text(), (DOCS / "fields.md").read_text()
    for name, plan in hf.plans.all().items():
        assert f"`{name}`" in listed and f"## {name}\n" in described
        section = described.split(f"## {name}\n")[1].split("\n## ")[0]
        for kind in (plan.Descriptor, plan.Args):
            assert all(f"| `{field}` |" in section for field in map(attrgetter("name"), fields(kind)))


def test_every_plan_is_on_the_page_of_its_op() -> None:
    pages = [path.read_text() for path in DOCUMENTS if path.name not in ("plan_list.md", "fields.md")]
    for name in hf.plans.all():
        assert any(f"| `{name}` |" in page for page in pages), f"{name} is on no page"


def test_every_error_is_explained() -> None:
    text = (DOCS / "errors.md").read_text()
    public = [kind for kind in hf.HoldfastError.__subclasses__() if kind.__name__ in hf.__all__]
    assert len(public) >= 6
    for kind in public:
        assert f"`hf.{kind.__name__}`" in text and f"\n## {kind.__name__}\n" in text


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_document_and_example_is_linked_from_the_readme_or_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for path in DOCUMENTS[1:]:
        assert f": {path.name}\n" in site, f"{path.name} is not in the navigation of mkdocs.yml"
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"(examples/{path.name})" in readme


def test_the_first_screen_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(python_blocks(text)) == 3
    order = ("hf.qat.convert", "hf.embedding", "hf.grid_sample", "Plan.select", "speed.svg", "## Install",
             "make demo", "make test", "## The ops", "A whole training run", "## More")  # fmt: skip
    places = [text.index(word) for word in order]
    assert places == sorted(places)


def test_every_public_name_has_a_docstring() -> None:
    for name in hf.__all__:
        thing = getattr(hf, name)
        if callable(thing):
            assert thing.__doc__, f"holdfast.{name} says nothing of itself"


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text() + (DOCS / "api_nn.md").read_text()
    elsewhere = {"NUMERICS_VERSION", "Granularity", "__version__", "export", "formats", "nn", "plans", "qat"}
    elsewhere |= {"distributed", "testing"}
    elsewhere.add("quantize_dynamic")  # another name of dynamic_quantize
    errors = {"HoldfastError", *(kind.__name__ for kind in hf.HoldfastError.__subclasses__())}
    listed = set(re.findall(r"^::: holdfast\.(\w+)$", reference, re.MULTILINE))
    assert listed == set(hf.__all__) - elsewhere - errors
    assert {f"nn.{name}" for name in hf.nn.__all__} == set(re.findall(r"::: holdfast\.(nn\.\w+)", reference))
    of_qat = re.findall(r"::: holdfast\.qat\.(\w+)", (DOCS / "api_qat.md").read_text())
    assert set(hf.qat.__all__) == set(of_qat)
    of_export = re.findall(r"::: holdfast\.export\.(?:\w+\.)?(\w+)", (DOCS / "api_export.md").read_text())
    assert set(hf.export.__all__) == set(of_export)
    of_distributed = re.findall(
        r"::: holdfast\.distributed\.(\w+)", (DOCS / "api_distributed.md").read_text()
    )
    assert set(hf.distributed.__all__) == set(of_distributed)


@pytest.mark.parametrize("name", ["fuzz_cpu", "fuzz_h200", "h200"])
def test_the_machines_that_were_run_are_named(name: str) -> None:
    machine = json.loads((ROOT / "benchmarks" / "verify" / f"{name}.json").read_text())["machine"]
    torch_version = machine["versions"]["torch"].partition("+")[0]
    cpu = "AMD EPYC" if "AMD" in machine["cpu"] else "Intel Xeon"
    for document in ("README.md", "docs/index.md"):
        text = " ".join((ROOT / document).read_text().split())
        assert f"{cpu} with torch {torch_version}" in text
        if machine["gpu"]:
            gpu = f"{machine['gpu']} with torch {torch_version} and Triton {machine['versions']['triton']}"
            assert gpu in text
        else:
            assert f"Triton {machine['versions']['triton']}" in text


def test_the_speed_of_training_is_the_stored_one() -> None:
    """The table of the page has the times of the stored run, in its order."""
    stored = json.loads((ROOT / "benchmarks" / "qat" / "h200.json").read_text())["milliseconds"]
    page = (ROOT / "docs" / "qat.md").read_text()
    rows = re.findall(r"\| ([\d.]+) ms(?: \(([\d.]+).\))? \| ([\d.]+) ms(?: \(([\d.]+).\))? \|", page)
    base, expected = stored["no QAT"], []
    for times in stored.values():
        cells = [(f"{times[k]:.2f}", f"{times[k] / base[k]:.2f}") for k in ("step", "update")]
        expected.append(tuple(cell for pair in cells for cell in (pair[0], "" if times is base else pair[1])))
    assert rows == expected
