"""Imports go one way, and importing holdfast imports no compiler."""

from __future__ import annotations

import graphlib
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import fresh
import holdfast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from drawings.imports import Graph, imported_modules, levels, op_graph, package_graph, reduced  # noqa: E402

PACKAGE = Path(holdfast.__file__).parent

#: The layers that each layer may import besides itself. "holdfast" is the package's __init__.
BELOW = {
    "core": set(),
    "backends": {"core"},
    "numerics": {"core", "backends"},
    "ops": {"core", "backends", "numerics"},
    "nn": {"core", "ops"},
    "distributed": {"core", "ops", "nn"},
    "qat": {"core", "ops", "nn"},
    "export": {"core", "ops", "nn", "qat"},
    "proof": {"core", "backends", "numerics", "ops", "nn", "install", "holdfast"},
    "bench": {"core", "backends", "numerics", "ops", "holdfast"},
    "demo": {"core", "proof", "holdfast"},
    "install": {"core", "ops"},
    "testing": {"core"},
    "plans": {"core", "ops"},
    "cli": {"core", "backends", "numerics", "ops", "proof", "bench", "demo", "holdfast"},
    "__main__": {"cli"},
    "holdfast": {
        "core",
        "backends",
        "ops",
        "plans",
        "nn",
        "distributed",
        "qat",
        "export",
        "install",
        "testing",
    },
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "holdfast" if parts == ("__init__",) else parts[0]


def imported_layers(source: str) -> set[str]:
    names = (module.split(".")[1:] for module in imported_modules(source))
    return {name[0] if name and name[0] in BELOW else "holdfast" for name in names}


def wrong_imports(layer: str, source: str) -> set[str]:
    return imported_layers(source) - BELOW[layer] - {layer}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    assert wrong_imports(layer_of(path), path.read_text()) == set()


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "from holdfast.backends.cpu import jit"),
        ("core", "def late():\n    import holdfast"),
        ("numerics", "from holdfast.ops.affine import plan"),
        ("backends", "from holdfast import numerics"),
        ("ops", "import holdfast as hf"),
        ("bench", "from holdfast.proof.digests import pinned"),
        ("holdfast", "from holdfast.cli import main"),
    ],
)
def test_a_wrong_import_is_noticed(layer: str, source: str) -> None:
    assert wrong_imports(layer, source)


def test_the_import_graph_of_the_package_is_one_way() -> None:
    graph = package_graph(PACKAGE)
    assert (
        BELOW.keys() >= graph.keys() >= {"cli", "proof", "bench", "holdfast", "nn", "testing", "ops", "core"}
    )
    rows = levels(graph)
    row = {part: number for number, parts in enumerate(rows) for part in parts}
    assert all(row[part] < row[other] for part, others in graph.items() for other in others)
    way = ("cli", "proof", "nn", "ops", "numerics", "backends", "core")
    assert [row[part] for part in way] == sorted({row[part] for part in way})


def test_the_import_graph_of_the_ops_is_one_way() -> None:
    graph = op_graph(PACKAGE)
    assert sorted(node for nodes in levels(graph) for node in nodes) == sorted(graph)
    assert "segment_sum" in graph["embedding"], "the graph is read from the sources"


@pytest.mark.parametrize("read", [package_graph, op_graph])
def test_a_cycle_is_noticed(read: Callable[[Path], Graph]) -> None:
    graph = read(PACKAGE)
    bottom, top = levels(graph)[-1][0], levels(graph)[0][0]
    with pytest.raises(graphlib.CycleError):
        levels({**graph, bottom: {top}, top: {bottom}})


def test_a_drawing_leaves_out_what_longer_ways_imply() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert levels(graph) == [["a"], ["b"], ["c"]]


def test_a_new_part_is_in_the_graph(tmp_path: Path) -> None:
    for name, source in (
        ("__init__.py", "from holdfast import one"),
        ("one.py", "from holdfast.two.part import x"),
        ("two/__init__.py", ""),
        ("two/part.py", "import torch"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert package_graph(tmp_path) == {"holdfast": {"one"}, "one": {"two"}, "two": set()}


#: Compilers, packages that only some exports need, and one that torch imports for symbolic shapes.
HEAVY = (
    "numba", "triton", "llvmlite", "onnx", "onnxscript", "onnxruntime", "ml_dtypes", "safetensors", "torchao",
    "compressed_tensors", "transformers", "sklearn", "sympy",
)  # fmt: skip


@cache
def heavy_after(statement: str) -> set[str]:
    """The packages of ``HEAVY`` that a fresh process, with torch, has imported after ``statement``."""
    program = f"import sys\n{statement}\nprint(*({{*{HEAVY}}} & sys.modules.keys()))"
    return set(fresh.run(program, check=True).stdout.split())


def test_import_loads_no_compiler_and_no_optional_package() -> None:
    before = heavy_after("import torch")
    assert heavy_after("import holdfast") - before == set()


def test_a_program_that_hangs_is_ended() -> None:
    assert fresh.run("while True: pass", timeout=1).returncode == -signal.SIGALRM


def test_the_import_test_can_fail() -> None:
    assert {"numba", "torchao"} <= heavy_after("import holdfast, numba; holdfast.export.TorchaoConfig")


def test_bench_and_command_line_load_no_compiler() -> None:
    before = heavy_after("import torch")
    assert heavy_after("import holdfast.cli, holdfast.bench.command") - before == set()
