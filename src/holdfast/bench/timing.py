"""Timing: device events on a GPU, torch's Timer on the CPU. All times are medians."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

#: Milliseconds of warm-up and of measurement on a GPU.
GPU_WARMUP, GPU_REPEAT = 10, 50
#: Seconds of warm-up and of measurement on the CPU, and the number of turns. The warm-up matters for calls
#: that allocate: their first memory pages take the system up to four times as long.
CPU_WARMUP, CPU_SECONDS, CPU_TURNS = 1.0, 0.5, 5
#: Seconds of measurement on the CPU in a quick run.
QUICK_SECONDS = 0.1
#: For host time: calls between two synchronizations, and the number of such batches.
CALLS, BATCHES = 500, 9


def median_seconds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, threads: int, *, quick: bool = False
) -> dict[str, float]:
    """The median time of each call in seconds, including the work on the device.

    On the CPU the calls take turns, so that a change of the load of the machine affects all of them.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        bench = partial(do_bench, warmup=GPU_WARMUP, rep=GPU_REPEAT, return_mode="median")
        return {name: cast(float, bench(call)) / 1e3 for name, call in calls.items()}
    from torch.utils.benchmark import Timer

    timers = {n: Timer("call()", globals={"call": call}, num_threads=threads) for n, call in calls.items()}
    if quick:
        return {n: timer.blocked_autorange(min_run_time=QUICK_SECONDS).median for n, timer in timers.items()}
    warm = {n: timer.blocked_autorange(min_run_time=CPU_WARMUP).median for n, timer in timers.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CPU_TURNS):
        for name, timer in timers.items():
            number = max(1, int(CPU_SECONDS / CPU_TURNS / warm[name]))
            taken[name].append(timer.timeit(number).median)
    return {name: statistics.median(turns) for name, turns in taken.items()}


def host_seconds(call: Callable[[], object]) -> float:
    """The time in seconds until a call returns: the median over batches, each started with an idle device.

    Garbage collection is off, as in timeit.
    """
    for _ in range(CALLS):
        call()
    taken = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BATCHES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken.append((time.perf_counter() - start) / CALLS)
    finally:
        if collecting:
            gc.enable()
    torch.cuda.synchronize()
    return statistics.median(taken)


def copy_rate(device: torch.device, elements: int, threads: int) -> float:
    """Bytes per second, read and written, of ``copy_`` for ``elements`` float32."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    taken = median_seconds({"copy": lambda: target.copy_(source)}, device, threads)["copy"]
    return 2 * source.numel() * source.element_size() / taken


def free_memory(device: torch.device) -> None:
    """Free the memory of the last case."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
