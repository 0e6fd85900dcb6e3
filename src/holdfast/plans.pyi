# Written by scripts/stubs.py (`make stubs`); do not edit.

from dataclasses import dataclass
from typing import Any

import holdfast.ops.affine.plan as affine
import holdfast.ops.dequantize.plan as dequantize
import holdfast.ops.quantize.plan as quantize
from holdfast.core.descriptor import Descriptor as Descriptor
from holdfast.core.plan import (
    Args as Args,
    Plan as Plan,
)
from holdfast.ops.affine_grid.plan import (
    AffineGridArgs as AffineGridArgs,
    AffineGridBackwardArgs as AffineGridBackwardArgs,
    AffineGridBackwardDescriptor as AffineGridBackwardDescriptor,
    AffineGridBackwardPlan as AffineGridBackwardPlan,
    AffineGridDescriptor as AffineGridDescriptor,
    AffineGridPlan as AffineGridPlan,
)
from holdfast.ops.choose_scale.plan import (
    ChooseScaleArgs as ChooseScaleArgs,
    ChooseScaleDescriptor as ChooseScaleDescriptor,
    ChooseScalePlan as ChooseScalePlan,
    ObserveRangeArgs as ObserveRangeArgs,
    ObserveRangeDescriptor as ObserveRangeDescriptor,
    ObserveRangePlan as ObserveRangePlan,
)
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeArgs as DynamicFakeQuantizeArgs,
    DynamicFakeQuantizeBackwardArgs as DynamicFakeQuantizeBackwardArgs,
    DynamicFakeQuantizeBackwardDescriptor as DynamicFakeQuantizeBackwardDescriptor,
    DynamicFakeQuantizeBackwardPlan as DynamicFakeQuantizeBackwardPlan,
    DynamicFakeQuantizeDescriptor as DynamicFakeQuantizeDescriptor,
    DynamicFakeQuantizePlan as DynamicFakeQuantizePlan,
)
from holdfast.ops.dynamic_quantize.plan import (
    DynamicQuantizeArgs as DynamicQuantizeArgs,
    DynamicQuantizeDescriptor as DynamicQuantizeDescriptor,
    DynamicQuantizePlan as DynamicQuantizePlan,
)
from holdfast.ops.embedding.plan import (
    EmbeddingArgs as EmbeddingArgs,
    EmbeddingBackwardArgs as EmbeddingBackwardArgs,
    EmbeddingBackwardDescriptor as EmbeddingBackwardDescriptor,
    EmbeddingBackwardPlan as EmbeddingBackwardPlan,
    EmbeddingDescriptor as EmbeddingDescriptor,
    EmbeddingPlan as EmbeddingPlan,
)
from holdfast.ops.embedding_bag.plan import (
    EmbeddingBagArgs as EmbeddingBagArgs,
    EmbeddingBagBackwardArgs as EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardDescriptor as EmbeddingBagBackwardDescriptor,
    EmbeddingBagBackwardPlan as EmbeddingBagBackwardPlan,
    EmbeddingBagDescriptor as EmbeddingBagDescriptor,
    EmbeddingBagPlan as EmbeddingBagPlan,
)
from holdfast.ops.fake_quantize.plan import (
    FakeQuantizeArgs as FakeQuantizeArgs,
    FakeQuantizeBackwardArgs as FakeQuantizeBackwardArgs,
    FakeQuantizeBackwardDescriptor as FakeQuantizeBackwardDescriptor,
    FakeQuantizeBackwardPlan as FakeQuantizeBackwardPlan,
    FakeQuantizeDescriptor as FakeQuantizeDescriptor,
    FakeQuantizePlan as FakeQuantizePlan,
)
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs as FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor as FakeQuantizeLearnedBackwardDescriptor,
    FakeQuantizeLearnedBackwardPlan as FakeQuantizeLearnedBackwardPlan,
)
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs as GridSampleArgs,
    GridSampleBackwardArgs as GridSampleBackwardArgs,
    GridSampleBackwardDescriptor as GridSampleBackwardDescriptor,
    GridSampleBackwardPlan as GridSampleBackwardPlan,
    GridSampleDescriptor as GridSampleDescriptor,
    GridSamplePlan as GridSamplePlan,
)
from holdfast.ops.interpolate.plan import (
    InterpolateArgs as InterpolateArgs,
    InterpolateBackwardArgs as InterpolateBackwardArgs,
    InterpolateBackwardDescriptor as InterpolateBackwardDescriptor,
    InterpolateBackwardPlan as InterpolateBackwardPlan,
    InterpolateDescriptor as InterpolateDescriptor,
    InterpolatePlan as InterpolatePlan,
)
from holdfast.ops.lsq_init.plan import (
    LsqInitArgs as LsqInitArgs,
    LsqInitDescriptor as LsqInitDescriptor,
    LsqInitPlan as LsqInitPlan,
)
from holdfast.ops.scatter.plan import (
    GatherArgs as GatherArgs,
    GatherDescriptor as GatherDescriptor,
    GatherPlan as GatherPlan,
    ScatterArgs as ScatterArgs,
    ScatterDescriptor as ScatterDescriptor,
    ScatterPlan as ScatterPlan,
)
from holdfast.ops.segment_sum.plan import (
    SegmentSumArgs as SegmentSumArgs,
    SegmentSumDescriptor as SegmentSumDescriptor,
    SegmentSumPlan as SegmentSumPlan,
)

