"""Large pages for large results on the CPU.

The system zeroes a page when it is first written to. In pages of 4 kB that takes several times as long as
what a kernel then does with them; so large ones are asked for, which Linux gives to those who ask.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

#: Fewer bytes than this are not worth a call of the system.
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
    """The tensor, whose memory nobody has written to yet. Where there are no large pages, nothing happens."""
    if _madvise is not None and tensor.is_cpu and tensor.nbytes >= MIN_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(first, tensor.data_ptr() + tensor.nbytes - first, _MADV_HUGEPAGE)
    return tensor
