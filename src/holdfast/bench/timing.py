"""Clocks: device events on a GPU, torch's own timer on the CPU; medians everywhere."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

#: Milliseconds of warm-up and of repetition on a GPU.
GPU_WARMUP, GPU_REPEAT = 10, 50
#: Seconds of warm-up and of repetition on the CPU, and in how many turns. What allocates its result gets
#: other pages at first, which take the system up to four times as long.
CPU_WARMUP, CPU_SECONDS, CPU_TURNS = 1.0, 0.5, 5
#: Seconds of repetition on the CPU if it is to be quick.
QUICK_SECONDS = 0.1
#: Calls between two synchronisations, and how many such batches there are, for the host's cost.
CALLS, BATCHES = 500, 9


def side_by_side(
    calls: Mapping[str, Callable[[], object]], device: torch.device, threads: int, *, quick: bool = False
) -> dict[str, float]:
    """The median time of each call in seconds, its device's work included.

    On the CPU they take turns: a machine that does other things as well is slower now and faster then.
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
    taken = side_by_side({"copy": lambda: target.copy_(source)}, device, threads)["copy"]
    return 2 * source.numel() * source.element_size() / taken


def release(device: torch.device) -> None:
    """Give back what the last case held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
