"""Times the public functions on problems of random sizes: ``holdfast bench --drawn``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import Progress

from holdfast import ops
from holdfast.bench.drawn_report import DrawnReport, DrawnRow
from holdfast.bench.models import distance, reason_of
from holdfast.bench.report import device_name
from holdfast.bench.step_timing import Times, host_times, step_times
from holdfast.bench.timing import free_memory
from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, StepCase

#: Most bytes of the input and the output of a problem.
GPU_BYTES, CPU_BYTES = 2**28, 2**24
#: The number of problems that are drawn for each one that is measured. Options choose among them.
POOL = 64
#: Largest distance of a result from the formula in torch, relative to its norm. It is wide: where a function
#: jumps, as in rounding, another rounding of a coordinate or quotient changes single elements.
TOLERANCE = 0.03
#: On a GPU the host time is measured where the device needs less than this, in seconds.
HOST_BOUND = 2e-4


def drawn_cases(count: int, seed: int, most_bytes: int) -> list[StepCase]:
    """At least ``POOL * count`` problems: as many of each function, from the ``drawn.py`` of its op."""
    draws: dict[str, DrawCase] = {}
    for module in ops.modules("drawn"):
        draws.update(module.DRAWS)
    rounds = -(-POOL * count // len(draws))
    return [
        draw(RandomSizes(f"{seed}/{function}/{number}", most_bytes))
        for number in range(rounds)
        for function, draw in draws.items()
    ]


def measure_drawn(
    cases: list[StepCase],
    device: torch.device,
    console: Console,
    save: Callable[[DrawnReport], None],
    *,
    seed: int,
    seconds: float,
) -> DrawnReport:
    """Measure ``cases``, at least one. After ``seconds`` none is started; 0 is no limit.

    Calls ``save`` after each one, so that an interrupted run keeps its results.
    """
    threads = None if device.type == "cuda" else torch.get_num_threads()
    report = DrawnReport(device_name(device), threads, seed, len(cases))
    start = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            if seconds and report.rows and time.monotonic() - start >= seconds:
                break
            progress.update(task, description=case.name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report.rows.append(_row(case, device))
            report.seconds = round(time.monotonic() - start, 1)
            save(report)
            free_memory(device)
            progress.advance(task)
    return report


def _row(case: StepCase, device: torch.device) -> DrawnRow:
    row = DrawnRow(case.op, case.name)
    try:
        steps = case.steps(device)
        difference = distance(steps[OURS], steps[COMPILED])
        if not difference <= TOLERANCE:
            raise ArithmeticError(f"the result differs from torch's by {difference:.2g} of its norm")
    except Exception as error:  # any failure is said in its row, and the other rows are still measured
        row.failed = reason_of(error)
        return row
    try:
        steps[EAGER].backward(steps[EAGER].forward())
    except Exception as error:  # torch may lack the case; the row says so
        row.no_peer = reason_of(error)
        return row
    timed = {name: steps[name] for name in (OURS, EAGER)}
    times = step_times(timed, device)
    row.seconds["forward"] = {name: taken.forward.median for name, taken in times.items()}
    if steps[OURS].leaves:
        row.seconds["backward"] = {name: taken.backward.median for name, taken in times.items()}
    if device.type == "cuda" and _host_bound(times):
        row.seconds["host"] = {name: taken.median for name, taken in host_times(timed, device).items()}
    return row


def _host_bound(times: dict[str, Times]) -> bool:
    return max(taken.step.median for taken in times.values()) < HOST_BOUND
