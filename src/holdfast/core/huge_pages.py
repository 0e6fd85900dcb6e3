"""Transparent huge pages for large results on the CPU.

The system clears a page at its first write. With pages of 4 kB these page faults take several times as long
as the kernel itself. On Linux, ``madvise(MADV_HUGEPAGE)`` requests pages of 2 MB.
"""

from __future__ import annotations

import torch

from holdfast.core import private

#: Smaller tensors are not worth a system call; bytes.
MIN_BYTES = 4 * 2**20
_PAGE = 4096


def wants_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether ``on_huge_pages`` has an effect on this tensor."""
    return tensor.is_cpu and tensor.nbytes >= MIN_BYTES


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that was not written yet; return the tensor. Has an effect on Linux."""
    if wants_huge_pages(tensor):
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        private.advise_large_pages(first, tensor.data_ptr() + tensor.nbytes - first)
    return tensor
