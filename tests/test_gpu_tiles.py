"""Runs every Triton kernel in the interpreter with the tile shapes of a GPU, on a few small problems.

The other tests run the interpreter with its own tuning records, which have larger tiles.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.backends import steps
from holdfast.backends.gpu_tiles import common_step
from holdfast.backends.tuning import Tuned, tuned_as_on_gpu
from holdfast.core.case import Case, operands_of
from holdfast.core.plan import AnyPlan
from holdfast.ops.embedding_bag import gpu_max
from holdfast.ops.grid_sample import (
    gpu_dinput_by_cell,
    gpu_dinput_by_image,
    gpu_dinput_by_plane,
    gpu_dinput_by_slot,
)
from holdfast.ops.segment_sum import cases as sum_cases
from holdfast.ops.segment_sum import gpu_few_terms, gpu_merge_sort
from holdfast.proof.conformance import cases_of, check, copy_args, gpu_way, run_reference, select_on

PACKAGE = Path(hf.__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Maximum number of elements, over all operands, of the case of moderate size.
ELEMENTS = 1500


def problems(plan: AnyPlan) -> list[Case]:
    """The non-empty cases of a plan, smallest first, and extra problems for kernels that no case reaches."""
    by_size = sorted(filter(size, cases_of(plan)), key=size)
    if plan is hf.plans.SegmentSumPlan:
        for count in (2**13 + 1, 2**17 + 1):  # more than are merged, and than are sorted by digits
            by_size.append(sum_cases.case(plan, sum_cases.Problem(f"{count} terms", (count,), 1, 1)))
    return by_size


@cache
def size(case: Case) -> int:
    """The number of elements of all tensors, or 0 if a tensor is empty."""
    tensors = [one for one in operands_of(case.make()).values() if isinstance(one, torch.Tensor)]
    return sum(one.numel() for one in tensors) if all(one.numel() for one in tensors) else 0


@contextmanager
def gpu_tiles() -> Iterator[None]:
    """The tuning records of GPUs, with kernels for large problems on small ones."""
    with (
        tuned_as_on_gpu(),
        gpu_dinput_by_cell.TUNING.replaced(least_elements=1),
        gpu_dinput_by_image.TUNING.replaced(least_images=5),
        gpu_dinput_by_plane.TUNING.replaced(most_elements=100),
        gpu_merge_sort.TUNING.replaced(max_radix=2**17),
        gpu_dinput_by_slot.TUNING.replaced(least_elements=1),
        gpu_few_terms.TUNING.replaced(most_terms=50),
        gpu_max.TUNING.replaced(most_bags=12, many_programs=16),
    ):
        yield


@contextmanager
def launches() -> Iterator[set[str]]:
    """Records the kernels that are launched, or that a prepared launch would launch, with their functions."""
    found: set[str] = set()
    prepare = steps.prepare

    def recorded(kernel: Any, given: Any, *, grid: tuple[int, int], **options: Any) -> Any:
        if min(grid) > 0:
            functions = [value for value in given.constants.values() if isinstance(value, type(kernel))]
            found.update(f"{one.fn.__module__}.{one.fn.__name__}" for one in (kernel, *functions))
        return prepare(kernel, given, grid=grid, **options)

    steps.prepare = recorded
    try:
        yield found
    finally:
        steps.prepare = prepare


def prepared(plan: AnyPlan, case: Case) -> set[str]:
    """The kernels that a case launches with GPU tuning."""
    preference = hf.PlanPreference(backend="gpu", precompile=False)
    args = copy_args(case.make(), DEVICE)
    with gpu_tiles(), launches() as found:
        plan.select(hf.Stream.current(DEVICE), case.descriptor, preference).kernel.prepare(args)
    return found


@cache
def chosen(plan: AnyPlan) -> tuple[tuple[Case, ...], frozenset[str]]:
    """The smallest cases that launch every kernel of the plan, and one case of moderate size."""
    cases, kernels = [], set[str]()
    for case in problems(plan):
        new = prepared(plan, case) - kernels
        if new:
            cases.append(case)
            kernels |= new
    cases += [case for case in problems(plan) if size(case) <= ELEMENTS][-1:]
    return tuple(cases), frozenset(kernels)


@pytest.mark.parametrize("plan", hf.plans.all().values(), ids=hf.plans.all())
def test_the_tiles_of_a_gpu_change_no_bit(plan: AnyPlan) -> None:
    way = gpu_way()
    assert way is not None
    cases, kernels = chosen(plan)
    with gpu_tiles(), launches() as launched:
        for case in cases:
            assert check(plan, case, way, *run_reference(plan, case), select_on("gpu")) == []
    assert launched == kernels


@pytest.mark.parametrize("plan", hf.plans.all().values(), ids=hf.plans.all())
def test_select_compiles_every_case_without_data(plan: AnyPlan) -> None:
    """A GPU's kernels are compiled by select, from the descriptor alone."""
    descriptors = {case.descriptor: None for case in cases_of(plan) if not case.common}
    assert descriptors
    for descriptor in descriptors:
        if not descriptor.empty:
            preference = hf.PlanPreference(backend="gpu", precompile=False)
            plan.select(hf.Stream.current(DEVICE), descriptor, preference).kernel.compile()


