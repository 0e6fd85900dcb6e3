"""Tests of the kernel cache on disk: invalidation, failures to write, and signals during compilation."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba import types

import fresh
from holdfast.backends import on_demand
from holdfast.backends.cpu import compile_kernel, jit
from holdfast.backends.kernel_cache import PACKAGE, Files, sources_of
from holdfast.core import importing

#: Loads or compiles one small kernel, and prints the cache hits and misses.
LOADING = """
import numpy as np
from holdfast.backends.cpu import compile_kernel, jit
from holdfast.ops.affine_grid.cpu import _measure

number = np.float32(1)
compile_kernel(_measure, (0, 0, 0), (number, number, number), 0)
print(sum(_measure.stats.cache_hits.values()), sum(_measure.stats.cache_misses.values()))
"""
LOADED, COMPILED = "1 0\n", "0 1\n"


def run(program: str, folder: Path, **more: str) -> str:
    """The output of ``program``. ``folder`` has its cache, and possibly a copy of the package to run."""
    path = os.pathsep.join([str(folder), str(PACKAGE.parent)])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path, **more}
    environment.pop("TRITON_INTERPRET", None)
    return fresh.run(program, env=environment, check=True).stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package."""
    shutil.copytree(PACKAGE, tmp_path / "holdfast", ignore=shutil.ignore_patterns("__pycache__", "pinned"))
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    source = path.read_text()
    assert before in source
    path.write_text(source.replace(before, after))


def test_a_damaged_file_and_a_constant_of_another_source_make_a_new_kernel(copied: Path) -> None:
    assert run(LOADING, copied) == COMPILED
    (file,) = (copied / "cache").rglob("*_measure*.nbc")
    file.write_bytes(file.read_bytes()[:-1])
    assert run(LOADING, copied) == COMPILED
    assert run(LOADING, copied) == LOADED
    edit(copied / "holdfast" / "ops" / "tree_sum" / "blocks.py", "\nROWS = 16\n", "\nROWS = 8\n")
    assert run(LOADING, copied) == COMPILED
    assert len(list((copied / "cache").rglob("*_measure*.nbc"))) == 1  # the old kernel is deleted


def test_a_constant_of_another_source_makes_a_new_gpu_kernel(copied: Path) -> None:
    """The key of Triton's cache includes the values of constants."""
    program = "from holdfast.ops.segment_sum import gpu\nprint(gpu.sum_segments.cache_key)"
    before = run(program, copied)
    assert run(program, copied) == before
    edit(copied / "holdfast" / "ops" / "segment_sum" / "indexed.py", "\nCHUNK = 32\n", "\nCHUNK = 16\n")
    assert run(program, copied) != before


