"""Mutants of dynamic_quantize, in addition to those of choose_scale."""

from __future__ import annotations

import torch

from holdfast.core.dtypes import Float
from holdfast.core.granularity import Granularity
from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array
from holdfast.ops.affine import reference as affine
from holdfast.ops.affine.mutants import nibbles_swapped
from holdfast.ops.quantize.mutants import reciprocal_codes, ties_away


def half_precision(
    scale: torch.Tensor, granularity: Granularity, shape: tuple[int, ...], compute: Float
) -> Array:
    """Round the scale to bfloat16."""
    return affine.scale_array(scale.bfloat16(), granularity, shape, compute)


_D = ("dynamic_quantize forward",)

MUTANTS = (
    Mutant("swapped nibbles", nibbles_swapped, _D),
    Mutant("scale in half precision", instead_of("scale_array", half_precision), _D),
    Mutant("codes by the reciprocal", instead_of("quantize", reciprocal_codes), _D),
    Mutant("ties away from zero", instead_of("quantize", ties_away), _D),
)