def all() -> dict[str, type[Plan[Any, Any]]]: ...

DequantizePerChannelBackwardArgs = dequantize.DequantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerChannelBackwardDescriptor(affine.OverChannels, dequantize.DequantizeBackwardDescriptor): ...

class DequantizePerChannelBackwardPlan(dequantize.DequantizeBackwardPlan): ...

DequantizePerChannelArgs = dequantize.DequantizeArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerChannelDescriptor(affine.OverChannels, dequantize.DequantizeDescriptor): ...

class DequantizePerChannelPlan(dequantize.DequantizePlan): ...

DequantizePerGroupBackwardArgs = dequantize.DequantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerGroupBackwardDescriptor(affine.OverGroups, dequantize.DequantizeBackwardDescriptor): ...

class DequantizePerGroupBackwardPlan(dequantize.DequantizeBackwardPlan): ...

DequantizePerGroupArgs = dequantize.DequantizeArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerGroupDescriptor(affine.OverGroups, dequantize.DequantizeDescriptor): ...

class DequantizePerGroupPlan(dequantize.DequantizePlan): ...

DequantizePerTensorBackwardArgs = dequantize.DequantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerTensorBackwardDescriptor(affine.OverTensor, dequantize.DequantizeBackwardDescriptor): ...

class DequantizePerTensorBackwardPlan(dequantize.DequantizeBackwardPlan): ...

DequantizePerTensorArgs = dequantize.DequantizeArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerTensorDescriptor(affine.OverTensor, dequantize.DequantizeDescriptor): ...

class DequantizePerTensorPlan(dequantize.DequantizePlan): ...

DequantizePerTokenBackwardArgs = dequantize.DequantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerTokenBackwardDescriptor(affine.OverTokens, dequantize.DequantizeBackwardDescriptor): ...

class DequantizePerTokenBackwardPlan(dequantize.DequantizeBackwardPlan): ...

DequantizePerTokenArgs = dequantize.DequantizeArgs

@dataclass(frozen=True, kw_only=True)
class DequantizePerTokenDescriptor(affine.OverTokens, dequantize.DequantizeDescriptor): ...

class DequantizePerTokenPlan(dequantize.DequantizePlan): ...

QuantizePerChannelBackwardArgs = quantize.QuantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerChannelBackwardDescriptor(affine.OverChannels, quantize.QuantizeBackwardDescriptor): ...

class QuantizePerChannelBackwardPlan(quantize.QuantizeBackwardPlan): ...

QuantizePerChannelArgs = quantize.QuantizeArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerChannelDescriptor(affine.OverChannels, quantize.QuantizeDescriptor): ...

class QuantizePerChannelPlan(quantize.QuantizePlan): ...

QuantizePerGroupBackwardArgs = quantize.QuantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerGroupBackwardDescriptor(affine.OverGroups, quantize.QuantizeBackwardDescriptor): ...

class QuantizePerGroupBackwardPlan(quantize.QuantizeBackwardPlan): ...

QuantizePerGroupArgs = quantize.QuantizeArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerGroupDescriptor(affine.OverGroups, quantize.QuantizeDescriptor): ...

class QuantizePerGroupPlan(quantize.QuantizePlan): ...

QuantizePerTensorBackwardArgs = quantize.QuantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerTensorBackwardDescriptor(affine.OverTensor, quantize.QuantizeBackwardDescriptor): ...

class QuantizePerTensorBackwardPlan(quantize.QuantizeBackwardPlan): ...

QuantizePerTensorArgs = quantize.QuantizeArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerTensorDescriptor(affine.OverTensor, quantize.QuantizeDescriptor): ...

class QuantizePerTensorPlan(quantize.QuantizePlan): ...

QuantizePerTokenBackwardArgs = quantize.QuantizeBackwardArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerTokenBackwardDescriptor(affine.OverTokens, quantize.QuantizeBackwardDescriptor): ...

class QuantizePerTokenBackwardPlan(quantize.QuantizeBackwardPlan): ...

QuantizePerTokenArgs = quantize.QuantizeArgs

@dataclass(frozen=True, kw_only=True)
class QuantizePerTokenDescriptor(affine.OverTokens, quantize.QuantizeDescriptor): ...

class QuantizePerTokenPlan(quantize.QuantizePlan): ...
