"""Random problems of dynamic_fake_quantize for ``holdfast bench --drawn``."""

from __future__ import annotations

import torch

from holdfast.core import formats
from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.ops.dynamic_fake_quantize.models import DynamicFakeQuantizeModel
from holdfast.ops.fake_quantize.drawn import drawn_rows


def _draw(sizes: RandomSizes) -> DynamicFakeQuantizeModel:
    codes = sizes.one_of((torch.int8, formats.INT4.torch))
    return DynamicFakeQuantizeModel("dynamic_fake_quantize", "", sizes.real, *drawn_rows(sizes), codes)


DRAWS: dict[str, DrawCase] = {"dynamic_fake_quantize": _draw}
