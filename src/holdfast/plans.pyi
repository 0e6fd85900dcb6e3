# Written by scripts/stubs.py (`make stubs`); do not edit.

from typing import Any

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
from holdfast.ops.dequantize.plan import (
    DequantizePerChannelArgs as DequantizePerChannelArgs,
    DequantizePerChannelBackwardArgs as DequantizePerChannelBackwardArgs,
    DequantizePerChannelBackwardDescriptor as DequantizePerChannelBackwardDescriptor,
    DequantizePerChannelBackwardPlan as DequantizePerChannelBackwardPlan,
    DequantizePerChannelDescriptor as DequantizePerChannelDescriptor,
    DequantizePerChannelPlan as DequantizePerChannelPlan,
    DequantizePerGroupArgs as DequantizePerGroupArgs,
    DequantizePerGroupBackwardArgs as DequantizePerGroupBackwardArgs,
    DequantizePerGroupBackwardDescriptor as DequantizePerGroupBackwardDescriptor,
    DequantizePerGroupBackwardPlan as DequantizePerGroupBackwardPlan,
    DequantizePerGroupDescriptor as DequantizePerGroupDescriptor,
    DequantizePerGroupPlan as DequantizePerGroupPlan,
    DequantizePerTensorArgs as DequantizePerTensorArgs,
    DequantizePerTensorBackwardArgs as DequantizePerTensorBackwardArgs,
    DequantizePerTensorBackwardDescriptor as DequantizePerTensorBackwardDescriptor,
    DequantizePerTensorBackwardPlan as DequantizePerTensorBackwardPlan,
    DequantizePerTensorDescriptor as DequantizePerTensorDescriptor,
    DequantizePerTensorPlan as DequantizePerTensorPlan,
    DequantizePerTokenArgs as DequantizePerTokenArgs,
    DequantizePerTokenBackwardArgs as DequantizePerTokenBackwardArgs,
    DequantizePerTokenBackwardDescriptor as DequantizePerTokenBackwardDescriptor,
    DequantizePerTokenBackwardPlan as DequantizePerTokenBackwardPlan,
    DequantizePerTokenDescriptor as DequantizePerTokenDescriptor,
    DequantizePerTokenPlan as DequantizePerTokenPlan,
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
from holdfast.ops.lsq_init.plan import (
    LsqInitArgs as LsqInitArgs,
    LsqInitDescriptor as LsqInitDescriptor,
    LsqInitPlan as LsqInitPlan,
)
from holdfast.ops.quantize.plan import (
    QuantizePerChannelArgs as QuantizePerChannelArgs,
    QuantizePerChannelBackwardArgs as QuantizePerChannelBackwardArgs,
    QuantizePerChannelBackwardDescriptor as QuantizePerChannelBackwardDescriptor,
    QuantizePerChannelBackwardPlan as QuantizePerChannelBackwardPlan,
    QuantizePerChannelDescriptor as QuantizePerChannelDescriptor,
    QuantizePerChannelPlan as QuantizePerChannelPlan,
    QuantizePerGroupArgs as QuantizePerGroupArgs,
    QuantizePerGroupBackwardArgs as QuantizePerGroupBackwardArgs,
    QuantizePerGroupBackwardDescriptor as QuantizePerGroupBackwardDescriptor,
    QuantizePerGroupBackwardPlan as QuantizePerGroupBackwardPlan,
    QuantizePerGroupDescriptor as QuantizePerGroupDescriptor,
    QuantizePerGroupPlan as QuantizePerGroupPlan,
    QuantizePerTensorArgs as QuantizePerTensorArgs,
    QuantizePerTensorBackwardArgs as QuantizePerTensorBackwardArgs,
    QuantizePerTensorBackwardDescriptor as QuantizePerTensorBackwardDescriptor,
    QuantizePerTensorBackwardPlan as QuantizePerTensorBackwardPlan,
    QuantizePerTensorDescriptor as QuantizePerTensorDescriptor,
    QuantizePerTensorPlan as QuantizePerTensorPlan,
    QuantizePerTokenArgs as QuantizePerTokenArgs,
    QuantizePerTokenBackwardArgs as QuantizePerTokenBackwardArgs,
    QuantizePerTokenBackwardDescriptor as QuantizePerTokenBackwardDescriptor,
    QuantizePerTokenBackwardPlan as QuantizePerTokenBackwardPlan,
    QuantizePerTokenDescriptor as QuantizePerTokenDescriptor,
    QuantizePerTokenPlan as QuantizePerTokenPlan,
)
from holdfast.ops.segment_sum.plan import (
    SegmentSumArgs as SegmentSumArgs,
    SegmentSumDescriptor as SegmentSumDescriptor,
    SegmentSumPlan as SegmentSumPlan,
)

def all() -> dict[str, type[Plan[Any, Any]]]: ...
