"""The modules as functions with the names and arguments of holdfast's, for drawn problems.

A call that no module has raises ``Inexpressible``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from holdfast.core.draw import Inexpressible
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.granularity import Granularity, PerTensor
from holdfast.nn.embedding import Embedding
from holdfast.nn.embedding_bag import EmbeddingBag
from holdfast.nn.fake_quantize import FakeQuantize


def other_bits(op: str, desc: Any) -> tuple[str, ...]:
    """The results that are not those of the function: none."""
    return ()


def embedding(input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
    module = Embedding(*weight.shape, **how, device="meta", dtype=weight.dtype)
    return functional_call(module, {"weight": weight}, (input,))  # type: ignore[no-any-return]


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None,
    *,
    per_sample_weights: torch.Tensor | None = None,
    **how: Any,
) -> torch.Tensor:
    module = EmbeddingBag(*weight.shape, **how, device="meta", dtype=weight.dtype)
    given = (input, offsets, per_sample_weights)
    return functional_call(module, {"weight": weight}, given)  # type: ignore[no-any-return]


def fake_quantize(
    x: torch.Tensor,
    scale: Any,
    zero_point: Any,
    *,
    granularity: Granularity,
    grad_factor: float = 1.0,
    **how: Any,
) -> torch.Tensor:
    """A fixed scale, or a learned one if its gradient is wanted."""
    state = {"scale": scale} if zero_point is None else {"scale": scale, "zero_point": zero_point}
    if not all(isinstance(given, torch.Tensor) for given in state.values()):
        raise Inexpressible
    if not scale.dim() and not isinstance(granularity, PerTensor):
        raise Inexpressible  # a module takes one number for a whole tensor only
    learned = any(given.requires_grad for given in state.values())
    dtypes = {"scale": torch.float32, "zero_point": torch.float32 if learned else torch.int32}
    if any(given.dtype != dtypes[name] or given.shape != scale.shape for name, given in state.items()):
        raise Inexpressible
    how["mode"] = "learned" if learned else "fixed"
    how |= {"grad_factor": grad_factor, "positive": False} if learned else {}
    valid: dict[str, Any] = {name: torch.ones_like(given) for name, given in state.items()}
    try:
        module = FakeQuantize(granularity=granularity, symmetric=zero_point is None, **valid, **how)
    except InvalidDescriptor:  # a module needs two codes
        raise Inexpressible from None
    return functional_call(module, state, (x,))  # type: ignore[no-any-return]


def dynamic_fake_quantize(x: torch.Tensor, *, return_scale: bool, **rule: Any) -> tuple[torch.Tensor, ...]:
    module = FakeQuantize(mode="per_batch", **rule)
    scale, zero_point = module.evaluation_scale(x.detach())
    y = module(x)
    return (y, scale) if zero_point is None else (y, scale, zero_point)


def choose_scale(x: torch.Tensor, *, dtype: torch.dtype, symmetric: bool, **rule: Any) -> Any:
    """The state after the first batch of a moving average."""
    if x.dtype == torch.float64 or not x.numel() or not bool(x.isfinite().all()):
        raise Inexpressible  # state is float32, and such a batch is rejected
    rule["dtype"] = None if dtype.is_floating_point and dtype.itemsize > 1 else dtype  # codes of the range
    module = FakeQuantize(mode="ema", symmetric=symmetric, device=x.device, **rule)
    module(x.detach())
    return module.scale if symmetric else (module.scale, module.zero_point)
