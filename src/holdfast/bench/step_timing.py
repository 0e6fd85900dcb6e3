"""Measures training steps: device time, host time and peak memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from holdfast.core.training_step import Step

#: On a GPU: the number of turns, the device time of one turn in seconds, and the repetitions in one.
GPU_TURNS, GPU_SECONDS, GPU_REPEAT = 3, 10e-3, (3, 15)
#: On the CPU: the number of turns, with one repetition each, after those for warm-up.
CPU_TURNS, CPU_WARMUP = 20, 2
#: Elements of the buffer that is cleared before each repetition, larger than any cache.
CLEARED = 2**26
#: For host time: calls between two synchronizations, and the number of such batches.
CALLS, BATCHES = 50, 7


_T = TypeVar("_T")


@dataclass(frozen=True)
class Spread:
    """The quartiles of a measured time, in seconds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        if len(times) < 2:
            return cls(times[0], times[0], times[0])
        return cls(*statistics.quantiles(times, n=4, method="inclusive"))


@dataclass(frozen=True)
class Times:
    """The times of a step and of its parts."""

    step: Spread
    forward: Spread
    backward: Spread


@dataclass(frozen=True)
class Memory:
    """Peak memory above what was allocated before, and the size of the gradients, in bytes."""

    step: int
    backward: int
    gradients: int


def step_times(steps: Mapping[str, Step], device: torch.device) -> dict[str, Times]:
    """The time of each step without the time that the host needs to launch it. The steps take turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    with _no_collection():
        if device.type == "cuda":
            buffer = torch.empty(CLEARED, device=device)
            turns = {name: _GpuTurns(step, buffer) for name, step in steps.items()}
            for _ in range(GPU_TURNS):
                for name, turn in turns.items():
                    taken[name] += turn.repeat()
        else:
            for turn_number in range(-CPU_WARMUP, CPU_TURNS):
                for name, step in steps.items():
                    pair = _cpu_repetition(step)
                    if turn_number >= 0:
                        taken[name].append(pair)
    return {
        name: Times(
            Spread.of([forward + backward for forward, backward in pairs]),
            Spread.of([forward for forward, _ in pairs]),
            Spread.of([backward for _, backward in pairs]),
        )
        for name, pairs in taken.items()
    }


def _cpu_repetition(step: Step) -> tuple[float, float]:
    start = time.perf_counter()
    out = step.forward()
    middle = time.perf_counter()
    step.backward(out)
    return middle - start, time.perf_counter() - middle


class _GpuTurns:
    """Repeats a step and takes the device time of each forward and backward.

    Before each of the two a large buffer is cleared, so that the caches are cold. It is cleared so often that
    the device is busy until the host has launched all of it.
    """

    def __init__(self, step: Step, buffer: torch.Tensor) -> None:
        self.step, self.buffer, self.clears = step, buffer, 1
        for _ in range(2):
            torch.cuda.synchronize()
            launching = max(_cpu_repetition(step))
        clearing = min(self._timed(buffer.zero_)[1]() for _ in range(3))
        pairs = self.repeat(2)
        self.clears += math.ceil(1.5 * launching / clearing)
        taken = max(sum(pair) for pair in pairs)
        least, most = GPU_REPEAT
        self.count = max(least, min(most, int(GPU_SECONDS / taken)))

    def repeat(self, count: int = 0) -> list[tuple[float, float]]:
        times = []
        for _ in range(count or self.count):
            out, forward = self._timed(self.step.forward)
            _, backward = self._timed(partial(self.step.backward, out))
            del out
            times.append((forward, backward))
        return [(forward(), backward()) for forward, backward in times]

    def _timed(self, call: Callable[[], _T]) -> tuple[_T, Callable[[], float]]:
        """The result of a call, and a function that waits for its end and returns its time in seconds."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.clears):
            self.buffer.zero_()
        start.record()
        made = call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return made, seconds


def host_times(steps: Mapping[str, Step], device: torch.device) -> dict[str, Spread]:
    """The time until forward and backward return, per call. The steps take turns, each on an idle device."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    with _no_collection():
        for batch in range(BATCHES + 1):
            for name, step in steps.items():
                _synchronize(device)
                start = time.perf_counter()
                for _ in range(CALLS):
                    step.backward(step.forward())
                if batch:  # the first one is for warm-up
                    taken[name].append((time.perf_counter() - start) / CALLS)
    _synchronize(device)
    return {name: Spread.of(times) for name, times in taken.items()}


def peak_memory(step: Step) -> Memory:
    """The peak memory of one step on a GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = step.forward()
    torch.cuda.synchronize()
    forward, between = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = step.backward(out)
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated()
    size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return Memory(max(forward, backward) - before, backward - between, size)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection is off, as in timeit."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
