"""dynamic_quantize in NumPy: choose_scale, then quantize."""

from __future__ import annotations

import numpy as np

from holdfast.numerics.reference import ReferenceKernel, store, widen
from holdfast.ops.affine.reference import pack, scale_array, zero_point_array
from holdfast.ops.choose_scale.reference import observe_range, scale_of_range, zero_point_of_range
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizeDescriptor
from holdfast.ops.quantize.reference import quantize, quantize_to_float


class DynamicQuantize(ReferenceKernel[DynamicQuantizeDescriptor]):
    """dynamic_quantize as a kernel. The codes are those of the stored scale."""

    def run(self, args: DynamicQuantizeArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        ends = desc.ends(*desc.code_range)
        x = widen(args.x, compute)
        low, high = observe_range(x, desc.granularity)
        scale = scale_of_range(low, high, *ends, desc.symmetric)
        store(args.scale, scale)
        if args.zero_point is not None:
            store(args.zero_point, zero_point_of_range(low, scale, *ends))
        s = scale_array(args.scale, desc.granularity, desc.shape, compute)
        z = zero_point_array(args.zero_point, desc.granularity, desc.shape)
        if desc.codes.is_float:
            codes = quantize_to_float(x, s, desc.codes)
        else:
            codes = np.asarray(quantize(x, s, z, *desc.code_range, compute))
        if codes.size:  # a tensor without elements may have a scale
            store(args.q, pack(codes, desc.codes.bits) if desc.per_byte > 1 else codes)
