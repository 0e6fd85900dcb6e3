"""The modules as functions with the names and arguments of holdfast's, for drawn problems.

A call that no module has raises ``Inexpressible``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from holdfast.core.draw import Inexpressible
from holdfast.core.granularity import Granularity
from holdfast.nn.embedding import Embedding
from holdfast.nn.embedding_bag import EmbeddingBag
from holdfast.nn.fake_quantize import FakeQuantize


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
    tensors = [given for given in (scale, zero_point) if isinstance(given, torch.Tensor)]
    learned = any(given.requires_grad for given in tensors)
    state = {"scale": scale} if zero_point is None else {"scale": scale, "zero_point": zero_point}
    if len(tensors) < len(state) or any(given.dtype != torch.float32 for given in tensors):
        raise Inexpressible  # state is float32 tensors
    how["mode"] = "learned" if learned else "fixed"
    how |= {"grad_factor": grad_factor, "positive": False} if learned else {}
    detached = {name: given.detach() for name, given in state.items()}
    module = FakeQuantize(granularity=granularity, symmetric=zero_point is None, **detached, **how)
    return functional_call(module, state, (x,))  # type: ignore[no-any-return]


def dynamic_fake_quantize(x: torch.Tensor, *, return_scale: bool, **rule: Any) -> tuple[torch.Tensor, ...]:
    module = FakeQuantize(mode="per_batch", **rule)
    scale, zero_point = module.evaluation_scale(x.detach())
    y = module(x)
    return (y, scale) if zero_point is None else (y, scale, zero_point)


def choose_scale(x: torch.Tensor, *, symmetric: bool, **rule: Any) -> Any:
    """The state after the first batch of a moving average."""
    module = FakeQuantize(mode="ema", symmetric=symmetric, device=x.device, **rule)
    module(x.detach())
    if not x.numel() or module.report()["rejected_batches"]:
        raise Inexpressible
    return module.scale if symmetric else (module.scale, module.zero_point)
