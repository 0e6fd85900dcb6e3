"""Transparent huge pages for large results on the CPU.

The system clears a page at its first write. With pages of 4 kB these page faults take several times as long
as the kernel itself. On Linux, ``madvise(MADV_HUGEPAGE)`` requests pages of 2 MB.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

#: Smaller tensors are not worth a system call; bytes.
MIN_BYTES = 4 * 2**20
_PAGE = 4096
_MADV_HUGEPAGE = 14


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = function
    return found


_madvise = _find_madvise()


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that was not written yet; return the tensor. Has an effect on Linux."""
    if _madvise is not None and tensor.is_cpu and tensor.nbytes >= MIN_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(first, tensor.data_ptr() + tensor.nbytes - first, _MADV_HUGEPAGE)
    return tensor
