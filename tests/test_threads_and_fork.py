"""Eight Python threads and forked children use the CPU backend concurrently: right bits, no deadlock.

The tests run in a subprocess, so that a deadlock becomes a timeout.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
import holdfast.backends.cpu  # registers the locks
from holdfast.backends.private.numba import compiler_locks
from holdfast.backends.threads import shared_finely
from holdfast.core.bits import memory
from holdfast.proof.conformance import cases_of, run_reference

PYTHON_THREADS = 8
CHILDREN = 3
ROUNDS = 4
SECONDS = 120

PLANS = [
    hf.plans.QuantizePerTensorPlan,
    hf.plans.QuantizePerChannelPlan,
    hf.plans.QuantizePerTokenBackwardPlan,
    hf.plans.DequantizePerGroupPlan,
    hf.plans.DequantizePerTensorBackwardPlan,
]

Job = tuple[Any, Any, Any, list[bytes]]


def jobs() -> list[Job]:
    """Plans with args, some large enough for many threads, and the expected bytes."""
    found: list[Job] = []
    for plan in PLANS:
        for case in cases_of(plan):
            if case.name in ("many elements", "transposed input", "float32 to int8"):
                args, reference = run_reference(plan, case)
                right = [_bytes(getattr(reference, name)) for name in plan.outputs]
                found.append((plan, case.descriptor, args, right))
    return found


def fresh(plan: Any, args: Any) -> Any:
    """The args with a copy of their outputs. NumPy copies, because torch's threads do not survive a fork."""
    outputs = {}
    for name in plan.outputs:
        out = getattr(args, name)
        copied = torch.from_numpy(memory(out).numpy().copy())
        outputs[name] = copied.as_strided(out.shape, out.stride(), out.storage_offset())
    return replace(args, **outputs)


def _bytes(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def work(every: list[Job], wrong: list[str]) -> None:
    """Select, run and compare every job, several times."""
    stream = hf.Stream.current()
    try:
        for _ in range(ROUNDS):
            for plan, descriptor, args, right in every:
                given = fresh(plan, args)
                plan.select(stream, descriptor, hf.PlanPreference(backend="cpu")).run(stream, None, given)
                if [_bytes(getattr(given, name)) for name in plan.outputs] != right:
                    wrong.append(plan.__name__)
    except BaseException:
        wrong.append(traceback.format_exc())


def in_threads(every: list[Job], count: int) -> tuple[list[threading.Thread], list[str]]:
    wrong: list[str] = []
    threads = [threading.Thread(target=work, args=(every, wrong)) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, wrong


def child(every: list[Job]) -> None:
    """Runs in a forked process: work in this thread and in two more. The exit status is the result."""
    signal.alarm(SECONDS)
    threads, wrong = in_threads(every, 2)
    work(every, wrong)
    for thread in threads:
        thread.join()
    sys.stderr.write("\n".join(wrong))
    os._exit(1 if wrong else 0)


def main(warm: bool) -> None:
    """``warm``: compile the kernels and start the pool before the fork. Else they are not even imported."""
    torch.set_num_threads(4)
    every = jobs()
    if warm:
        wrong: list[str] = []
        work(every, wrong)
        assert not wrong, wrong
    threads, wrong = in_threads(every, PYTHON_THREADS)
    children = []
    for _ in range(CHILDREN):
        pid = os.fork()
        if pid == 0:
            child(every)
        children.append(pid)
    work(every, wrong)
    for thread in threads:
        thread.join()
    states = [os.waitpid(pid, 0)[1] for pid in children]
    assert not wrong, wrong
    assert states == [0] * CHILDREN, states


@pytest.mark.parametrize("warm", ["warm", "cold"])
def test_eight_threads_and_forked_children_at_once(warm: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, warm], timeout=2 * SECONDS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has several threads
@pytest.mark.parametrize("number", range(2))
def test_a_fork_waits_for_the_locks_of_the_compilers(number: int) -> None:
    """A thread holds them outside our own lock, too: when it frees compiled code, for example."""
    lock, held = compiler_locks()[number], threading.Event()

    def hold() -> None:
        lock.acquire()
        held.set()
        time.sleep(0.2)
        lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        lock.acquire()
        os._exit(0)
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    with shared_finely():
        main(sys.argv[1] == "warm")
