"""Backends: compilation and launch of kernels, and threads. No module here depends on an op.

This file registers the backends and the devices that they support. ``cpu`` and ``gpu`` import the compilers,
when a plan first needs them.
"""

from __future__ import annotations

import importlib.util
import os
import platform

import torch

from holdfast.core.registry import Backend, register_backend


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _needs_cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"runs on CPU tensors, and the stream is on {device}"


def _needs_numba(device: torch.device) -> str | None:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set, and these kernels need Numba's compiler"
    return _needs_cpu(device)


def _needs_gpu(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not interpreted():
        return "runs on CUDA tensors, and the stream is on cpu (TRITON_INTERPRET=1 interprets it there)"
    if device.type == "cuda" and interpreted():
        return "TRITON_INTERPRET=1 is set, which interprets the kernels on CPU tensors"
    return None


def _gpu_architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


register_backend(Backend("cpu", _needs_numba, lambda _: platform.machine()))
register_backend(Backend("gpu", _needs_gpu, _gpu_architecture))
register_backend(Backend("reference", _needs_cpu, lambda _: "numpy"))
