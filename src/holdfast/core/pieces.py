"""A workspace cut into typed pieces, known before there is a workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.stream import Workspace

#: Every piece begins at a multiple of this many bytes, wherever the workspace itself begins.
ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """``count`` elements, ``offset`` bytes from the first aligned byte of the workspace."""

    offset: int
    count: int
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """A tensor that is what the piece will be, without memory."""
        return torch.empty(self.count, dtype=self.dtype, device="meta")

    def tensor(self, workspace: Workspace) -> torch.Tensor:
        """The piece of ``workspace``."""
        assert workspace.buffer is not None
        memory = workspace.buffer.view(-1).view(torch.uint8)
        begin = first_address(workspace) - memory.data_ptr() + self.offset
        return memory[begin : begin + self.count * self.dtype.itemsize].view(self.dtype)


class Pieces:
    """Pieces taken one after another; ``size`` is what a workspace must have for all of them."""

    def __init__(self) -> None:
        self._end = 0

    def take(self, count: int, dtype: torch.dtype) -> Piece:
        piece = Piece(self._end, count, dtype)
        self._end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return piece

    @property
    def size(self) -> int:
        return self._end + ALIGNMENT if self._end else 0


def first_address(workspace: Workspace) -> int:
    """Where the pieces of a workspace begin; 0 if there is none."""
    if workspace.buffer is None:
        return 0
    return -(-workspace.buffer.data_ptr() // ALIGNMENT) * ALIGNMENT
