"""Large pages for large results on the CPU.

The system zeroes a page when it is first written to. In pages of 4 kB that takes several times as long as
what a kernel then does with them; so large ones are asked for, which Linux gives to those who ask.
"""

from __future__ import annotations

import torch

from holdfast.core import private

#: Fewer bytes than this are not worth a call of the system.
MIN_BYTES = 4 * 2**20
_PAGE = 4096


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory nobody has written to yet. Where there are no large pages, nothing happens."""
    if tensor.is_cpu and tensor.nbytes >= MIN_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        private.advise_large_pages(first, tensor.data_ptr() + tensor.nbytes - first)
    return tensor
