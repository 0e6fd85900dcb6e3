"""``holdfast warmup``: compile kernels ahead of time, in several processes."""

from __future__ import annotations

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
from holdfast.proof.background_compile import start_compiler_process
from holdfast.proof.conformance import cases_of, execute, select_on
from holdfast.proof.options import PlanOption, plan_names
from holdfast.proof.report import progress_bar


def warmup(
    plan: PlanOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of processes. Default: one per CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if available.")] = "",
) -> None:
    """Compile the common variants of every kernel in parallel, so that first calls do not have to."""
    names = plan_names(plan) or sorted(plans())
    where = str(Stream.current(device or ("cuda" if torch.cuda.is_available() else "cpu")).device)
    processes = min(jobs or os.cpu_count() or 1, len(names))
    console, began = Console(), time.perf_counter()
    failed: dict[str, str] = {}
    with progress_bar(console) as progress:
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
    """Compile the plans called ``names``. Yields each name when done, with its error or ''."""
    with ProcessPoolExecutor(processes, get_context("spawn"), start_compiler_process) as pool:
        jobs = {pool.submit(compile_plan, name, device): name for name in names}
        for job in as_completed(jobs):
            error = job.exception()
            yield jobs[job], f"{type(error).__name__}: {error}" if error else ""


def compile_plan(name: str, device: str) -> None:
    """Run the common cases of a plan once, which compiles their kernels into the cache on disk."""
    kind = plans()[name]
    backend = "gpu" if device.startswith("cuda") else "cpu"
    for case in cases_of(kind):
        if is_common(case):
            execute(kind, case, case.make(), select_on(backend), device)


def is_common(case: Case) -> bool:
    """Whether a case uses dtypes that are common in training, which float64 is not."""
    return all(getattr(case.descriptor, f.name) is not torch.float64 for f in fields(case.descriptor))
