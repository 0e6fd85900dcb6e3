"""Tests of the first call of an op: what it compiles, and the messages that it prints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import typed_passes, untyped_passes

import fresh
from holdfast.backends import kernel_cache, notice
from holdfast.backends.cpu import kernel, on_demand, pointer
from holdfast.backends.on_demand import Real
from holdfast.backends.private.numba import NEEDLESS


def in_new_process(program: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return fresh.run(program, env=environment)


#: Prints the functions that a plain call compiles, and those of a call with another dtype and strides.
PLAIN = """
import torch, holdfast as hf
from holdfast.numerics import cpu as numerics
from holdfast.ops.affine import cpu as affine

def compiled():
    known = (
        numerics.widen, numerics.narrow, numerics.pack, numerics.unpack,
        affine._broadcast_rows, affine._copy_strided,
    )
    return [f._name for f in known if any(slot.compiled.address for slot in f.slots.values())]

x = torch.arange(-32.0, 32.0).reshape(8, 8) / 8
y = hf.fake_quantize(x, 0.25, dtype=torch.int8)
print(compiled())
assert y.equal(torch.round(x / 0.25) * 0.25)
z = hf.fake_quantize(x.bfloat16()[:, ::2], 0.25, dtype=torch.int8)
print(compiled())
assert z.float().equal((torch.round(x / 0.25) * 0.25)[:, ::2])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A cache with all that a plain call compiles, and the process that compiled it."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, in_new_process(PLAIN, folder)


