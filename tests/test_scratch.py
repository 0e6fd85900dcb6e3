"""Tests of the scratch memory of CPU kernels: it belongs to a thread, and no buffer is overrun."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.backends import scratch
from holdfast.backends.scratch import GAP, Runs, Scratch, guarded, overruns
from holdfast.core.bits import mismatch
from holdfast.core.case import operands_of
from holdfast.core.workspace_layout import WorkspaceLayout, first_address, workspace_overruns
from holdfast.ops.scatter import cpu as scatter
from holdfast.ops.tree_sum import cpu as trees
from holdfast.proof.conformance import Way, cases_of, check, gpu_way, run_reference, select_on

PACKAGE = Path(hf.__file__).parent

#: Functions that allocate an array, which Numba frees after the last use of its name.
ALLOCATING = {"empty", "zeros", "ones", "full", "arange", "array", "empty_like", "zeros_like", "ones_like"}
#: Decorators of compiled functions.
COMPILING = {"jit", "kernel", "njit", "overload"}


def compiled_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            if any(isinstance(d, ast.Name) and d.id in COMPILING for d in decorators):
                yield node


def memory_taken(source: str) -> list[str]:
    """Every place where compiled code takes the address of an array or allocates an array."""
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


#: Settings of malloc: overwrite freed memory, return large blocks to the system, one arena for all threads.
UNKIND = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_PERTURB_": "165"}

PROGRAM = """
import sys
import holdfast as hf
from holdfast.proof.conformance import Way, cases_of, check, run_reference, select_on

for name in sys.argv[1:]:
    plan = hf.plans.all()[name]
    for case in cases_of(plan):
        args = run_reference(plan, case)
        for difference in check(plan, case, Way("cpu", threads=2), *args, select_on("cpu")):
            sys.exit(str(difference))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of glibc")
def test_results_hold_where_freed_memory_does_not() -> None:
    names = ["ChooseScalePlan", "DynamicQuantizePlan", "EmbeddingBagBackwardPlan", "LsqInitPlan"]
    environment = {**os.environ, **UNKIND}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def violations_of(plan_name: str, case_name: str) -> tuple[list[str], list[str]]:
    """The guard violations of a case on the CPU, and the operands that differ from the reference."""
    plan = hf.plans.all()[plan_name]
    (case,) = (case for case in cases_of(plan) if case.name == case_name)
    args, reference = run_reference(plan, case)
    stream = hf.Stream.current("cpu")
    made = select_on("cpu")(plan, case, stream)
    with guarded() as guards:
        made.run(stream, hf.Workspace.allocate(made.workspace_size(), "cpu"), args)
    different = [
        name
        for name, value in operands_of(reference).items()
        if isinstance(value, torch.Tensor) and mismatch(name, value, operands_of(args)[name])
    ]
    return guards.violations(), different


def test_no_run_of_scratch_is_overrun() -> None:
    assert violations_of("LsqInitPlan", "per_token of 130x33, float64") == ([], [])
    assert violations_of("LsqInitPlan", "per_channel:1 of 4099x40, float32") == ([], [])


