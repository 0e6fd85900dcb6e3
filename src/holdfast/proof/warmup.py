"""``holdfast warmup``: compile kernels ahead of time, in several processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from multiprocessing import get_context
from typing import Annotated

import torch
import typer
from rich.console import Console

from holdfast.core.case import Case
from holdfast.core.registry import plans
from holdfast.core.stream import Stream
from holdfast.proof.conformance import cases_of, execute, plan_named, selected
from holdfast.proof.report import bar


def warmup(
    plan: Annotated[
        list[str] | None, typer.Option("--plan", metavar="NAME", help="Only this plan; may be repeated.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes; by default one for each processor.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "",
) -> None:
    """Compile the common variants of every kernel now, in parallel, so that first calls need not wait."""
    names = [plan_named(name).__name__ for name in plan or []] or sorted(plans())
    where = str(Stream.current(device or ("cuda" if torch.cuda.is_available() else "cpu")).device)
    processes = min(jobs or os.cpu_count() or 1, len(names))
    console, began = Console(), time.perf_counter()
    failed: dict[str, str] = {}
    with bar(console) as progress:
        progress(f"compiling {len(names)} plans for {where}", 0, len(names))
        for done, (name, reason) in enumerate(compiled(names, where, processes), 1):
            progress(f"{name} ({done} of {len(names)})", done, len(names))
            if reason:
                failed[name] = reason
    for name, reason in failed.items():
        console.print(f"{name} was not compiled: {reason}", soft_wrap=True, highlight=False, markup=False)
    seconds = time.perf_counter() - began
    console.print(f"{len(names) - len(failed)} plans are compiled for {where}, {seconds:.1f} s")
    if failed:
        raise typer.Exit(1)


def compiled(names: Sequence[str], device: str, processes: int) -> Iterator[tuple[str, str]]:
    """Compile the plans called ``names``; yield each as it is done, with the reason if it failed."""
    with ProcessPoolExecutor(processes, get_context("spawn"), _start) as pool:
        jobs = {pool.submit(compile_plan, name, device): name for name in names}
        for job in as_completed(jobs):
            error = job.exception()
            yield jobs[job], f"{type(error).__name__}: {error}" if error else ""


def _start() -> None:
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.ERROR)


def compile_plan(name: str, device: str) -> None:
    """Run the common cases of a plan once; what they need is compiled, and stored on disk."""
    kind = plans()[name]
    backend = "gpu" if device.startswith("cuda") else "cpu"
    for case in cases_of(kind):
        if is_common(case):
            execute(kind, case, case.make(), selected(backend), device)


def is_common(case: Case) -> bool:
    """Whether a case is of a dtype that people train in: float64 is for checks."""
    return all(getattr(case.descriptor, f.name) is not torch.float64 for f in fields(case.descriptor))
