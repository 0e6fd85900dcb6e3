"""The scratch of CPU kernels: it belongs to the thread, and no run of it is overrun."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf

PACKAGE = Path(hf.__file__).parent

#: What makes an array, and so memory that Numba releases after the last use of its name.
ALLOCATING = {"empty", "zeros", "ones", "full", "arange", "array", "empty_like", "zeros_like", "ones_like"}
#: What makes a function part of compiled code.
COMPILING = {"jit", "kernel", "njit", "overload"}


def compiled_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            if any(isinstance(d, ast.Name) and d.id in COMPILING for d in decorators):
                yield node


def memory_taken(source: str) -> list[str]:
    """Every address of an array, and every array that compiled code allocates."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "ctypes":
            found.append(f"line {node.lineno}: the address of an array")
    for function in compiled_functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "np" and node.func.attr in ALLOCATING:
                    found.append(f"line {node.lineno}: {function.name} allocates")
    return found


def test_compiled_code_allocates_nothing() -> None:
    found = {path: memory_taken(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: taken for path, taken in found.items() if taken} == {}


def test_the_check_sees_memory_that_is_taken() -> None:
    source = "@kernel\ndef f(n):\n    memory = np.empty(n, np.uint8)\n    return memory.ctypes.data\n"
    assert memory_taken(source) == ["line 4: the address of an array", "line 3: f allocates"]
    inner = "@overload(g)\ndef f(n):\n    def h(n):\n        return np.zeros(n)\n    return h\n"
    assert memory_taken(inner) == ["line 4: f allocates"]


#: Freed memory is overwritten, given back to the system if it is large, and shared between threads.
UNKIND = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_PERTURB_": "165"}

PROGRAM = """
import sys
import holdfast as hf
from holdfast.proof.conformance import Way, cases_of, check, expected, selected

for name in sys.argv[1:]:
    plan = hf.plans()[name]
    for case in cases_of(plan):
        for difference in check(plan, case, Way("cpu", threads=2), *expected(plan, case), selected("cpu")):
            sys.exit(str(difference))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of glibc")
def test_results_hold_where_freed_memory_does_not() -> None:
    names = ["ChooseScalePlan", "DynamicQuantizePlan", "EmbeddingBagBackwardPlan", "LsqInitPlan"]
    environment = {**os.environ, **UNKIND}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
