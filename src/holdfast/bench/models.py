"""Times the public functions on the shapes of real models: ``holdfast bench --models``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from holdfast import ops
from holdfast.bench.model_report import ModelReport, ModelRow
from holdfast.bench.report import device_name
from holdfast.bench.step_timing import host_times, peak_memory, step_times
from holdfast.bench.timing import free_memory
from holdfast.core.training_step import (
    COMPILED,
    DETERMINISTIC,
    EAGER,
    OURS,
    DeterministicStep,
    ModelCase,
    Step,
)

#: Elements of the largest tensor of the small version of a case, which measures host time.
SMALL = 2**12
#: Elements of the largest tensor on a CPU, and in a quick run.
CPU_ELEMENTS, QUICK_ELEMENTS = 2**20, 2**16
#: Largest distance of a result from the formula in torch, relative to its norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}


def model_cases() -> list[ModelCase]:
    """The cases of every op, from its ``models.py``."""
    return [case for module in ops.modules("models") for case in module.model_cases()]


def measure_models(
    cases: list[ModelCase],
    device: torch.device,
    console: Console,
    save: Callable[[ModelReport], None],
    *,
    elements: int = 0,
    compiling: bool = True,
) -> ModelReport:
    """Measure ``cases``. Calls ``save`` after each one, so that an interrupted run keeps its results."""
    report = ModelReport(device_name(device), None if device.type == "cuda" else torch.get_num_threads())
    shared: object = None
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            if shared != (case.op, case.real):  # torch compiles a function again only so many times
                shared = case.op, case.real
                torch.compiler.reset()
            sized = case.at(elements) if elements else case
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report.rows.append(_row(sized, device, compiling))
            save(report)
            free_memory(device)
            progress.advance(task)
    return report


def _row(case: ModelCase, device: torch.device, compiling: bool) -> ModelRow:
    row = ModelRow(case, case.at(SMALL).label)
    try:
        _measure_small(case.at(SMALL), row, device)
        free_memory(device)
        steps = case.steps(device)
    except Exception as error:  # any failure is said in its row, and the other rows are still measured
        row.reasons[OURS] = reason_of(error)
        return row
    peers = _peers(case, steps, compiling)
    working: dict[str, Step] = {}
    for name, step in peers.items():
        try:
            step.backward(step.forward())
            if device.type == "cuda":
                row.memory[name] = peak_memory(step)
            working[name] = step
        except Exception as error:  # a peer may refuse or lack memory; the row says so
            row.reasons[name] = reason_of(error)
            free_memory(device)
    if not compiling:
        row.reasons[COMPILED] = "left out by --no-compile"
    row.times = step_times(working, device)
    return row


def _measure_small(small: ModelCase, row: ModelRow, device: torch.device) -> None:
    """Compare the function with the formula, and measure the host time."""
    steps = small.steps(device)
    difference = distance(steps[OURS], steps[COMPILED])
    if not difference <= TOLERANCE[small.real]:
        raise ArithmeticError(
            f"the result differs from torch's by {difference:.2g} of its norm on {small.label}"
        )
    timed = {OURS: steps[OURS]}
    try:
        steps[EAGER].backward(steps[EAGER].forward())
        timed[EAGER] = steps[EAGER]
    except Exception as error:  # torch may lack the case; the row says so
        row.reasons[EAGER] = reason_of(error)
    row.host = host_times(timed, device)


def distance(ours: Step, formula: Step) -> float:
    """The largest distance from the formula in float32, of output and gradients, relative to the norm."""
    formula = Step(formula.function, tuple(map(_widened, formula.inputs)), _widened(formula.dout))
    made, right = ours.forward(), formula.forward()
    found, wanted = (made.detach(), *ours.backward(made)), (right.detach(), *formula.backward(right))
    return max(
        float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        for one, other in zip(found, wanted, strict=True)
    )


def _widened(value: Any) -> Any:
    """A floating tensor in float32, and any other value as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().float().requires_grad_(value.requires_grad)


def _peers(case: ModelCase, steps: dict[str, Step], compiling: bool) -> dict[str, Step]:
    """The steps to time: those of the case, with the formula compiled, and torch's deterministic mode."""
    made = dict(steps)
    eager = made[EAGER]
    made[DETERMINISTIC] = DeterministicStep(eager.function, eager.inputs, eager.dout)
    formula = made.pop(COMPILED)
    if compiling:
        made[COMPILED] = replace(
            formula, function=torch.compile(formula.function, dynamic=case.dynamic_shapes)
        )
    return made


def reason_of(error: Exception) -> str:
    """Why a step has no time, in one line."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error):
        return "out of memory"
    first = str(error).strip().partition("\n")[0]
    if "does not have a deterministic implementation" in first:
        return f"raises: {first.partition(', but')[0]}"
    return f"{type(error).__name__}: {first}".rstrip(".")
