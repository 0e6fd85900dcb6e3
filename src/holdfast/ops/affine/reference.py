"""Scales seen from the tensor, in NumPy."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.dtypes import ZERO_POINT_LIMIT, Float
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.numerics.reference import Array, compute_type, widen


def spread(values: Array, granularity: Granularity, shape: tuple[int, ...]) -> Array:
    """One value for each scale, as an array that broadcasts against the tensor's shape."""
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
    """The scale in the compute type; a host scale is rounded to it once."""
    if isinstance(scale, torch.Tensor):
        return spread(widen(scale, compute), granularity, shape)
    return np.asarray(compute_type(compute)(scale))


def zero_point_array(
    zero_point: torch.Tensor | int | None, granularity: Granularity, shape: tuple[int, ...]
) -> Array:
    """The zero point as integers; none is 0. A floating one is rounded half to even, and NaN is 0."""
    if isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point():
        whole = np.rint(zero_point.detach().double().numpy())
        whole = np.clip(np.where(np.isnan(whole), 0, whole), -ZERO_POINT_LIMIT, ZERO_POINT_LIMIT)
        return spread(whole.astype(np.int64), granularity, shape)
    if isinstance(zero_point, torch.Tensor):
        return spread(zero_point.numpy().astype(np.int64), granularity, shape)
    return np.asarray(min(max(zero_point or 0, -(2**31)), 2**31 - 1))


def pack(codes: Array, bits: int) -> Array:
    """Codes side by side in bytes along the last axis, low bits first; unused bits are 0."""
    per_byte = 8 // bits
    fill = -codes.shape[-1] % per_byte
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, fill)])
    places = (padded & (2**bits - 1)).reshape(*padded.shape[:-1], -1, per_byte)
    packed: Array = np.bitwise_or.reduce(places << (np.arange(per_byte) * bits), axis=-1).astype(np.uint8)
    return packed


def unpack(packed: Array, bits: int, signed: bool, length: int) -> Array:
    """The codes of ``pack``, the first ``length`` along the last axis."""
    places = packed[..., None].astype(np.int32) >> (np.arange(8 // bits, dtype=np.int32) * bits)
    codes: Array = (places & (2**bits - 1)).reshape(*packed.shape[:-1], -1)[..., :length]
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes
