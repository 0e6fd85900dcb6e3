"""Forward and backward kernels for training that hold their bits.

Everything public is named here. Importing this imports neither Numba nor Triton.
"""

from __future__ import annotations

from holdfast import backends as _backends  # noqa: F401  (registers the backends)
from holdfast import nn
from holdfast.core.contract import (
    NUMERICS_VERSION,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    Verdict,
)
from holdfast.core.deferred import check_errors
from holdfast.core.descriptor import Descriptor
from holdfast.core.errors import (
    HoldfastError,
    InvalidArgs,
    InvalidDescriptor,
    InvalidIndex,
    Unsupported,
    WorkspaceTooSmall,
)
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import Args, Plan
from holdfast.core.registry import plans
from holdfast.core.stream import Stream, Workspace
from holdfast.ops.affine.packing import pack, unpack
from holdfast.ops.choose_scale.plan import (
    ChooseScaleArgs,
    ChooseScaleDescriptor,
    ChooseScalePlan,
    ObserveRangeArgs,
    ObserveRangeDescriptor,
    ObserveRangePlan,
)
from holdfast.ops.choose_scale.torch_op import choose_scale, observe_range, scale_of_range
from holdfast.ops.dequantize.plan import (
    DequantizePerChannelArgs,
    DequantizePerChannelBackwardArgs,
    DequantizePerChannelBackwardDescriptor,
    DequantizePerChannelBackwardPlan,
    DequantizePerChannelDescriptor,
    DequantizePerChannelPlan,
    DequantizePerGroupArgs,
    DequantizePerGroupBackwardArgs,
    DequantizePerGroupBackwardDescriptor,
    DequantizePerGroupBackwardPlan,
    DequantizePerGroupDescriptor,
    DequantizePerGroupPlan,
    DequantizePerTensorArgs,
    DequantizePerTensorBackwardArgs,
    DequantizePerTensorBackwardDescriptor,
    DequantizePerTensorBackwardPlan,
    DequantizePerTensorDescriptor,
    DequantizePerTensorPlan,
    DequantizePerTokenArgs,
    DequantizePerTokenBackwardArgs,
    DequantizePerTokenBackwardDescriptor,
    DequantizePerTokenBackwardPlan,
    DequantizePerTokenDescriptor,
    DequantizePerTokenPlan,
)
from holdfast.ops.dequantize.torch_op import dequantize
from holdfast.ops.dynamic_quantize.plan import (
    DynamicQuantizeArgs,
    DynamicQuantizeDescriptor,
    DynamicQuantizePlan,
)
from holdfast.ops.dynamic_quantize.torch_op import quantize_dynamic
from holdfast.ops.embedding.plan import (
    EmbeddingArgs,
    EmbeddingBackwardArgs,
    EmbeddingBackwardDescriptor,
    EmbeddingBackwardPlan,
    EmbeddingDescriptor,
    EmbeddingPlan,
)
from holdfast.ops.embedding.torch_op import embedding
from holdfast.ops.embedding_bag.plan import (
    EmbeddingBagArgs,
    EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardDescriptor,
    EmbeddingBagBackwardPlan,
    EmbeddingBagDescriptor,
    EmbeddingBagPlan,
)
from holdfast.ops.embedding_bag.torch_op import embedding_bag
from holdfast.ops.fake_quantize.plan import (
    FakeQuantizeArgs,
    FakeQuantizeBackwardArgs,
    FakeQuantizeBackwardDescriptor,
    FakeQuantizeBackwardPlan,
    FakeQuantizeDescriptor,
    FakeQuantizePlan,
    SteKind,
)
from holdfast.ops.fake_quantize.torch_op import fake_quantize
from holdfast.ops.fake_quantize_learned import torch_op as _learned  # noqa: F401  (registers the operator)
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor,
    FakeQuantizeLearnedBackwardPlan,
)
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor, LsqInitPlan
from holdfast.ops.lsq_init.torch_op import lsq_init
from holdfast.ops.quantize.plan import (
    QuantizePerChannelArgs,
    QuantizePerChannelBackwardArgs,
    QuantizePerChannelBackwardDescriptor,
    QuantizePerChannelBackwardPlan,
    QuantizePerChannelDescriptor,
    QuantizePerChannelPlan,
    QuantizePerGroupArgs,
    QuantizePerGroupBackwardArgs,
    QuantizePerGroupBackwardDescriptor,
    QuantizePerGroupBackwardPlan,
    QuantizePerGroupDescriptor,
    QuantizePerGroupPlan,
    QuantizePerTensorArgs,
    QuantizePerTensorBackwardArgs,
    QuantizePerTensorBackwardDescriptor,
    QuantizePerTensorBackwardPlan,
    QuantizePerTensorDescriptor,
    QuantizePerTensorPlan,
    QuantizePerTokenArgs,
    QuantizePerTokenBackwardArgs,
    QuantizePerTokenBackwardDescriptor,
    QuantizePerTokenBackwardPlan,
    QuantizePerTokenDescriptor,
    QuantizePerTokenPlan,
)
from holdfast.ops.quantize.torch_op import quantize
from holdfast.ops.segment_sum.plan import SegmentSumArgs, SegmentSumDescriptor, SegmentSumPlan

