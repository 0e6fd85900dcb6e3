"""A valid call of every public function, for tests that run over all functions and arguments."""

from __future__ import annotations

from typing import Any

import torch

from holdfast import ops
from holdfast.core.calls import Call

CALLS: dict[str, Call] = {
    name: call for own in ops.modules("calls") if hasattr(own, "CALLS") for name, call in own.CALLS.items()
}

#: Every tensor argument of every call.
TENSORS = [(name, argument) for name, call in CALLS.items() for argument in call.tensors]


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
