"""Imports go one way, and importing holdfast imports no compiler."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PACKAGE = Path(holdfast.__file__).parent

#: What each layer may import, besides itself. "holdfast" is the package's own __init__.
BELOW = {
    "core": set(),
    "backends": {"core"},
    "numerics": {"core", "backends"},
    "ops": {"core", "backends", "numerics"},
    "nn": {"core", "ops"},
    "proof": {"core", "backends", "numerics", "ops", "holdfast"},
    "bench": {"core", "backends", "numerics", "ops", "holdfast"},
    "testing": {"core"},
    "cli": {"core", "backends", "numerics", "ops", "proof", "bench", "holdfast"},
    "__main__": {"cli"},
    "holdfast": {"core", "backends", "ops", "nn", "testing"},
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "holdfast" if parts == ("__init__",) else parts[0]


def imported_modules(source: str) -> set[str]:
    """The modules of holdfast that ``source`` imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            if node.module == "holdfast":
                found |= {f"holdfast.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "holdfast"}


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


#: The ops that an op is made of. All others know only themselves and what every affine op shares.
MADE_OF = {
    "affine": set(),
    "tree_sum": set(),
    "segment_sum": {"affine"},
    "dynamic_quantize": {"affine", "choose_scale", "quantize"},
    "fake_quantize": {"affine", "quantize", "dequantize"},
    "fake_quantize_learned": {"affine", "fake_quantize", "tree_sum"},
    "lsq_init": {"affine", "choose_scale", "fake_quantize", "tree_sum"},
    "embedding": {"affine", "segment_sum"},
    "embedding_bag": {"affine", "segment_sum", "embedding"},
    "grid_sample": {"affine", "segment_sum"},
    "affine_grid": {"affine", "segment_sum", "tree_sum", "grid_sample"},
}


def test_ops_import_only_what_they_are_made_of() -> None:
    for path in sorted((PACKAGE / "ops").rglob("*.py")):
        own = path.relative_to(PACKAGE / "ops").parts[0]
        names = (module.split(".") for module in imported_modules(path.read_text()))
        others = {name[2] for name in names if name[1:2] == ["ops"] and len(name) > 2} - {own}
        allowed = MADE_OF.get(own, {"affine"})
        assert others <= allowed, f"{path} imports {others - allowed}"


def test_no_op_is_made_of_itself() -> None:
    assert list(graphlib.TopologicalSorter(MADE_OF).static_order())
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({**MADE_OF, "affine": {"embedding"}}).static_order())


def heavy_after(statement: str) -> set[str]:
    """Which compilers a fresh process has loaded after ``statement``."""
    program = f"import sys\n{statement}\nprint(*({{'numba', 'triton', 'llvmlite'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_loads_no_compiler() -> None:
    before = heavy_after("import torch")
    assert heavy_after("import holdfast") - before == set()


def test_the_import_test_can_fail() -> None:
    assert "numba" in heavy_after("import holdfast; import numba")


def test_bench_and_command_line_load_no_compiler() -> None:
    before = heavy_after("import torch")
    assert heavy_after("import holdfast.cli, holdfast.bench.command") - before == set()
