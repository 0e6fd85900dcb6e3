"""A run on the CPU allocates no memory; large results use huge pages, again and again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.core import huge_pages

PROGRAM = """
import pathlib, re, torch, holdfast as hf

def resident(which):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(which + r":\\s*(\\d+) kB", status)[1])

n = 1 << 25
stream = hf.Stream.current("cpu")
x, q = torch.ones(n), torch.ones(n, dtype=torch.int8)
dy, dx = torch.ones(n), torch.ones(n)
plans = hf.plans
forward = plans.QuantizePerTensorPlan.select(stream, plans.QuantizePerTensorDescriptor(shape=(n,)))
descriptor = plans.QuantizePerTensorBackwardDescriptor(shape=(n,))
backward = plans.QuantizePerTensorBackwardPlan.select(stream, descriptor)
small = torch.ones(1 << 16)
hf.dequantize(hf.quantize(small, 0.1), 0.1)  # import everything and start the threads

pathlib.Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = resident("VmRSS")
forward.run(stream, None, hf.plans.QuantizePerTensorArgs(x=x, scale=0.1, q=q))
backward.run(stream, None, hf.plans.QuantizePerTensorBackwardArgs(dy=dy, x=x, scale=0.1, dx=dx))
print(resident("VmHWM") - before)
copy = x.clone()
print(resident("VmHWM") - before)
"""


def test_runs_allocate_nothing() -> None:
    """The growth of the peak memory in KiB, after a run in both directions, and after an allocation."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    after_runs, after_a_copy = map(int, done.stdout.split())
    assert after_runs < 4096 < after_a_copy, "the check sees an allocation"


LARGE = huge_pages.MIN_BYTES // 4
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to ask for")


def codes(count: int = LARGE) -> torch.Tensor:
    """A result of 4 * ``count`` bytes."""
    return hf.fake_quantize(torch.ones(count), 0.1, dtype=torch.int8)


def flags_of(address: int) -> set[str]:
    """The flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a block. Memory of the allocator may have huge pages too, left by NumPy."""
    blocks = [torch.frombuffer(block._memory, dtype=torch.uint8) for block in huge_pages._users]
    return any(0 <= tensor.data_ptr() - block.data_ptr() < block.nbytes for block in blocks)


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_waiting", [])


@on_linux
def test_large_results_lie_on_huge_pages_of_their_own_process() -> None:
    large = codes()
    flags = flags_of(large.data_ptr())
    assert "hg" in flags and "sh" not in flags
    assert is_lent(large) and not is_lent(codes(LARGE - 1))


@on_linux
def test_memory_is_used_again_after_the_last_reference_is_gone() -> None:
    first = codes()
    address, view = first.data_ptr(), first.view(2, -1).numpy()
    assert codes().data_ptr() != address
    del first
    assert codes().data_ptr() != address
    expected = view.copy()
    del view
    again = [codes() for _ in range(4)]
    assert address in {result.data_ptr() for result in again}
    assert all((result.view(2, -1).numpy() == expected).all() for result in again)


@on_linux
def test_memory_that_was_moved_is_used_again() -> None:
    first = codes()
    address = first.data_ptr()
    first.share_memory_()
    assert codes().data_ptr() == address != first.data_ptr()
    assert torch.equal(first, codes())


@on_linux
def test_blocks_have_the_size_that_is_needed() -> None:
    address = codes(4 * LARGE).data_ptr()
    assert codes(2 * LARGE).data_ptr() != address
    assert codes(3 * LARGE).data_ptr() == address


@on_linux
def test_waiting_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "WAITING_BYTES", 3 * huge_pages.MIN_BYTES)
    addresses = [result.data_ptr() for result in [codes() for _ in range(5)]]
    assert len(huge_pages._waiting) == 3
    assert [block.size for block in huge_pages._waiting] == [huge_pages.MIN_BYTES] * 3
    kept = [codes().data_ptr() for _ in range(1)]
    assert kept[0] in addresses
    codes(4 * LARGE)
    assert len(huge_pages._waiting) == 3


@on_linux
def test_results_are_like_those_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 3, 256, 256).to(memory_format=torch.channels_last).requires_grad_()
    results = [hf.fake_quantize(x, 0.1, dtype=torch.int8)]
    monkeypatch.setattr(huge_pages, "_HUGE", None)
    results.append(hf.fake_quantize(x, 0.1, dtype=torch.int8))
    ours, theirs = results
    assert "hg" in flags_of(ours.data_ptr()) and is_lent(ours) and not is_lent(theirs)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert not ours.detach()._is_view() or theirs.detach()._is_view()
    (gradient,) = torch.autograd.grad(ours.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(theirs.sum(), x)[0])


def fail(size: int) -> huge_pages.Block:
    raise OSError("no memory")


#: Functions whose results and gradients are all large.
LARGE_STEPS = {
    "grid_sample": (hf.grid_sample, (1, 4, 512, 512), (1, 512, 512, 2)),
    "learned scales": (lambda x, s: hf.fake_quantize(x, s, dtype=torch.int8), (LARGE,), ()),
    "dynamic": (lambda x: hf.dynamic_fake_quantize(x, dtype=torch.int8), (512, LARGE // 512)),
    "embedding": (lambda w: hf.embedding(torch.arange(LARGE // 64) // 2, w), (LARGE // 64, 64)),
    "bags": (lambda w: hf.embedding_bag(torch.arange(LARGE // 64)[:, None], w), (LARGE // 64, 64)),
}


@on_linux
@pytest.mark.parametrize("name", LARGE_STEPS)
def test_large_gradients_are_those_that_were_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times, because later calls repeat the launch of the first."""
    function, *shapes = LARGE_STEPS[name]
    inputs = [torch.rand(shape).add(0.01).requires_grad_() for shape in shapes]

    def step() -> list[torch.Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    found = [step() for _ in range(3)]
    assert any(map(is_lent, found[-1]))
    monkeypatch.setattr(huge_pages, "Block", fail)
    monkeypatch.setattr(huge_pages, "_waiting", [])
    expected = step()
    assert not any(map(is_lent, expected))
    for made in found:
        assert all(map(torch.equal, made, expected))


@on_linux
def test_without_memory_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "Block", fail)
    assert not is_lent(codes())


@on_linux
def test_old_waiting_blocks_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "UNMARKED_BYTES", 2 * huge_pages.MIN_BYTES)
    results = [codes() for _ in range(4)]
    while results:
        results.pop()
    assert sorted(block.marked for block in huge_pages._waiting) == [False, False, True, True]
    again = [codes() for _ in range(4)]
    assert not huge_pages._waiting and all(torch.equal(result, codes()) for result in again)
    assert not any(block.marked for block in huge_pages._users)
