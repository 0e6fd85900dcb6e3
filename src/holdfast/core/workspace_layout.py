"""Workspace layouts: typed regions of a workspace, planned before the workspace is allocated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch

from holdfast.core.stream import Workspace

#: Alignment of the address of every region, bytes; also if the workspace itself is unaligned.
ALIGNMENT = 256
#: Largest workspace of a bound launch on the CPU, which gets new memory in each call; bytes.
BOUND_BYTES = 2**22
#: Alignment of the parts of a region, elements.
TOGETHER = 16


@dataclass(frozen=True)
class Region:
    """``count`` elements, ``offset`` bytes from the first aligned byte of the workspace."""

    offset: int
    count: int
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """A meta tensor with the size and dtype of the region."""
        return torch.empty(self.count, dtype=self.dtype, device="meta")

    def tensor(self, workspace: Workspace) -> torch.Tensor:
        """The region as a tensor."""
        assert workspace.buffer is not None
        storage, size = workspace.buffer.untyped_storage(), self.count * self.dtype.itemsize
        if not size:
            return torch.empty(0, dtype=self.dtype, device=storage.device)
        begin = first_address(workspace) - storage.data_ptr() + self.offset
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[begin : begin + size]
        if begin % self.dtype.itemsize:  # a storage of foreign memory that is not aligned itself
            return torch.frombuffer(memory.numpy(), dtype=self.dtype)
        return memory.view(self.dtype)


def step_of(size: int) -> int:
    """Bytes from the start of a region of ``size`` bytes to the start of the next region."""
    return (-(-size // ALIGNMENT) + 1) * ALIGNMENT


class WorkspaceLayout:
    """Regions that follow each other in a workspace of ``size`` bytes.

    Each region is followed by a gap of at least ALIGNMENT bytes. Kernels must not write to gaps.
    """

    def __init__(self) -> None:
        self._end = 0
        self._ranges: list[tuple[int, int]] = []

    def take(self, count: int, dtype: torch.dtype) -> Region:
        region = Region(self._end, count, dtype)
        self._ranges.append((self._end, self._end + count * dtype.itemsize))
        self._end += step_of(count * dtype.itemsize)
        return region

    def take_together(self, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Region, list[Region]]:
        """Take one region, so that one launch can clear it, and its parts of ``sizes`` elements."""
        padded = [-(-size // TOGETHER) * TOGETHER for size in sizes]
        whole = self.take(sum(padded), dtype)
        offsets = [whole.offset + dtype.itemsize * sum(padded[:i]) for i in range(len(padded))]
        parts = [Region(offset, size, dtype) for offset, size in zip(offsets, sizes, strict=True)]
        return whole, parts

    def take_rows(self, rows: int, size: int) -> Region:
        """Take ``rows`` regions of ``size`` bytes, ``step_of(size)`` bytes apart; return the first."""
        first, *_ = (self.take(size, torch.uint8) for _ in range(rows))
        return first

    @contextmanager
    def reusing(self, start: int) -> Iterator[None]:
        """Regions taken inside the block use the memory from byte ``start`` once more."""
        end, self._end = self._end, start
        yield
        self._end = max(self._end, end)

    def take_again(self, times: int) -> None:
        """Repeat all regions taken so far ``times`` times, each time ``size`` bytes further."""
        once, size = list(self._ranges), self._end
        for time in range(1, times + 1):
            self._ranges += [(begin + time * size, end + time * size) for begin, end in once]
        self._end += times * size

    @property
    def size(self) -> int:
        # The gap after the last region leaves room to align the start of the workspace.
        return self._end if any(end > begin for begin, end in self._ranges) else 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The half-open byte range of each region, relative to the first aligned byte."""
        return list(self._ranges)


def workspace_overruns(layouts: Sequence[WorkspaceLayout], workspace: Workspace, filled: int) -> list[str]:
    """Error messages for bytes written outside the regions of a workspace that was filled with ``filled``.

    The run used the ``layouts`` one after another. The workspace may be larger than necessary: bytes after
    the last region are checked too.
    """
    if workspace.buffer is None:
        return []
    memory = workspace.buffer.view(-1).view(torch.uint8)
    stray, first = (memory != filled).cpu(), first_address(workspace) - memory.data_ptr()
    regions = {region for layout in layouts for region in layout.ranges}
    for begin, end in regions:
        stray[first + begin : first + end] = False
    by_end = [(0, 0), *sorted(regions, key=itemgetter(1))]
    ends, by_piece = [end for _, end in by_end], dict[tuple[int, int], list[int]]()
    for place in (stray.nonzero().flatten() - first).tolist():
        before = by_end[max(bisect_right(ends, place) - 1, 0)]
        by_piece.setdefault(before, []).append(place)
    return [
        f"piece {begin} to {end} of the workspace was overrun: {len(found)} bytes were written, the last "
        f"{found[-1] + 1 - end} past its end"
        for (begin, end), found in by_piece.items()
    ]


def first_address(workspace: Workspace) -> int:
    """The first aligned address of a workspace; 0 if it has no buffer."""
    if workspace.buffer is None:
        return 0
    return -(-workspace.buffer.data_ptr() // ALIGNMENT) * ALIGNMENT
