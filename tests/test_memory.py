"""A run on the CPU allocates no memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import holdfast as hf
from holdfast.core import huge_pages, private

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
{extra}
print(resident("VmHWM") - before)
"""


def growth(extra: str = "") -> int:
    """The growth of the peak memory of the process in KiB, while it runs both directions."""
    program = PROGRAM.replace("{extra}", extra)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_runs_allocate_nothing() -> None:
    assert growth() < 4096


def test_the_check_sees_an_allocation() -> None:
    assert growth("copy = x.clone()") > 4096


def test_large_results_ask_for_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages are requested for the whole pages of a large result, and not for small results."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(private, "advise_large_pages", lambda *given: asked.append(given))
    x = torch.ones(huge_pages.MIN_BYTES // 4)
    for result, calls in (
        (hf.fake_quantize(x, 0.1, dtype=torch.int8), 1),
        (hf.fake_quantize(x[1:], 0.1, dtype=torch.int8), 0),
    ):
        assert len(asked) == calls
        for first, size in asked:
            end = result.data_ptr() + result.nbytes
            assert first % 4096 == 0 and first + size == end and 0 <= first - result.data_ptr() < 4096
        asked.clear()
    monkeypatch.setattr(private, "advise_large_pages", private.FALLBACKS["advise_large_pages"])
    assert torch.equal(
        hf.fake_quantize(x, 0.1, dtype=torch.int8),
        hf.fake_quantize(x[:1], 0.1, dtype=torch.int8).expand_as(x),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this call")
def test_the_system_takes_the_question() -> None:
    room = torch.empty(huge_pages.MIN_BYTES, dtype=torch.uint8)
    first = -(-room.data_ptr() // 4096) * 4096
    assert private.advise_large_pages(first, 4096) == 0
