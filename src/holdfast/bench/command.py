"""The command ``holdfast bench``: times every case, its peers and a copy in one run."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from holdfast.bench.cases import cpu_cases, full_cases, host_cases, quick_cases
from holdfast.bench.check import differences
from holdfast.bench.drawn import CPU_BYTES, GPU_BYTES, drawn_cases, measure_drawn
from holdfast.bench.drawn_report import DrawnReport
from holdfast.bench.model_report import ModelReport
from holdfast.bench.models import CPU_ELEMENTS, QUICK_ELEMENTS, measure_models, model_cases
from holdfast.bench.peers import peer, peer_names
from holdfast.bench.report import Report, Row, device_name
from holdfast.bench.timing import copy_rate, free_memory, host_seconds, median_seconds
from holdfast.core.benchmark import Call, Case, NoPeer
from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import InvalidArgs
from holdfast.core.files import require_writable
from holdfast.core.stream import Stream
from holdfast.core.training_step import StepCase

#: Elements of the small tensors that measure host time.
SMALL = 2**12
#: Elements of the tensor to copy, larger than any cache.
COPY_ELEMENTS = 2**28
#: The key of the plan among the timed calls.
OURS = "ours"

_C = TypeVar("_C", bound=Case | StepCase)


def bench(
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if available.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small cases; no torch.compile on the CPU.")
    ] = False,
    elements: Annotated[
        int,
        typer.Option(
            show_default=False,
            help="Elements per tensor, a power of two; with --drawn at most. Default: large enough to "
            "saturate memory.",
        ),
    ] = 0,
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only cases that match this regex.")] = "",
    dtype: Annotated[str, typer.Option(help="Only cases of this dtype, such as float32.")] = "",
    models: Annotated[
        bool,
        typer.Option(
            "--models", help="Training steps of the public functions on the shapes of real models instead."
        ),
    ] = False,
    drawn: Annotated[
        int,
        typer.Option(
            min=0,
            max=10**5,
            metavar="N",
            show_default=False,
            help="N training steps of the public functions on random sizes, against torch eager, instead.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="With --drawn: the seed of the sizes.")] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            show_default=False,
            help="With --drawn: start no problem after this time.",
        ),
    ] = 0,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave out torch.compile.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file after each case.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(min=0, max=4096, show_default=False, help="CPU threads. Default: the setting of torch."),
    ] = 0,
) -> None:
    """Time the plans relative to torch eager, torch.compile and a memory copy."""
    if elements and (not 2**12 <= elements <= 2**40 or elements & (elements - 1)):
        raise InvalidArgs(
            f"--elements is {elements}; it must be a power of two from {2**12} to {2**40}, such as {2**24}."
        )
    if drawn and models:
        raise InvalidArgs("--drawn and --models are both given; give one of them.")
    if not drawn and (seed or seconds):
        raise InvalidArgs(f"--{'seed' if seed else 'seconds'} is given without --drawn; add --drawn 150.")
    if str(json_file) == "-":
        raise InvalidArgs("--json is -; the results are written after each case, so name a file.")
    require_writable(json_file)
    if threads:
        torch.set_num_threads(threads)
    stream = Stream.current(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = stream.device.type == "cuda"
    console = Console()

    def save(report: Report | ModelReport | DrawnReport) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")

    if drawn:
        most_bytes = 4 * elements or (GPU_BYTES if on_gpu else CPU_BYTES)
        problems = _chosen(drawn_cases(drawn, seed, most_bytes), only, dtype)[:drawn]
        ratios = measure_drawn(problems, stream.device, console, save, seed=seed, seconds=seconds)
        ratios.print(console)
        if not ratios.complete:
            raise typer.Exit(1)
        return
    if models:
        elements = elements or (QUICK_ELEMENTS if quick else 0 if on_gpu else CPU_ELEMENTS)
        compiling = not no_compile and (on_gpu or not quick)
        shapes = _chosen(model_cases(), only, dtype)
        steps = measure_models(shapes, stream.device, console, save, elements=elements, compiling=compiling)
        steps.print(console)
        if not steps.complete:
            raise typer.Exit(1)
        return
    cases = quick_cases() if quick else full_cases() if on_gpu else cpu_cases()
    cases = _chosen(cases, only, dtype)
    report = measure(cases, stream, console, save, quick=quick, elements=elements)
    report.print(console)
    if report.refused:
        raise typer.Exit(1)


def _chosen(cases: list[_C], only: str, dtype: str) -> list[_C]:
    """The cases of ``dtype`` whose name matches ``only``. Raises if there is none."""
    dtypes = sorted({dtype_name(case.real) for case in cases})
    if dtype and dtype not in dtypes:
        raise InvalidArgs(f"--dtype is {dtype!r}; the cases have {', '.join(dtypes)}.")
    cases = [case for case in cases if not dtype or dtype_name(case.real) == dtype]
    try:
        chosen = [case for case in cases if re.search(only, case.name)]
    except re.error as error:
        raise InvalidArgs(
            f"--only {only!r} is no regular expression ({error}); write a part of a case's name, such as "
            "--only grid_sample."
        ) from None
    if not chosen:
        ops = ", ".join(sorted({case.op.partition(" ")[0] for case in cases}))
        raise InvalidArgs(f"--only {only!r} matches none of the {len(cases)} cases; they are of {ops}.")
    return chosen


def measure(
    cases: list[Case],
    stream: Stream,
    console: Console,
    save: Callable[[Report], None],
    *,
    quick: bool = False,
    elements: int = 0,
) -> Report:
    """Check and time ``cases``. The copy rate is the better of two measurements, before and after the cases.

    Calls ``save`` after each case, so that an interrupted run keeps its results.
    """
    device, threads = stream.device, torch.get_num_threads()
    on_gpu = device.type == "cuda"
    copied = COPY_ELEMENTS if on_gpu else COPY_ELEMENTS // 8
    report = Report(device_name(device), None if on_gpu else threads)
    report.copy_rate = copy_rate(device, copied, threads)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("host cost", total=len(cases))
        if on_gpu:  # before anything else is compiled
            report.host_microseconds = _host_costs(stream)
        for case in cases:
            progress.update(task, description=case.name)
            size = elements or case.elements(on_gpu=on_gpu, quick=quick)
            case = case.at(size)
            wrong = differences(case, stream, _backend(case, stream))
            if wrong:
                report.refused.append(
                    f"Not timed: {case.name}. Its check is red: {wrong} elements differ from the reference."
                )
            else:
                try:
                    report.rows.append(_row(case, size, stream, threads, quick))
                except (MemoryError, RuntimeError) as error:
                    if not _out_of_memory(error):
                        raise
                    report.refused.append(
                        f"Not timed: {case.name}. There is no memory for {size} elements; ask for fewer "
                        "with --elements."
                    )
            save(report)
            free_memory(device)
            progress.advance(task)
    report.copy_rate = max(report.copy_rate, copy_rate(device, copied, threads))
    save(report)
    return report


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. For CPU memory torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)


def _backend(case: Case, stream: Stream) -> str:
    """The backend that ``select`` picks by default."""
    return case.problem(2**12, stream).plan.backend


def _row(case: Case, elements: int, stream: Stream, threads: int, quick: bool) -> Row:
    problem = case.problem(elements, stream)
    plan, tensors = problem.plan, problem.draw()
    calls: dict[str, Callable[[], object]] = {OURS: problem.call(tensors)}
    reasons: dict[str, str] = {}
    for kind in peer_names(problem, tensors):
        if kind == "compiled" and quick and stream.device.type == "cpu":
            reasons[kind] = "left out of a quick run: torch.compile takes longer than all else in it"
            continue
        # Any error of a peer (no compiler, no memory, a missing operator) is reported as the reason.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = peer(kind, problem, tensors)
                call()
            calls[kind] = call
        except NoPeer as reason:
            reasons[kind] = str(reason)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            reasons[kind] = f"{type(error).__name__}: {first}".rstrip(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = median_seconds(calls, stream.device, threads, quick=quick)
    ours = taken.pop(OURS)
    return Row(case, plan.descriptor.shape, str(plan.sku()), plan.bytes_moved(), ours, taken, reasons)


def _host_costs(stream: Stream) -> dict[str, float]:
    """The host time of a call on a small tensor, in microseconds."""
    problems = {name: case.problem(SMALL, stream) for name, case in host_cases().items()}
    calls: dict[str, Call] = {name: problem.call(problem.draw()) for name, problem in problems.items()}
    x = torch.randn(SMALL, device=stream.device)
    calls["torch.relu"] = lambda: torch.relu(x)
    return {name: 1e6 * host_seconds(call) for name, call in calls.items()}
