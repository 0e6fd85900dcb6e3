"""Where a plan runs, and the memory it may use there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgs, WorkspaceTooSmall
from holdfast.core.pages import fresh


@dataclass(frozen=True)
class Stream:
    """A device, and on CUDA the queue on it. On the CPU there is one queue: the calling thread."""

    device: torch.device
    handle: int = 0

    @classmethod
    def current(cls, device: str | torch.device = "cpu") -> Stream:
        """The stream that torch is using on ``device`` right now."""
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
        return cls(torch.device("cuda", index), torch.cuda.current_stream(index).cuda_stream)

    @classmethod
    def wrap(cls, stream: Any) -> Stream:
        """A ``torch.cuda.Stream`` as a holdfast one."""
        return cls(stream.device, stream.cuda_stream)


CPU_STREAM = Stream(torch.device("cpu"))


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that the caller owns. Its content means nothing before and after a run."""

    buffer: torch.Tensor | None = None

    @classmethod
    def allocate(cls, size: int, device: str | torch.device) -> Workspace:
        """A workspace of ``size`` bytes; none at all for 0."""
        return cls(fresh(torch.empty(size, dtype=torch.uint8, device=device)) if size else None)

    @classmethod
    def of(cls, buffer: Any) -> Workspace:
        """A tensor of the caller as a workspace."""
        if not isinstance(buffer, torch.Tensor):
            raise InvalidArgs(
                f"the workspace is a {type(buffer).__name__}; it must be a Workspace, a tensor or None."
            )
        return cls(buffer)

    @property
    def size(self) -> int:
        return 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()

    def require(self, size: int, device: torch.device) -> None:
        """Raise unless there are ``size`` bytes on ``device``, in one piece."""
        if self.size < size:
            raise WorkspaceTooSmall(
                f"the workspace has {self.size} bytes and the plan needs {size}; "
                "allocate plan.workspace_size() bytes, for example with Workspace.allocate."
            )
        if (
            self.buffer is not None
            and size
            and (self.buffer.device != device or not self.buffer.is_contiguous())
        ):
            raise InvalidArgs(
                f"the workspace is a {'' if self.buffer.is_contiguous() else 'non-'}contiguous tensor on "
                f"{self.buffer.device}; the plan needs a contiguous one on {device}."
            )


NO_WORKSPACE = Workspace()
