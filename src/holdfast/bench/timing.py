"""Clocks: device events on a GPU, torch's own timer on the CPU; medians everywhere."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import cast

import torch

#: Milliseconds of warm-up and of repetition on a GPU, and seconds of repetition on the CPU; or if it is to be
#: quick.
GPU_WARMUP, GPU_REPEAT = 10, 50
CPU_SECONDS, QUICK_SECONDS = 0.3, 0.1
#: Calls between two synchronisations, and how many such batches there are, for the host's cost.
CALLS, BATCHES = 500, 9


def seconds(call: Callable[[], object], device: torch.device, threads: int, *, quick: bool = False) -> float:
    """The median time of a call, its device's work included."""
    if device.type == "cuda":
        from triton.testing import do_bench

        median = do_bench(call, warmup=GPU_WARMUP, rep=GPU_REPEAT, return_mode="median")
        return cast(float, median) / 1e3
    from torch.utils.benchmark import Timer

    call()
    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    return timer.blocked_autorange(min_run_time=QUICK_SECONDS if quick else CPU_SECONDS).median


def host_seconds(call: Callable[[], object]) -> float:
    """What a call costs the host before it returns: the median over batches, the device idle before each.

    As with timeit, the garbage of all that was compiled before is not collected at the expense of the calls.
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
    """Bytes read and written in a second by ``copy_`` of a tensor of ``elements`` float32."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source), device, threads)


def release(device: torch.device) -> None:
    """Give back what the last case held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
