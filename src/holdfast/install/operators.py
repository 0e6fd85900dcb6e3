"""The torch operators that ``install`` replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.install.serving import Serve, into

#: What torch.compile does with an operator.
KEPT = "yes: the compiled code calls the operator"
TRACED = "yes: the compiled code calls the operator of holdfast"
OWN = "no: torch may compile this forward pass itself; it is deterministic"
WITH_FLAG = "with the deterministic flag: the compiled code then calls this operator or index_put"


@dataclass(frozen=True)
class Operator:
    """An operator of torch. ``family`` is its name in ``include`` and ``exclude``."""

    #: Such as "upsample_bilinear2d_backward.grad_input".
    name: str
    family: str
    serve: Serve
    #: Whether compiled code uses the kernel.
    compiled: str = KEPT
    devices: tuple[str, ...] = ("CPU", "CUDA")
    #: Which calls are served, in words.
    sizes: str = "any"

    @property
    def base(self) -> str:
        """The name without the overload."""
        return self.name.partition(".")[0]


def with_out(operator: Operator, overload: str, argument: str) -> Iterator[Operator]:
    """An operator, and its overload that writes into ``argument``."""
    yield operator
    name = f"{operator.base}.{overload}"
    serve = into(operator.serve, argument)
    yield Operator(name, operator.family, serve, operator.compiled, operator.devices, operator.sizes)
