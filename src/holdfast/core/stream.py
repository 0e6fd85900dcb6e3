"""Streams and workspaces: where a plan runs, and the scratch memory that it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.checks import kind_of, refused_kind, refused_memory, whole_number
from holdfast.core.errors import InvalidArgs, WorkspaceTooSmall
from holdfast.core.huge_pages import on_huge_pages


@dataclass(frozen=True)
class Stream:
    """A device and, on CUDA, a stream of that device. On the CPU, work runs in the calling thread."""

    device: torch.device
    handle: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.device, torch.device) or not isinstance(self.handle, int):
            raise InvalidArgs(
                f"a stream was made of {kind_of(self.device)} and {kind_of(self.handle)}; it "
                "takes a torch.device and the number of a CUDA stream. Use Stream.current() or Stream.wrap()."
            )

    @classmethod
    def current(cls, device: str | torch.device = "cpu") -> Stream:
        """torch's current stream on ``device``."""
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise InvalidArgs(
                f"a stream on {device!r} was asked for; accepted are cpu and cuda devices."
            ) from None
        if device.type == "cpu":
            return CPU_STREAM
        if device.type != "cuda":
            raise InvalidArgs(f"a stream on {device} was asked for; accepted are cpu and cuda devices.")
        if not torch.cuda.is_available():
            raise InvalidArgs("a CUDA stream was asked for, but this torch sees no CUDA device; use 'cpu'.")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InvalidArgs(
                f"a stream on {device} was asked for; there are {torch.cuda.device_count()} devices."
            )
        return cls(torch.device("cuda", index), torch.cuda.current_stream(index).cuda_stream)

    @classmethod
    def wrap(cls, stream: Any) -> Stream:
        """A ``torch.cuda.Stream`` as a holdfast ``Stream``."""
        if not hasattr(stream, "cuda_stream"):
            raise InvalidArgs(f"{kind_of(stream)} was given as a stream; wrap a torch.cuda.Stream.")
        return cls(stream.device, stream.cuda_stream)


CPU_STREAM = Stream(torch.device("cpu"))


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that the caller owns. Its content is undefined before and after a run."""

    buffer: torch.Tensor | None = None
    #: Device, address, bytes of the storage and bytes of the buffer when the buffer was last accepted.
    _accepted: tuple[torch.device | None, int, int, int] = field(
        default=(None, 0, 0, 0), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.buffer is not None and not isinstance(self.buffer, torch.Tensor):
            raise InvalidArgs(
                f"the workspace is {kind_of(self.buffer)}; it must be a Workspace, a tensor or None."
            )

    @classmethod
    def allocate(cls, size: int, device: str | torch.device) -> Workspace:
        """A workspace of ``size`` bytes; without a buffer if ``size`` is 0."""
        size = whole_number("size", size, 0, 2**63 - 1)
        if not size:
            return NO_WORKSPACE
        try:
            buffer = on_huge_pages(torch.empty(size, dtype=torch.uint8, device=device))
        except TypeError:
            raise InvalidArgs(
                f"a workspace on {device!r} was asked for; it must be a device, such as 'cpu'."
            ) from None
        made = cls(buffer)
        object.__setattr__(made, "_accepted", (buffer.device, buffer.data_ptr(), size, size))
        return made

    @classmethod
    def of(cls, buffer: Any) -> Workspace:
        """A workspace that uses the memory of a tensor."""
        return cls(buffer)

    @property
    def size(self) -> int:
        return 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()

    def require(self, size: int, device: torch.device) -> int:
        """The address of the buffer. Raises unless it has ``size`` contiguous bytes on ``device``."""
        buffer = self.buffer
        where, address, room, accepted = self._accepted
        if (
            buffer is not None
            and accepted >= size
            and where == device
            and buffer.data_ptr() == address
            and buffer.untyped_storage().nbytes() == room
        ):
            return address
        return self._accept(size, device)

    def _accept(self, size: int, device: torch.device) -> int:
        buffer = self.buffer
        reason = "" if buffer is None else refused_kind("the workspace", buffer)
        if reason:
            raise InvalidArgs(reason)
        if buffer is None or self.size < size:
            raise WorkspaceTooSmall(
                f"the workspace has {self.size} bytes and the plan needs {size}; "
                "allocate plan.workspace_size() bytes, for example with Workspace.allocate."
            )
        if buffer.device != device or not buffer.is_contiguous():
            raise InvalidArgs(
                f"the workspace is a {'' if buffer.is_contiguous() else 'non-'}contiguous tensor on "
                f"{buffer.device}; the plan needs a contiguous one on {device}."
            )
        reason = refused_memory("the workspace", buffer)
        if reason:
            raise InvalidArgs(reason)
        address = buffer.data_ptr()
        accepted = (device, address, buffer.untyped_storage().nbytes(), self.size)
        object.__setattr__(self, "_accepted", accepted)
        return address


NO_WORKSPACE = Workspace()
