"""Memory of large results on the CPU: huge pages, which are used again after a result was freed.

The system clears a page at its first write. With pages of 4 kB these page faults take several times as long
as the kernel itself, with pages of 2 MB half as long. So a large result lies in a block of huge pages. When
the result is freed, its block waits for the next result. Waiting blocks beyond the last few are marked with
``MADV_FREE``: the system takes their pages back if it needs memory. This works on Linux; elsewhere results
are left to torch's allocator.

torch cannot resize the storage of such a result.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from holdfast.core import private

_HUGE_PAGE = 2 * 2**20
#: Smaller tensors are left to torch's allocator; bytes.
MIN_BYTES = _HUGE_PAGE
#: Most bytes for which the allocator of the C library uses freed memory again by itself. For a result up to
#: this size that is written once, its memory is faster than a block, which Python lends.
REUSED_BYTES = 32 * 2**20
#: Maximum bytes of all waiting blocks, and of those that are not marked.
WAITING_BYTES, UNMARKED_BYTES = 256 * 2**20, 32 * 2**20
#: Advice to the system: use huge pages; these pages are not needed.
_HUGE, _FREE = getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_FREE", None)


class Block:
    """``size`` bytes of huge pages. Raises OSError if the system has no memory, or no huge pages."""

    def __init__(self, size: int) -> None:
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags)
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._begin = -address % _HUGE_PAGE
        self.address = address + self._begin
        self.marked = False
        assert _HUGE is not None
        self._memory.madvise(_HUGE, self._begin, size)

    def mark(self) -> None:
        """Let the system take the pages back. Nobody may use the block meanwhile."""
        self.marked = True
        if _FREE is not None:
            with suppress(OSError):  # old systems lack this advice
                self._memory.madvise(_FREE, self._begin, self.size)

    def lend(self, size: int) -> memoryview:
        """The first ``size`` bytes. The block waits for its next use when they are freed."""
        self.marked = False
        lent = memoryview(self._memory)[self._begin : self._begin + size]
        _users[self] = weakref.ref(lent, lambda _: self._take_back())
        return lent

    def _take_back(self) -> None:
        _users.pop(self, None)
        if self.size > WAITING_BYTES:
            return
        _waiting.append(self)
        while sum(block.size for block in list(_waiting)) > WAITING_BYTES:
            del _waiting[:1]
        newer = 0
        for block in reversed(list(_waiting)):
            newer += block.size
            if newer > UNMARKED_BYTES and not block.marked and _take(block):
                block.mark()
                _waiting.insert(0, block)


# A block is taken back whenever a tensor is freed: in any thread, at any time. Both containers are changed
# by single operations of Python, so no lock is needed, which could be held by the interrupted thread itself.
#: Waiting blocks, the oldest first.
_waiting: list[Block] = []
#: References to the memory of the results that use a block.
_users: dict[Block, weakref.ref[memoryview]] = {}


def _take(block: Block) -> bool:
    """Take a block out of the waiting ones; False if another thread took it."""
    try:
        _waiting.remove(block)
    except ValueError:
        return False
    return True


def _block_of(size: int) -> Block:
    """The smallest waiting block of at least ``size`` and less than twice as many bytes, or a new block."""
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    newest = next(reversed(_waiting), None)
    if newest is not None and newest.size == size and _take(newest):
        return newest
    for block in sorted(_waiting, key=lambda block: block.size):
        if size <= block.size < 2 * size and _take(block):
            return block
    return Block(size)


def on_huge_pages(tensor: torch.Tensor, least: int = MIN_BYTES) -> torch.Tensor:
    """An uninitialized tensor like ``tensor`` on huge pages; ``tensor`` itself if it has fewer bytes."""
    if _HUGE is None or not tensor.is_cpu or tensor.nbytes < least:
        return tensor
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor
    storage = _lent_storage(tensor.nbytes)
    if storage is None:
        return tensor
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def allocation(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that allocates a tensor with the metadata of ``like``, in a block if ``like`` is in one.

    The device of ``like`` must be the current one.
    """
    shape, strides, size = tuple(like.shape), like.stride(), like.nbytes
    empty = partial(private.empty_on(like.device), shape, strides, like.dtype)
    if not any(block.address == like.data_ptr() for block in list(_users)):
        return empty
    of_nothing = partial(torch.empty, 0, dtype=like.dtype)

    def on_block() -> torch.Tensor:
        storage = _lent_storage(size)
        return empty() if storage is None else of_nothing().set_(storage, 0, shape, strides)

    return on_block


@contextmanager
def ordinary_pages() -> Iterator[None]:
    """Leave all new results to torch's allocator inside the block."""
    global _HUGE
    before, _HUGE = _HUGE, None
    try:
        yield
    finally:
        _HUGE = before


def _lent_storage(size: int) -> torch.UntypedStorage | None:
    """A storage of ``size`` bytes in a block; None if there is no memory for a new block."""
    try:
        block = _block_of(size)
    except OSError:
        return None
    return torch.frombuffer(block.lend(size), dtype=torch.uint8).untyped_storage()
