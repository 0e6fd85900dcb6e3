"""torch's own sample inputs (OpInfo) for the operators that ``hf.install`` replaces."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch

#: The OpInfos whose functions reach a replaced operator in forward or backward.
NAMES = {
    "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_avg_pool3d", "nn.functional.affine_grid", "nn.functional.embedding",
    "nn.functional.embedding_bag", "nn.functional.grid_sample", "nn.functional.interpolate",
    "nn.functional.upsample_bilinear", "nn.functional.upsample_nearest", "grid_sampler_2d", "grid_sampler_3d",
    "__getitem__", "gather", "index_add", "index_put", "index_select", "put", "repeat_interleave",
    "scatter_add", "scatter_reduce", "take", "take_along_dim",
}  # fmt: skip
#: Maximum number of samples of one OpInfo, and of elements of a sample's input.
MOST, LARGEST = 24, 4096
#: Roundings of the largest element that results may differ by.
ROUNDINGS = 32


def op_infos() -> list[Any]:
    """The OpInfos that are tested."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's tests need only the base class of this package.
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [info for info in op_db if info.name in NAMES]


def samples(info: Any, dtype: torch.dtype, device: str, most: int = MOST) -> list[Any]:
    torch.manual_seed(0)
    differentiable = dtype in info.supported_backward_dtypes(device)
    found = list(info.sample_inputs(device, dtype, requires_grad=differentiable))
    found = [sample for sample in found if sample.input.numel() <= LARGEST]
    return found[:: -(-len(found) // most)]


def results(function: Callable[..., Any], sample: Any, wide: torch.dtype | None = None) -> list[Any]:
    """The outputs, and the gradients of every leaf; with ``wide`` of the sample in that dtype."""

    def prepared(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            leaf = value.detach().to(wide or value.dtype)
            return leaf.requires_grad_(value.requires_grad)
        if isinstance(value, tuple | list):
            return type(value)(map(prepared, value))
        return value

    given = [prepared(value) for value in (sample.input, *sample.args)]
    named = {name: prepared(value) for name, value in sample.kwargs.items()}
    leaves = [leaf for leaf in (*given, *named.values()) if torch.is_tensor(leaf) and leaf.requires_grad]
    out = function(*given, **named)
    outs = [one for one in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(one)]
    recorded = [one for one in outs if one.requires_grad]
    draw = torch.Generator().manual_seed(1)
    narrow = sample.input.dtype if sample.input.is_floating_point() else torch.bfloat16
    wanted = [torch.randn(one.shape, generator=draw).to(narrow).to(one) for one in recorded]
    found = [one.detach() for one in outs]
    if not (recorded and leaves):
        return found
    return [*found, *torch.autograd.grad(recorded, leaves, wanted, allow_unused=True)]


def compare(found: list[Any], expected: list[Any], sample: Any) -> None:
    """Raise unless results are close, with equal strides."""
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.stride() == other.stride(), f"{one.stride()} {other.stride()} {sample}"
        largest = float(other.abs().nan_to_num(0).max()) if other.numel() else 0.0
        bound = ROUNDINGS * torch.finfo(one.dtype).eps
        torch.testing.assert_close(
            one, other.to(one.dtype), rtol=0, atol=bound * largest, msg=lambda text: f"{text}\n{sample}"
        )