def test_lanes_that_outgrow_their_run_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lanes_of patched to 1, a job has more segments than its lanes have room for."""
    monkeypatch.setattr(trees, "lanes_of", lambda length: 1)
    trees.jobs_of.cache_clear()
    try:
        seen, different = violations_of("LsqInitPlan", "per_token of 130x33, float64")
    finally:
        trees.jobs_of.cache_clear()
    assert different == ["scale"]
    assert seen == ["tree_sum: scratch run 4 of 31, which has 32768 bytes, was overrun by at least 192"]


def test_an_overrun_is_seen_where_the_result_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are declared with half of their size but lie as far apart as before: results are right."""
    halves = [replace(runs, spill=-runs.size // 2) for runs in trees.scratch_for(2).runs]
    monkeypatch.setattr(trees, "scratch_for", lambda operands: Scratch("halved", *halves))
    seen, different = violations_of("LsqInitPlan", "per_token of 130x33, float64")
    assert different == []
    assert any("halved: scratch run 4 of 31, which has 16384 bytes, was overrun by" in one for one in seen)


def test_the_end_of_scratch_is_guarded() -> None:
    kept = Scratch("three", Runs(2, 100), Runs(1, 50, spill=3))
    memory = torch.full((kept.size + 4096,), 0xFF, dtype=torch.uint8)
    end = 2 * (100 + GAP)
    for place in (0, 99, 100 + GAP, end + 52):
        memory[place] = 0
    assert overruns(kept, memory) == []
    memory[100 + GAP + 100] = memory[end + 53] = memory[end + 50 + GAP + 7] = 0
    assert overruns(kept, memory) == [
        "three: scratch run 1 of 3, which has 100 bytes, was overrun by 1",
        "three: scratch run 2 of 3, which has 53 bytes, was overrun by 1",
        "three: the end of the scratch was overrun by 8",
    ]


@pytest.mark.parametrize("shift", [0, 1, 255])
def test_writes_beside_the_pieces_of_a_workspace_are_seen(shift: int) -> None:
    layout = WorkspaceLayout()
    regions = [layout.take(64, torch.float32), layout.take(0, torch.float32), layout.take(3, torch.int32)]
    assert layout.ranges == [(0, 256), (512, 512), (768, 780)]
    workspace = hf.Workspace(torch.full((layout.size + shift + 300,), 0xA5, dtype=torch.uint8)[shift:])
    for region in regions:
        region.tensor(workspace).zero_()
    assert workspace_overruns([layout], workspace, 0xA5) == []
    assert workspace.buffer is not None
    first = first_address(workspace) - workspace.buffer.data_ptr()
    for place in (256, 257, 512, 780, 1030):
        workspace.buffer[first + place] = 0
    assert workspace_overruns([layout], workspace, 0xA5) == [
        f"piece {piece} of the workspace was overrun: {written} bytes were written, the last {past} past its "
        "end"
        for piece, written, past in (("0 to 256", 2, 2), ("512 to 512", 1, 1), ("768 to 780", 2, 251))
    ]


def test_pieces_that_are_taken_again_have_gaps_too() -> None:
    layout = WorkspaceLayout()
    layout.take_rows(2, 300)
    layout.take_again(1)
    assert layout.ranges == [(0, 300), (768, 1068), (1536, 1836), (2304, 2604)]
    assert layout.size == 3072


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_every_workspace_is_cut_into_pieces(backend: str) -> None:
    for plan in hf.plans.all().values():
        for case in cases_of(plan):
            kernel = plan._kernel(backend, case.descriptor, torch.device("cpu"))
            assert kernel.workspace_size == max(
                (layout.size for layout in kernel.workspace_layouts), default=0
            )


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_run_that_overruns_a_piece_fails_its_case(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are declared with half of their size. The result is right, but the overrun is found."""
    plan = hf.plans.all()["SegmentSumPlan"]
    case = cases_of(plan)[0]
    args, reference = run_reference(plan, case)
    way = gpu_way() if backend == "gpu" else Way(backend, times=1)
    assert way is not None
    assert check(plan, case, way, args, reference, select_on(backend)) == []
    halved = property(lambda layout: [(begin, (begin + end) // 2) for begin, end in layout._ranges])
    monkeypatch.setattr(WorkspaceLayout, "ranges", halved)
    (difference,) = check(plan, case, way, args, reference, select_on(backend))
    assert "was overrun" in difference.detail


@pytest.mark.parametrize("count", [200, 2**19])
def test_a_call_during_a_run_has_a_workspace_of_its_own(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal may call the library at any time, also between two kernels of a run."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # all kernels run in this thread
    table, rows = torch.zeros(50, 8), torch.randn(count, 8)
    index, other = (torch.randint(50, (count,), generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    expected, find = hf.index_add(table, 0, index, rows), scatter.find_rows

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(scatter, "find_rows", find)
        found = find(*given)
        hf.index_add(table, 0, other, rows)
        return found

    for _ in range(4):  # the third call with the same metadata may be a repetition
        monkeypatch.setattr(scatter, "find_rows", interrupted)
        assert torch.equal(hf.index_add(table, 0, index, rows), expected)
        assert scatter.find_rows is find


def test_a_larger_scratch_does_not_free_the_scratch_of_an_interrupted_kernel() -> None:
    address = Scratch("interrupted", Runs(1, 64)).of_thread()
    size, _ = scratch._places[threading.get_ident()]
    other = Scratch("handler", Runs(1, size + 1)).of_thread()
    assert scratch._places[threading.get_ident()] == (2 * size, other) and address != other
    assert {address, other} <= {memory.data_ptr() for memory in scratch._memory}
    assert Scratch("interrupted", Runs(1, 64)).of_thread() == other