def is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        "triton.jit" in ast.unparse(d) for d in node.decorator_list
    )


@cache
def triton_functions() -> frozenset[str]:
    """Every Triton function of the package, by module and name."""
    return frozenset(
        ".".join(("holdfast", *path.relative_to(PACKAGE).with_suffix("").parts, node.name))
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and is_kernel(node)
    )


def stored(tree: ast.AST) -> set[str]:
    """The names that are assigned to."""
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def loaded(tree: ast.AST) -> set[str]:
    """The names that are read, except arguments inside their function."""
    if isinstance(tree, ast.Name):
        return {tree.id} if isinstance(tree.ctx, ast.Load) else set()
    if isinstance(tree, ast.FunctionDef):
        arguments = {node.arg for node in ast.walk(tree.args) if isinstance(node, ast.arg)}
        inside = set[str]().union(*map(loaded, tree.body)) - arguments
        return inside.union(*map(loaded, [tree.args, *tree.decorator_list]))
    return set[str]().union(*map(loaded, ast.iter_child_nodes(tree)))


def launchable() -> set[str]:
    """Every Triton function that Python code outside of Triton functions uses, not only other kernels.

    These are launched, or given to a kernel that is launched.
    """
    used = set[str]()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("holdfast", *path.relative_to(PACKAGE).with_suffix("").parts))
        known: dict[str, str] = {}
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                known[node.name] = f"{module}.{node.name}"
        for node in tree.body:
            if not is_kernel(node):
                used |= {known[name] for name in loaded(node) - stored(node) if name in known}
    return used & triton_functions()


def test_every_kernel_is_run_with_the_tiles_of_a_gpu() -> None:
    launched = {kernel for plan in hf.plans.all().values() for kernel in chosen(plan)[1]}
    assert launched == launchable()
    assert len(launched) > 30


def test_the_interpreter_has_tiles_of_its_own() -> None:
    """Otherwise the tests above would run the same tiles as all other tests."""
    tuned = Tuned(gpu=ELEMENTS, interpreter=2 * ELEMENTS)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert (tuned.on(cpu), tuned.on(cuda)) == (2 * ELEMENTS, ELEMENTS)
    with tuned_as_on_gpu():
        assert (tuned.on(cpu), tuned.on(cuda)) == (ELEMENTS, ELEMENTS)
    assert tuned.on(cpu) == 2 * ELEMENTS


@pytest.mark.parametrize(
    "itemsize, columns, strides, step",
    [
        (4, 100, [(100, 1), (100, 1)], 4),
        (2, 204, [(204, 1), (204, 1)], 4),
        (2, 600, [(600, 1)], 8),
        (4, 602, [(602, 1), (604, 1)], 2),
        (4, 7, [(7, 1)], 1),
        (8, 100, [(400, 100, 1)], 2),
        (4, 100, [(100, 1), (102, 1)], 2),  # one operand with other rows
        (4, 100, [(0, 1)], 4),  # the same row for all
        (4, 100, [(200, 2)], 1),  # columns that are not next to each other
        (4, 64, [(64, 1), (128, 1)], 1),  # the compiler knows
    ],
)
def test_rows_are_loaded_in_vectors(
    itemsize: int, columns: int, strides: list[tuple[int, ...]], step: int
) -> None:
    assert common_step(itemsize, columns, *strides) == step


@pytest.mark.long
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler refuses, so the compiler runs too; it needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_for_sm90.py")
    done = subprocess.run(
        [sys.executable, str(program), *hf.plans.all()], capture_output=True, text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert {kernel: error for kernel, error in errors.items() if error} == {}
    assert launchable() - set(errors) == set()
    vectors = {kernel.split(".")[-1] for kernel in errors if kernel.endswith(", vectors")}
    assert vectors == {"gather, vectors", "sum_segments, vectors", "sum_short_bags, vectors"}