def imported(path: Path) -> set[Path]:
    """The modules of this package that a source imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    places = [PACKAGE.joinpath(*name.split(".")[1:]) for name in names if name.split(".")[0] == "holdfast"]
    files = {file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")}
    return {file for file in files if file.is_file()}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("cpu.py")), ids=lambda path: path.parent.name)
def test_a_kernel_depends_on_all_that_its_module_imports(path: Path) -> None:
    found, new = {path}, {path}
    while new:
        new = {below for one in new for below in imported(one)} - found
        found |= new
    assert set(sources_of(path)) == found
    assert not {file.name for file in found} & {"gpu.py", "cases.py", "torch_op.py"}


def test_only_a_whole_file_is_loaded(tmp_path: Path) -> None:
    files = Files(tmp_path, "kernel", "0" * 64)
    assert files.load("key") is None
    files.save("key", [1, 2, 3])
    assert files.load("key") == [1, 2, 3] and files.load("another") is None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], whole[:40], whole[:-1], b"\x80garbage" * 9, whole[:-1] + b"?"):
        file.write_bytes(damaged)
        assert files.load("key") is None
    files.save("key", "again")
    assert files.load("key") == "again" and list(tmp_path.iterdir()) == [file]


def test_a_full_disk_costs_only_time(tmp_path: Path) -> None:
    """A limit of a few bytes per file makes writes fail as on a full disk."""
    limited = "import resource, signal\n" + "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n" + LOADING
    assert run(limited, tmp_path) == COMPILED
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []
    assert run(LOADING, tmp_path) == COMPILED


#: Simulates Ctrl-C during the import of Numba, then continues as an interactive user would.
INTERRUPTED = """
import os, signal, sys
import torch, holdfast as hf

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numba.core.dispatcher":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with SIGINT ignored
sys.meta_path.insert(0, Interrupt())
x = torch.tensor([1.0, -1.0])
try:
    hf.quantize(x, 0.5, dtype=torch.int8)
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(hf.quantize(x, 0.5, dtype=torch.int8).tolist())
"""


def test_calls_work_after_an_interrupt(tmp_path: Path) -> None:
    assert run(INTERRUPTED, tmp_path, NUMBA_CACHE_DIR="") == "interrupted\n[2, -2]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_an_import_or_a_compilation(number: int) -> None:
    came: list[str] = []
    before = signal.signal(number, lambda *_: came.append("handled"))

    def compiled(name: str) -> None:
        signal.raise_signal(number)
        came.append(name)

    try:
        compile_kernel(compiled, "compiled")
        assert came == ["compiled", "handled"]
        came.clear()
        with importing.signals_wait():
            compiled("imported")
        assert came == ["imported", "handled"]
        thread = threading.Thread(target=lambda: came.append(importing.load("holdfast:__name__")))
        thread.start()
        thread.join()
        assert came[2:] == ["holdfast"]
    finally:
        signal.signal(number, before)


def test_several_signals_are_handled_in_order_although_a_handler_raises() -> None:
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)
        if number == signal.SIGALRM:
            raise TimeoutError

    def other(number: int, frame: Any) -> None:
        """Set inside the block, which keeps it."""

    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        with pytest.raises(TimeoutError), importing.signals_wait():
            for number in (*numbers[:3], signal.SIGALRM):
                signal.raise_signal(number)
            signal.signal(signal.SIGUSR2, other)
            assert not came
        assert came == numbers[:3]
        assert [signal.getsignal(number) for number in numbers] == [handler, handler, handler, other]
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def test_a_signal_during_the_first_call_of_a_part_of_a_kernel() -> None:
    """Its handler may raise, which compiled code cannot pass on. So it is called after the kernel."""
    came: list[str] = []

    def handler(number: int, frame: Any) -> None:
        came.append("handled")
        raise TimeoutError

    def compile(function: Any, module: str) -> None:
        signal.raise_signal(signal.SIGALRM)
        came.append("compiled")

    def part(n: int) -> None:
        """A part of a kernel."""

    target = ctypes.CFUNCTYPE(None, ctypes.c_int64)(lambda n: came.append(f"called with {n}"))
    made = SimpleNamespace(address=ctypes.cast(target, ctypes.c_void_p).value)
    slot = on_demand.Slot(part, types.int64, lambda *_: made, compile)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError):
            slot._compile_and_call(7)
            for _ in range(10000):
                time.sleep(0.001)
        assert came == ["compiled", "called with 7", "handled"]
    finally:
        signal.signal(signal.SIGALRM, before)


#: Uses instructions that not every x86 processor has: fused multiply-adds, conversions of float16.
OTHER_INSTRUCTIONS = """
import numpy as np, torch
import holdfast as hf

torch.manual_seed(0)
scale = np.float32(0.013)
ties = ((torch.arange(1000) % 300 - 149.5).double() * float(scale)).float()
for x in (torch.randn(5000), ties, torch.cat([torch.randn(300), torch.tensor([float("nan"), float("inf")])])):
    quotient = np.rint(x.numpy() / scale)
    wanted = np.clip(np.where(np.isnan(quotient), 0, quotient) + 3, -128, 127)
    assert (hf.quantize(x, float(scale), 3, dtype=torch.int8).numpy() == wanted).all()
table, indices = torch.arange(-40.0, 40).reshape(5, 16).half(), torch.tensor([[0, 1, 4], [2, 2, 3]])
assert hf.embedding_bag(indices, table, mode="sum").equal(table[indices].float().sum(1).half())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the features are those of x86")
@pytest.mark.parametrize("features", ["", "+avx,+avx2,+fma,+f16c"], ids=["none", "avx2"])
def test_the_processor_that_numba_compiles_for(features: str, tmp_path: Path) -> None:
    run(OTHER_INSTRUCTIONS, tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features)


def test_functions_that_a_function_makes_have_names_of_their_own() -> None:
    """Symbols of kernels in the disk cache are made of these names."""

    def adder(amount: int, name: str = "") -> Any:
        def add(x):  # type: ignore[no-untyped-def]
            return x + amount

        return jit(add, name)

    with pytest.raises(TypeError, match=r"adder\.<locals>\.add has a closure; give it a name of its own"):
        adder(1)
    assert adder(1, "add_1").py_func.__qualname__ == "add_1"
