"""Branches of torch's Python code that avoid an operator when deterministic algorithms are on.

``torch.nn.functional.interpolate`` calls a decomposition for bilinear and trilinear images on CUDA. Its
gradient is many times slower than an operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.compiler import is_compiling

from holdfast.core.errors import HoldfastError
from holdfast.install import private
from holdfast.install.interpolate import can_resize


def replace(names: Collection[str]) -> Callable[[], None]:
    """Replace the branches for these operators; return a function that restores them."""
    module = private.linear_branch()
    if module is None or not {"upsample_bilinear2d", "upsample_trilinear3d"} & set(names):
        return lambda: None
    original = module._upsample_linear_vec

    def upsample_linear_vec(input: Any, output_size: Any, align_corners: Any, scale_factors: Any) -> Any:
        served = {4: "upsample_bilinear2d_backward", 5: "upsample_trilinear3d_backward"}.get(input.dim())
        if served in names and not is_compiling() and _has_gradient(input, output_size, align_corners):
            return private.upsample_linear(input, output_size, align_corners, scale_factors)
        return original(input, output_size, align_corners, scale_factors)

    module._upsample_linear_vec = upsample_linear_vec

    def restore() -> None:
        module._upsample_linear_vec = original

    return restore


def _has_gradient(image: torch.Tensor, size: Any, align_corners: bool) -> bool:
    """Whether holdfast has the gradient. Otherwise torch's operator would raise in backward."""
    mode = "bilinear" if image.dim() == 4 else "trilinear"
    try:
        return size is None or can_resize(image, size, mode, align_corners)
    except HoldfastError:
        return False
