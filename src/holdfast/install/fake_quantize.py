"""torch's operators of fake quantization, replaced on request: ``install(fake_quantize=True)``.

Results can differ from torch's by one code: torch multiplies by the reciprocal of the scale and adds the zero
point before it rounds, holdfast divides by the scale and rounds.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.granularity import ONE_SCALE, PerChannel
from holdfast.install.operators import Operator
from holdfast.install.serving import PassOn, require_float
from holdfast.ops.affine.torch_op import shared_arguments
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.torch_op import backward, fake_quantize

_COMPILED = "no: the compiled code has torch's own arithmetic"


def _served(x, scale, zero_point, granularity, q_min, q_max):
    """The fake-quantized tensor, and the mask of its gradient."""
    require_float(x)
    if not x.numel():
        raise PassOn("the tensor is empty")
    # As in torch, which also waits for the device if they are a tensor.
    least, most = zero_point.aminmax() if torch.is_tensor(zero_point) else (zero_point, zero_point)
    if not q_min <= least <= most <= q_max:
        raise PassOn("a zero point is not in the range of the codes")
    ste = SteKind.IN_RANGE
    with torch.no_grad():
        y = fake_quantize(x, scale, zero_point, q_min=q_min, q_max=q_max, granularity=granularity, ste=ste)
        shared = shared_arguments(scale, zero_point)
        ones = torch.ones_like(x)
        mask = backward(ones, x, *shared, granularity.name, None, q_min, q_max, str(ste))
    return y, mask.bool()


def _per_tensor(self, scale, zero_point, quant_min, quant_max):
    return _served(self, scale, zero_point, ONE_SCALE, quant_min, quant_max)


def _per_channel(self, scale, zero_point, axis, quant_min, quant_max):
    if axis < 0 or scale.dtype not in (torch.float32, torch.bfloat16):
        raise PassOn("torch refuses a negative axis, and other scales than float32 and bfloat16")
    if zero_point.is_floating_point():
        raise PassOn("the zero points are floats, which torch does not round")
    return _served(self, scale, zero_point, PerChannel(axis), quant_min, quant_max)


def operators() -> Iterator[Operator]:
    for kind, serve in (("tensor", _per_tensor), ("channel", _per_channel)):
        yield Operator(f"fake_quantize_per_{kind}_affine_cachemask", "fake_quantize", serve, _COMPILED)
