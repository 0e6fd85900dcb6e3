"""Compiles the Triton kernels of plans for an NVIDIA GPU of compute capability 9.0, on a machine without one.

    python compile_for_sm90.py PLAN...

Prints one line of JSON: the kernels that were compiled and the functions given to them, each in the first
variant that a case uses, and the errors of those that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

import holdfast as hf
from holdfast.backends import gpu, steps
from holdfast.ops.embedding_bag import gpu_max
from holdfast.ops.grid_sample import (
    gpu_dinput_by_cell,
    gpu_dinput_by_image,
    gpu_dinput_by_plane,
    gpu_dinput_by_slot,
)
from holdfast.ops.segment_sum import cases as sum_cases
from holdfast.ops.segment_sum import gpu_few_terms
from holdfast.proof.conformance import cases_of

DEVICE = torch.device("cuda", 0)
#: Implementations, and the tuning that makes small cases use kernels for large problems.
LARGE = (
    (gpu_dinput_by_cell.TUNING, {"least_elements": 1}),
    (gpu_dinput_by_image.TUNING, {"least_images": 5}),
    (gpu_dinput_by_plane.TUNING, {"most_elements": 100}),
    (gpu_dinput_by_slot.TUNING, {"least_elements": 1}),
    (gpu_few_terms.TUNING, {"most_terms": 50}),
    (gpu_max.TUNING, {"most_bags": 12, "many_programs": 16}),
)


class NoGpu(DriverBase):  # type: ignore[misc]
    """A driver that knows its target and can launch nothing."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"

    def get_benchmarker(self) -> Any:
        return None


def name_of(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def functions_in(options: dict[str, Any]) -> tuple[str, ...]:
    """The Triton functions that a launch gives to its kernel."""
    return tuple(name_of(value) for value in options.values() if isinstance(value, JITFunction))


@contextmanager
def compiled(found: dict[str, str]) -> Iterator[None]:
    """Compile what would be launched, once for each kernel and each function given to it. Keep the errors.

    Kernels for vectors of several elements are compiled besides those for single elements.
    """
    prepare, add = steps.prepare, steps.Steps.add
    known: dict[str, set[str]] = {}

    def add_new(self: steps.Steps, kernel: Any, *given: Any, **options: Any) -> None:
        functions = {*functions_in(options), *(["vectors"] if options.get("STEP", 1) > 1 else [])}
        if name_of(kernel) not in known or functions - known[name_of(kernel)]:
            known.setdefault(name_of(kernel), set()).update(functions)
            add(self, kernel, *given, **options)

    def compile_only(kernel: Any, given: Any, *, grid: Any, num_warps: int, **options: Any) -> Any:
        chosen = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": options.get("registers")}
        scalars = (gpu._WIDE,) * len(given.each_run)
        failure = ""
        try:
            kernel.warmup(*given.tensors, *scalars, *given.compiled, **given.constants, grid=(1,), **chosen)
        except Exception as error:  # any failure of the compiler is a finding
            failure = f"{type(error).__name__}: {error}"
        for name in (name_of(kernel), *functions_in(given.constants)):
            found[name] = found.get(name) or failure
        if given.constants.get("STEP", 1) > 1:
            found[f"{name_of(kernel)}, vectors"] = failure
        return gpu.Launcher(lambda *given: None)

    steps.prepare, steps.Steps.add = compile_only, add_new  # type: ignore[method-assign]
    try:
        yield
    finally:
        steps.prepare, steps.Steps.add = prepare, add  # type: ignore[method-assign]


def _unpinned(full: Any, *given: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """torch.full without pinned memory, which needs a GPU."""
    return full(*given, **options)  # type: ignore[no-any-return]


def _where_it_is(tensor: torch.Tensor, to: Any, *given: Any, **options: Any) -> torch.Tensor:
    """Tensor.to, but a tensor for the GPU stays where it is."""
    return tensor if given[:1] == (DEVICE,) else to(tensor, *given, **options)  # type: ignore[no-any-return]


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(NoGpu())
    torch.full = partial(_unpinned, torch.full)
    torch.Tensor.to = partialmethod(_where_it_is, torch.Tensor.to)
    found: dict[str, str] = {}
    with compiled(found), ExitStack() as stack:
        for tuning, changes in LARGE:
            stack.enter_context(tuning.replaced(**changes))
        for name in names:
            plan = hf.plans.all()[name]
            cases = cases_of(plan)
            if plan is hf.plans.SegmentSumPlan:
                cases.append(sum_cases.case(plan, sum_cases.Problem("sorted by torch", (2**21 + 1,), 1, 1)))
            for desc in {case.descriptor: None for case in cases if not case.descriptor.empty}:
                for implementation in plan.implementations("gpu"):
                    kernel = plan._make_kernel(implementation, desc, DEVICE)
                    kernel.prepare(plan.Args.described(desc))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
