"""The documents do what they say: their code runs, and their generated parts are up to date."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import holdfast

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Importing these needs a compiler, or starts a program.
KERNELS = re.compile(r"\.(cpu|gpu|__main__)$")


def python_blocks(text: str) -> list[str]:
    """The ```python blocks of a document, each moved down to its own line, so that errors name it."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def modules() -> list[str]:
    names = [m.name for m in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]
    return ["holdfast", *(name for name in names if not KERNELS.search(name))]


def script(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_of_documents_runs(path: Path) -> None:
    blocks = python_blocks(path.read_text())
    assert blocks, f"{path.name} has no python block to run"
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), namespace)


def test_a_wrong_example_is_noticed() -> None:
    (block,) = python_blocks("text\n```python\nassert 1 + 1 == 3\n```\n")
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


def test_generated_parts_of_the_readme_are_current() -> None:
    text = (ROOT / "README.md").read_text()
    assert script("generate").regenerated(text) == text, "run: python docs/generate.py"


def test_tables_can_be_made_of_old_and_new_runs() -> None:
    old = {"op": "quantize", "granularity": "per token", "function": False, "packed": True,
           "real_dtype": "bfloat16", "code_dtype": "int4", "of_copy": 0.5, "peers": {}}  # fmt: skip
    peers = {"compiled": {"speedup": 2.0}, "torch op": {"reason": "none"}}
    rows = [
        {**old, "peers": peers},
        {**old, "peers": peers, "family": "embedding", "dtypes": "bfloat16", "op": "embedding"},
    ]
    report = {"device": "a", "threads": None, "date": "2026-11-15", "copy_bytes_per_second": 1e9,
              "rows": rows, "versions": {"torch": "2", "triton": "3", "numba": "0"},
              "host_microseconds": {}}  # fmt: skip
    made = script("generate")._machine(report)
    assert "| | bfloat16, packed int4 |" in made and "| | bfloat16 |" in made
    assert "| quantize per token | 50 %, 2.00x, n/a |" in made
    assert "| embedding per token | 50 %, 2.00x, n/a |" in made


def test_the_picture_of_the_estimators_is_current() -> None:
    plot = script("plot_estimators")
    assert plot.drawing() == plot.PICTURE.read_text(), "run: python docs/plot_estimators.py"


@pytest.mark.parametrize("ste", list(holdfast.SteKind))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_picture_shows_what_the_kernels_give(bits: int, ste: holdfast.SteKind) -> None:
    plot = script("plot_estimators")
    x, shown = plot.gradients(bits, ste.value)
    most = 2 ** (bits - 1) - 1
    desc = holdfast.plans.FakeQuantizeBackwardDescriptor(shape=x.shape, q_min=-most, q_max=most, ste=ste)
    stream = holdfast.Stream.current("cpu")
    plan = holdfast.plans.FakeQuantizeBackwardPlan.select(
        stream, desc, holdfast.PlanPreference(backend="reference")
    )
    dx = torch.empty_like(x)
    plan.run(
        stream, None, holdfast.plans.FakeQuantizeBackwardArgs(dy=torch.ones_like(x), x=x, scale=1.0, dx=dx)
    )
    assert shown.equal(dx)
    assert ste.value in plot.ORDER and x.min() < -most and x.max() > most


def test_the_table_names_every_plan() -> None:
    table = script("generate").plan_table()
    for name in holdfast.plans.all():
        assert f"`{name}`" in table


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_public_name_has_a_docstring() -> None:
    for name in holdfast.__all__:
        thing = getattr(holdfast, name)
        if callable(thing):
            assert thing.__doc__, f"holdfast.{name} says nothing of itself"
