"""Scales, zero points and packed codes in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.core.dtypes import ZERO_POINT_LIMIT, Float
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.numerics.reference import Array, compute_type, widen
from holdfast.ops.affine.plan import ScaledDescriptor


def broadcast_scales(values: Array, granularity: Granularity, shape: tuple[int, ...]) -> Array:
    """Reshape one value per scale so that it broadcasts against a tensor of ``shape``."""
    if isinstance(granularity, PerTensor):
        return values.reshape(())
    if isinstance(granularity, PerChannel):
        axis = granularity.axis % len(shape)
        return values.reshape([size if d == axis else 1 for d, size in enumerate(shape)])
    if isinstance(granularity, PerToken):
        return values.reshape((*shape[:-1], 1)) if shape else values.reshape(())
    assert isinstance(granularity, PerGroup)
    axis = granularity.axis % len(shape)
    groups = [size // granularity.group_size if d == axis else size for d, size in enumerate(shape)]
    return np.repeat(values.reshape(groups), granularity.group_size, axis=axis)


def scale_array(
    scale: torch.Tensor | float, granularity: Granularity, shape: tuple[int, ...], compute: Float
) -> Array:
    """The scale in the compute type. A Python float is rounded to it once."""
    if isinstance(scale, torch.Tensor):
        return broadcast_scales(widen(scale, compute), granularity, shape)
    return np.asarray(compute_type(compute)(scale))


def zero_point_array(
    zero_point: torch.Tensor | int | None, granularity: Granularity, shape: tuple[int, ...]
) -> Array:
    """The zero point as integers. None and NaN become 0; a floating one is rounded half to even."""
    if isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point():
        whole = np.rint(zero_point.detach().double().numpy())
        whole = np.clip(np.where(np.isnan(whole), 0, whole), -ZERO_POINT_LIMIT, ZERO_POINT_LIMIT)
        return broadcast_scales(whole.astype(np.int64), granularity, shape)
    if isinstance(zero_point, torch.Tensor):
        return broadcast_scales(zero_point.numpy().astype(np.int64), granularity, shape)
    return np.asarray(min(max(zero_point or 0, -(2**31)), 2**31 - 1))


def scale_and_zero_point(args: Any, desc: ScaledDescriptor) -> tuple[Array, Array]:
    """The scale and the zero point of ``args``, which broadcast against the tensor."""
    scale = scale_array(args.scale, desc.granularity, desc.shape, desc.real.compute)
    return scale, zero_point_array(args.zero_point, desc.granularity, desc.shape)


def pack(codes: Array, bits: int) -> Array:
    """Pack codes into bytes along the last axis, low bits first. Unused bits are 0."""
    per_byte = 8 // bits
    fill = -codes.shape[-1] % per_byte
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, fill)])
    fields = (padded & (2**bits - 1)).reshape(*padded.shape[:-1], -1, per_byte)
    packed: Array = np.bitwise_or.reduce(fields << (np.arange(per_byte) * bits), axis=-1).astype(np.uint8)
    return packed


def unpack(packed: Array, bits: int, signed: bool, length: int) -> Array:
    """Undo ``pack``. Returns the first ``length`` codes of the last axis."""
    fields = packed[..., None].astype(np.int32) >> (np.arange(8 // bits, dtype=np.int32) * bits)
    codes: Array = (fields & (2**bits - 1)).reshape(*packed.shape[:-1], -1)[..., :length]
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes
