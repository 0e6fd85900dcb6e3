"""Work is divided among torch's threads or a thread pool: every range runs once, and errors are raised."""

from __future__ import annotations

import ctypes
import operator
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.backends import private, threads
from holdfast.backends.scratch import Runs, Scratch
from holdfast.backends.threads import (
    ELEMENTS_PER_THREAD,
    parallel,
    shared_finely,
    threads_for,
)
from holdfast.core.case import Case, operands_of
from holdfast.ops.grid_sample import cpu_task
from holdfast.proof.conformance import Way, cases_of, check, cpu_threads, run_reference, select_on

WAYS = ["torch's threads", "a pool"]


@pytest.fixture(params=WAYS)
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads on any machine, from torch or from the pool."""
    if request.param == "a pool":
        monkeypatch.setattr(private, "team_of_torch", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_library_of_torch_is_found() -> None:
    """If this fails on Linux, runs after a torch operator effectively use one thread."""
    in_use = sys.platform == "linux" and "libgomp" in Path("/proc/self/maps").read_text()
    assert (private.team_of_torch() is not None) == in_use


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_every_range_is_taken_once(count: int) -> None:
    taken: list[int] = []
    parallel(lambda first, last: taken.extend(range(first, last)), count, 100 * ELEMENTS_PER_THREAD)
    assert sorted(taken) == list(range(count))


@pytest.mark.usefixtures("two_threads")
def test_two_threads_work_at_the_same_time() -> None:
    """Each of two parts waits for the other, so a single thread would time out."""
    met = threading.Barrier(2)
    parallel(lambda first, last: met.wait(timeout=60) and None, 2, 2 * ELEMENTS_PER_THREAD)


@pytest.mark.parametrize("before", [2, 8])
def test_grid_sample_runs_on_more_threads_than_its_workspace_has_scratch_for(before: int) -> None:
    """A plan divides its workspace among the threads of its selection, or fewer if images are large."""
    shape, size = (1, 3, 700, 700), (700, 700)
    image, grid, dout = torch.rand(shape), torch.rand(1, *size, 2) * 2 - 1, torch.rand(1, 3, *size)
    desc = hf.plans.GridSampleBackwardDescriptor(shape=shape, output_size=size)
    stream = hf.Stream.current("cpu")
    with cpu_threads(before):
        plan = hf.plans.GridSampleBackwardPlan.select(stream, desc, hf.PlanPreference(backend="cpu"))

    def run(threads: int) -> list[torch.Tensor]:
        made = [torch.empty_like(image), torch.empty_like(grid)]
        args = hf.plans.GridSampleBackwardArgs(
            dout=dout, input=image, grid=grid, dinput=made[0], dgrid=made[1]
        )
        with cpu_threads(threads):
            plan.run(stream, hf.Workspace.allocate(plan.workspace_size(), "cpu"), args)
        return made

    expected = run(before)
    for _ in range(5):
        assert all(map(torch.equal, run(8), expected))


@pytest.mark.parametrize("installed", [False, True])
def test_grid_sample_follows_the_number_of_threads(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also calls that repeat an earlier one, whose plan has scratch for another number of threads."""
    image, grid = torch.rand(1, 3, 200, 210), torch.rand(1, 200, 210, 2) * 2 - 1
    run, used = cpu_task.run_together, set[bool]()

    def spy(function: Any, task: Any, elements: int) -> None:
        used.add(elements > 0)  # 0 for a plan of one thread
        run(function, task, elements)

    monkeypatch.setattr(cpu_task, "run_together", spy)
    function = torch.nn.functional.grid_sample if installed else hf.grid_sample
    for number in (1, 2, 1, 3):
        for _ in range(4):
            used.clear()
            with cpu_threads(number), hf.installed() if installed else nullcontext():
                function(image, grid, align_corners=False)
            assert used == {number > 1}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("failing", [0, 999])
def test_a_failure_reaches_the_caller_and_ends_nothing(failing: int) -> None:
    def part(first: int, last: int) -> None:
        if first <= failing < last:
            raise RuntimeError("no memory")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory"):
            parallel(part, 1000, 100 * ELEMENTS_PER_THREAD)
    test_every_range_is_taken_once(1000)