__version__ = "0.1.0"

__all__ = [
    "Args",
    "ChooseScaleArgs",
    "ChooseScaleDescriptor",
    "ChooseScalePlan",
    "DequantizePerChannelArgs",
    "DequantizePerChannelBackwardArgs",
    "DequantizePerChannelBackwardDescriptor",
    "DequantizePerChannelBackwardPlan",
    "DequantizePerChannelDescriptor",
    "DequantizePerChannelPlan",
    "DequantizePerGroupArgs",
    "DequantizePerGroupBackwardArgs",
    "DequantizePerGroupBackwardDescriptor",
    "DequantizePerGroupBackwardPlan",
    "DequantizePerGroupDescriptor",
    "DequantizePerGroupPlan",
    "DequantizePerTensorArgs",
    "DequantizePerTensorBackwardArgs",
    "DequantizePerTensorBackwardDescriptor",
    "DequantizePerTensorBackwardPlan",
    "DequantizePerTensorDescriptor",
    "DequantizePerTensorPlan",
    "DequantizePerTokenArgs",
    "DequantizePerTokenBackwardArgs",
    "DequantizePerTokenBackwardDescriptor",
    "DequantizePerTokenBackwardPlan",
    "DequantizePerTokenDescriptor",
    "DequantizePerTokenPlan",
    "Descriptor",
    "DynamicQuantizeArgs",
    "DynamicQuantizeDescriptor",
    "DynamicQuantizePlan",
    "EmbeddingArgs",
    "EmbeddingBackwardArgs",
    "EmbeddingBackwardDescriptor",
    "EmbeddingBackwardPlan",
    "EmbeddingBagArgs",
    "EmbeddingBagBackwardArgs",
    "EmbeddingBagBackwardDescriptor",
    "EmbeddingBagBackwardPlan",
    "EmbeddingBagDescriptor",
    "EmbeddingBagPlan",
    "EmbeddingDescriptor",
    "EmbeddingPlan",
    "FakeQuantizeArgs",
    "FakeQuantizeBackwardArgs",
    "FakeQuantizeBackwardDescriptor",
    "FakeQuantizeBackwardPlan",
    "FakeQuantizeDescriptor",
    "FakeQuantizeLearnedBackwardArgs",
    "FakeQuantizeLearnedBackwardDescriptor",
    "FakeQuantizeLearnedBackwardPlan",
    "FakeQuantizePlan",
    "Granularity",
    "HoldfastError",
    "InvalidArgs",
    "InvalidDescriptor",
    "InvalidIndex",
    "KernelSku",
    "LsqInitArgs",
    "LsqInitDescriptor",
    "LsqInitPlan",
    "NUMERICS_VERSION",
    "ObserveRangeArgs",
    "ObserveRangeDescriptor",
    "ObserveRangePlan",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Plan",
    "PlanPreference",
    "PrecisionGuarantee",
    "QuantizePerChannelArgs",
    "QuantizePerChannelBackwardArgs",
    "QuantizePerChannelBackwardDescriptor",
    "QuantizePerChannelBackwardPlan",
    "QuantizePerChannelDescriptor",
    "QuantizePerChannelPlan",
    "QuantizePerGroupArgs",
    "QuantizePerGroupBackwardArgs",
    "QuantizePerGroupBackwardDescriptor",
    "QuantizePerGroupBackwardPlan",
    "QuantizePerGroupDescriptor",
    "QuantizePerGroupPlan",
    "QuantizePerTensorArgs",
    "QuantizePerTensorBackwardArgs",
    "QuantizePerTensorBackwardDescriptor",
    "QuantizePerTensorBackwardPlan",
    "QuantizePerTensorDescriptor",
    "QuantizePerTensorPlan",
    "QuantizePerTokenArgs",
    "QuantizePerTokenBackwardArgs",
    "QuantizePerTokenBackwardDescriptor",
    "QuantizePerTokenBackwardPlan",
    "QuantizePerTokenDescriptor",
    "QuantizePerTokenPlan",
    "SegmentSumArgs",
    "SegmentSumDescriptor",
    "SegmentSumPlan",
    "SteKind",
    "Stream",
    "Unsupported",
    "Verdict",
    "Workspace",
    "WorkspaceTooSmall",
    "__version__",
    "check_errors",
    "choose_scale",
    "dequantize",
    "embedding",
    "embedding_bag",
    "fake_quantize",
    "lsq_init",
    "nn",
    "observe_range",
    "pack",
    "plans",
    "quantize",
    "quantize_dynamic",
    "scale_of_range",
    "unpack",
]
