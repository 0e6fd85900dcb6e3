"""The torch operator of lsq_init: registration, tracing, vmap, and ``hf.lsq_init``."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch

from holdfast.core.autograd import constant, register_constant
from holdfast.core.checks import require_tensor
from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.granularity import ONE_SCALE, Granularity, granularity_named, validate_granularity
from holdfast.core.repeated import Work
from holdfast.core.torch_op import (
    by_sample,
    cached_plan,
    define,
    named_dtype,
    register_vmap,
    select_plan,
)
from holdfast.ops.affine.torch_op import code_range
from holdfast.ops.choose_scale.torch_op import empty_scale
from holdfast.ops.fake_quantize.plan import FakeQuantizeDescriptor, refused_learning
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitPlan

__all__ = ["lsq_init"]


@cached_plan
def _plan(shape, input_dtype, device, granularity, dtype, q_min, q_max):
    codes = FakeQuantizeDescriptor(shape=(), dtype=dtype and parse_dtype(dtype), q_min=q_min, q_max=q_max)
    codes.validate()
    if codes.codes.is_float:
        raise InvalidDescriptor(refused_learning(codes.codes))
    return select_plan(
        LsqInitPlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), q_max=codes.code_range[1],
    )  # fmt: skip


def _lsq_init(x, granularity, dtype, q_min, q_max):
    plan = _plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max)
    scale = empty_scale(x, granularity)
    return Work(plan, LsqInitArgs(x=x, scale=scale), scale)


def _lsq_init_fake(x, granularity, *codes):
    return empty_scale(x, granularity)


_call = define(
    "lsq_init", "(Tensor x, str granularity, str? dtype, int? q_min, int? q_max) -> Tensor", _lsq_init,
    _lsq_init_fake,
)  # fmt: skip
register_constant("lsq_init")
register_vmap("lsq_init", by_sample(_call))


def lsq_init(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    granularity: Granularity = ONE_SCALE,
) -> torch.Tensor:
    """The initial scale of LSQ: ``2 * mean(|x|) / sqrt(q_max)``.

    ``dtype`` is the dtype of the codes, or ``q_min`` and ``q_max`` give their range; one of the two is
    required. The scale is float32, or float64 if ``x`` is. It is at least 1e-12, also for zeros, and NaN if
    an element is NaN. No gradient flows through it.

    >>> import torch, holdfast as hf
    >>> weight = torch.tensor([[1.0, -3.0, 2.0], [0.0, 0.0, 0.0]])
    >>> hf.lsq_init(weight, q_min=-4, q_max=4, granularity=hf.PerChannel(0))
    tensor([2.0000e+00, 1.0000e-12])
    """
    require_tensor("x", x)
    validate_granularity(granularity)
    codes = None if dtype is None else named_dtype("dtype", dtype)
    return _call(constant(x), granularity.name, codes, *code_range(q_min, q_max))  # type: ignore[no-any-return]
