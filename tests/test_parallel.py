"""Work is shared out among torch's own threads, or among a pool: every range once, and no failure lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.backends import threads
from holdfast.backends.threads import PARALLEL_ELEMENTS, parallel, scratch_of_thread

WAYS = ["torch's threads", "a pool"]


@pytest.fixture(params=WAYS)
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, whatever the machine has, by either way."""
    if request.param == "a pool":
        monkeypatch.setattr(threads, "_team_of_torch", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_library_of_torch_is_found() -> None:
    """If this fails on Linux, every run after an operator of torch is on one thread in effect."""
    in_use = sys.platform == "linux" and "libgomp" in Path("/proc/self/maps").read_text()
    assert (threads._team_of_torch() is not None) == in_use


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_every_range_is_taken_once(count: int) -> None:
    taken: list[int] = []
    parallel(lambda first, last: taken.extend(range(first, last)), count, 100 * PARALLEL_ELEMENTS)
    assert sorted(taken) == list(range(count))


@pytest.mark.usefixtures("two_threads")
def test_two_threads_work_at_the_same_time() -> None:
    """Each of two parts waits for the other; one thread alone would wait in vain."""
    met = threading.Barrier(2)
    parallel(lambda first, last: met.wait(timeout=60) and None, 2, 2 * PARALLEL_ELEMENTS)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("failing", [0, 999])
def test_a_failure_reaches_the_caller_and_ends_nothing(failing: int) -> None:
    def part(first: int, last: int) -> None:
        if first <= failing < last:
            raise RuntimeError("no memory")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory"):
            parallel(part, 1000, 100 * PARALLEL_ELEMENTS)
    test_every_range_is_taken_once(1000)


@pytest.mark.usefixtures("two_threads")
def test_little_work_stays_with_the_caller() -> None:
    callers: list[int] = []
    parallel(lambda first, last: callers.append(threading.get_ident()), 1000, PARALLEL_ELEMENTS - 1)
    assert callers == [threading.get_ident()]


@pytest.mark.usefixtures("two_threads")
def test_each_thread_keeps_a_scratch_of_its_own() -> None:
    def addresses() -> dict[int, int]:
        found: dict[int, int] = {}

        def part(first: int, last: int) -> None:
            found[threading.get_ident()] = scratch_of_thread(1000)
            time.sleep(0.001)  # so that the other thread finds something to do

        while len(found) < 2:
            parallel(part, 16, 100 * PARALLEL_ELEMENTS)
        return found

    before = addresses()
    assert len(set(before.values())) == 2
    again = addresses()
    assert all(again[thread] == address for thread, address in before.items() if thread in again)


def test_scratch_grows() -> None:
    small = scratch_of_thread(10)
    assert scratch_of_thread(5) == small
    large = scratch_of_thread(2**26)
    assert scratch_of_thread(2**20) == large