@pytest.mark.usefixtures("two_threads")
def test_a_signal_that_waits_for_a_thread_of_openmp_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs the handler when the call from C begins. An exception there would be printed and lost."""
    signalled = partial(ctypes.CDLL(None)["raise"], signal.SIGINT)

    def team(work: Callable[[], None], threads: int) -> None:
        # Only functions of C are called in between.
        list(map(operator.call, [signalled, ctypes.CFUNCTYPE(None)(work), ctypes.CFUNCTYPE(None)(work)]))

    monkeypatch.setattr(private, "team_of_torch", lambda: team)
    taken: list[int] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel(lambda first, last: taken.append(first), 1000, 100 * ELEMENTS_PER_THREAD)
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken  # by the other thread


def test_an_interrupted_caller_waits_for_the_threads_of_the_pool(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still write into memory that the caller would free."""
    monkeypatch.setattr(private, "team_of_torch", lambda: None)
    caller, met, ended = threading.get_ident(), threading.Barrier(2), list[bool]()

    def part(first: int, last: int) -> None:
        met.wait(timeout=60)
        if threading.get_ident() != caller:
            time.sleep(0.3)
            ended.append(True)

    def handler(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            parallel(part, 2, 2 * ELEMENTS_PER_THREAD)
        assert ended
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_caller_works_alone_if_no_thread_can_be_started(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the interpreter ends: in functions of ``atexit``, and in threads that outlive the main one."""
    ended = ThreadPoolExecutor(8)
    ended.shutdown()
    monkeypatch.setattr(private, "team_of_torch", lambda: None)
    monkeypatch.setattr(threads, "_pool", ended)
    monkeypatch.setattr(threads, "_pool_threads", 8)
    test_every_range_is_taken_once(7)


def test_nobody_joins_work_that_has_ended(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool without threads may begin much later, when the memory of the work is gone."""
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(threads, "_submit", lambda work, count: late.append(work))
    called: list[int] = []
    threads._on_pool(lambda: called.append(1), 3)
    for join in late:
        join()
    assert len(late) == 2 and len(called) == 1


@pytest.mark.usefixtures("two_threads")
def test_little_work_stays_with_the_caller() -> None:
    callers: list[int] = []
    parallel(lambda first, last: callers.append(threading.get_ident()), 1000, 2 * ELEMENTS_PER_THREAD - 1)
    assert callers == [threading.get_ident()]


@pytest.mark.usefixtures("two_threads")
def test_each_thread_keeps_a_scratch_of_its_own() -> None:
    def addresses() -> dict[int, int]:
        found: dict[int, int] = {}

        def part(first: int, last: int) -> None:
            found[threading.get_ident()] = Scratch("test", Runs(1, 1000)).of_thread()
            time.sleep(0.001)  # leaves work for the other thread

        while len(found) < 2:
            parallel(part, 16, 100 * ELEMENTS_PER_THREAD)
        return found

    before = addresses()
    assert len(set(before.values())) == 2
    again = addresses()
    assert all(again[thread] == address for thread, address in before.items() if thread in again)


def test_scratch_grows() -> None:
    def address(size: int) -> int:
        return Scratch("test", Runs(1, size)).of_thread()

    small = address(10)
    assert address(5) == small
    large = address(2**26)
    assert address(2**20) == large


@pytest.mark.usefixtures("two_threads")
def test_threads_are_as_many_as_work_is_worth() -> None:
    share = ELEMENTS_PER_THREAD
    assert [threads_for(n) for n in (0, 1, share, 2 * share, 10 * share)] == [1, 1, 1, 2, 2]
    with shared_finely():
        assert threads_for(50000) == 2
    assert threads_for(50000) == 1


def test_work_that_is_not_worth_all_threads_leaves_those_of_torch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A smaller OpenMP team would end the other threads, and torch would have to start them again."""

    def refuse() -> None:
        raise AssertionError("torch's threads were asked for")

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(private, "team_of_torch", refuse)
            test_every_range_is_taken_once(3)
            parallel(lambda first, last: None, 1000, 3 * ELEMENTS_PER_THREAD)
    finally:
        torch.set_num_threads(before)


def elements_of(case: Case) -> int:
    """The number of elements of the largest tensor."""
    operands = operands_of(case.make()).values()
    return max(operand.numel() for operand in operands if isinstance(operand, torch.Tensor))


@pytest.mark.parametrize("plan", hf.plans.all().values(), ids=hf.plans.all().keys())
def test_proofs_share_out_some_of_their_cases(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the runs on eight threads would prove nothing."""
    shared = {0}

    def on_pool(work: Callable[[], None], count: int) -> None:
        shared.add(count)
        work()

    monkeypatch.setattr(private, "team_of_torch", lambda: None)
    monkeypatch.setattr(threads, "_on_pool", on_pool)
    for case in cases_of(plan):
        if max(shared) <= 2 and elements_of(case) >= 2**12:
            args, reference = run_reference(plan, case)
            assert not check(plan, case, Way("cpu", threads=8, times=1), args, reference, select_on("cpu"))
    assert max(shared) > 2
