"""Every input there is: all float16 and bfloat16 values, all codes, and on CUDA all float32 values.

Sixteen-bit inputs and codes are few enough to go through the reference. The 2^32 float32 values go through
the cpu backend, itself proven against the reference, on all of its threads, and the gpu backend beside it.

Each module here but ``machinery`` sweeps one family of ops: ``sweeps`` goes through the sixteen-bit inputs,
and ``FLOAT32`` lists what is tried on all float32 values.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from holdfast.proof.conformance import gpu_way
from holdfast.proof.exhaustive.machinery import Sweep, over_float32

__all__ = ["Sweep", "sweeps"]


def sweeps() -> Iterator[Sweep]:
    """Every sweep that this machine can do."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "machinery"]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    for module in modules:
        yield from module.sweeps()
    gpu = gpu_way()
    if gpu is not None and gpu.device == "cuda":
        yield from over_float32([trial for module in modules for trial in module.FLOAT32])