@pytest.fixture
def cache(compiled: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """A copy of that cache."""
    return Path(shutil.copytree(compiled[0], tmp_path / "cache"))


def test_a_plain_call_compiles_no_conversion(
    compiled: tuple[Path, subprocess.CompletedProcess[str]], cache: Path
) -> None:
    for done in (compiled[1], in_new_process(PLAIN, cache)):  # compiled, and found on disk
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[]\n['widen', 'narrow', '_copy_strided']\n"


@on_demand
def _scaled_sum(values, count, factor: Real, result, like):
    """A compiled function: the sum of some values times a factor."""
    total = factor - factor
    for i in range(count):
        total += pointer(values, like)[i] * factor
    pointer(result, like)[0] = total


@kernel
def _twice(values, count, factor, result, like):
    _scaled_sum(values, count, factor + factor, result, like)


@pytest.mark.parametrize("number", [np.float32, np.float64])
def test_a_function_is_compiled_when_a_kernel_calls_it(number: Any) -> None:
    values, result = np.arange(5, dtype=number), np.zeros(1, number)
    (slot,) = (s for real, s in _scaled_sum.slots.items() if real.name == np.dtype(number).name)
    assert slot.compiled.address is None
    for count, total in ((0, 0), (5, 30), (3, 9)):
        _twice(values.ctypes.data, count, number(1.5), result.ctypes.data, number(0))
        assert result[0] == total
        assert slot.compiled.address is not None


INTERRUPTED = """
import os, signal, time
import torch, holdfast as hf
from numba.core.ccallback import CFunc

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with SIGINT ignored
x = torch.tensor([1.0, -1.0])
hf.fake_quantize(x, 0.5, dtype=torch.int8)
right = CFunc.compile

def pressed(self):
    os.kill(os.getpid(), signal.SIGINT)
    right(self)

CFunc.compile = pressed
out = torch.zeros(2, dtype=torch.float32)
try:
    y = hf.fake_quantize(x.bfloat16(), 0.5, dtype=torch.int8)
    time.sleep(1)
except KeyboardInterrupt:
    print("interrupted")
CFunc.compile = right
print(hf.fake_quantize(x.bfloat16(), 0.5, dtype=torch.int8).tolist())
"""


def test_an_interrupt_waits_for_the_compiler_and_then_arrives(cache: Path) -> None:
    """The kernel is on disk. The functions that it calls are compiled."""
    functions = [file for file in cache.rglob("*.nbc") if "widen" in file.name or "narrow" in file.name]
    assert len(functions) == 2
    for file in functions:
        file.unlink()
    done = in_new_process(INTERRUPTED, cache)
    assert done.stdout == "interrupted\n[1.0, -1.0]\n", done.stderr
    assert all(file.exists() for file in functions)


def test_a_function_that_cannot_be_compiled_ends_the_process(cache: Path) -> None:
    """An exception cannot pass through a kernel, and unwritten memory must not be returned."""
    program = """
import torch, holdfast as hf
from numba.core.ccallback import CFunc

def fails(self):
    raise MemoryError("on purpose")

hf.fake_quantize(torch.zeros(4), 0.5, dtype=torch.int8)  # compiles the kernel without its conversions
CFunc.compile = fails
hf.fake_quantize(torch.zeros(4, dtype=torch.bfloat16), 0.5, dtype=torch.int8)
print("went on")
"""
    done = in_new_process(program, cache)
    assert done.returncode == -signal.SIGABRT and done.stdout == ""
    assert "holdfast: a kernel could not be compiled: MemoryError('on purpose')" in done.stderr


def test_kernels_are_compiled_without_needless_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # An earlier run of the tests may have left the kernel on disk.
    monkeypatch.setattr(kernel_cache, "keep", lambda compiled, function: None)
    ran = {name for _, name in _ran_passes()}
    known = {**vars(typed_passes), **vars(untyped_passes)}
    assert not ran & {known[name]._name for name in NEEDLESS}
    assert "nopython_type_inference" in ran and "native_lowering" in ran


def _ran_passes() -> list[tuple[int, str]]:
    @kernel
    def nothing(x):  # type: ignore[no-untyped-def]
        return x

    nothing(1)
    times = next(iter(nothing.overloads.values())).metadata["pipeline_times"]
    return [tuple(name.split("_", 1)) for passes in times.values() for name in passes]  # type: ignore[misc]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="holdfast")  # commands that ran in this process made it silent
    monkeypatch.setattr(notice, "PATIENCE", 0.02)
    monkeypatch.setattr(notice, "_told", set())


@pytest.mark.usefixtures("patient")
def test_a_long_compilation_is_told_once_for_each_op(caplog: pytest.LogCaptureFixture) -> None:
    for module in (
        "holdfast.ops.grid_sample.cpu",
        "holdfast.ops.grid_sample.cpu_sums",
        "holdfast.ops.embedding.cpu",
    ):
        with notice.compiling(module, cached=True):
            time.sleep(0.2)
    with notice.compiling("holdfast.ops.quantize.cpu", cached=True):
        pass  # finishes immediately
    time.sleep(0.1)
    assert caplog.messages == [
        f"holdfast: compiling {op} for this machine, once (cached afterwards) …"
        for op in ("grid_sample", "embedding")
    ]


@pytest.mark.usefixtures("patient")
def test_where_nothing_is_cached_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with notice.compiling("holdfast.ops.grid_sample.cpu", cached=False):
        time.sleep(0.2)
    assert "no folder to cache it in" in caplog.text and "afterwards" not in caplog.text


def test_the_line_is_on_stderr_unless_logging_is_told_otherwise(tmp_path: Path) -> None:
    program = """
import logging, time
from holdfast.backends import notice
notice.PATIENCE = 0.02
with notice.compiling("holdfast.ops.embedding.cpu", cached=True):
    time.sleep(0.3)
logging.getLogger("holdfast").setLevel(logging.ERROR)
with notice.compiling("holdfast.ops.quantize.cpu", cached=True):
    time.sleep(0.3)
"""
    shown = in_new_process(program, tmp_path)
    assert shown.stderr == "holdfast: compiling embedding for this machine, once (cached afterwards) …\n"
    assert shown.stdout == ""


def test_the_compiler_tells_of_a_real_kernel(tmp_path: Path) -> None:
    program = """
import torch, holdfast as hf
from holdfast.backends import notice
notice.PATIENCE = 0.05
hf.quantize(torch.zeros(4), 0.5, dtype=torch.int8)
"""
    done = in_new_process(program, tmp_path)
    assert done.returncode == 0
    assert done.stderr == "holdfast: compiling quantize for this machine, once (cached afterwards) …\n"


def test_without_the_compiler_of_numba_the_reference_runs() -> None:
    program = """
import torch
import holdfast as hf

x = torch.linspace(-2, 2, 48).reshape(2, 3, 8).requires_grad_()
out = hf.interpolate(x, scale_factor=1.7, mode="linear")
codes = hf.quantize(x.detach(), 0.1)
(dx,) = torch.autograd.grad(out.square().sum(), x)
desc = hf.plans.QuantizePerTensorDescriptor(shape=(3,))
sku = hf.plans.QuantizePerTensorPlan.select(hf.Stream.current("cpu"), desc).sku()
print(sku.backend, out.tolist(), codes.tolist(), dx.tolist())
"""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = []
    for given in ("0", "1"):
        done = fresh.run(program, env=surroundings | {"NUMBA_DISABLE_JIT": given}, check=True)
        found.append(done.stdout.split(maxsplit=1))
    assert [backend for backend, _ in found] == ["cpu", "reference"]
    assert found[0][1] == found[1][1]
