# Written by scripts/stubs.py (`make stubs`); do not edit.

from holdfast.core.contract import NUMERICS_VERSION as NUMERICS_VERSION
from holdfast import (
    distributed as distributed,
    export as export,
    nn as nn,
    plans as plans,
    qat as qat,
    testing as testing,
)
from holdfast.core import formats as formats
from holdfast.core.contract import (
    KernelSku as KernelSku,
    PlanPreference as PlanPreference,
    PrecisionGuarantee as PrecisionGuarantee,
    Verdict as Verdict,
)
from holdfast.core.device_errors import check_errors as check_errors
from holdfast.core.errors import (
    CollectiveFailed as CollectiveFailed,
    HoldfastError as HoldfastError,
    InvalidArgs as InvalidArgs,
    InvalidDescriptor as InvalidDescriptor,
    InvalidIndex as InvalidIndex,
    NotReproducible as NotReproducible,
    Unsupported as Unsupported,
    WorkspaceTooSmall as WorkspaceTooSmall,
)
from holdfast.core.formats import Format as Format
from holdfast.core.granularity import (
    Granularity as Granularity,
    PerChannel as PerChannel,
    PerGroup as PerGroup,
    PerTensor as PerTensor,
    PerToken as PerToken,
)
from holdfast.core.stream import (
    Stream as Stream,
    Workspace as Workspace,
)
from holdfast.install import (
    install as install,
    installed as installed,
    status as status,
    uninstall as uninstall,
)
from holdfast.ops.affine_grid.torch_op import affine_grid as affine_grid
from holdfast.ops.choose_scale.torch_op import (
    choose_scale as choose_scale,
    observe_range as observe_range,
    scale_of_range as scale_of_range,
)
from holdfast.ops.dequantize.torch_op import dequantize as dequantize
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize as dynamic_fake_quantize
from holdfast.ops.dynamic_quantize.torch_op import (
    dynamic_quantize as dynamic_quantize,
    quantize_dynamic as quantize_dynamic,
)
from holdfast.ops.embedding.torch_op import embedding as embedding
from holdfast.ops.embedding_bag.torch_op import embedding_bag as embedding_bag
from holdfast.ops.fake_quantize.torch_op import (
    SteKind as SteKind,
    fake_quantize as fake_quantize,
)
from holdfast.ops.grid_sample.torch_op import grid_sample as grid_sample
from holdfast.ops.interpolate.torch_op import interpolate as interpolate
from holdfast.ops.lsq_init.torch_op import lsq_init as lsq_init
from holdfast.ops.packing.torch_op import (
    pack as pack,
    unpack as unpack,
)
from holdfast.ops.quantize.torch_op import quantize as quantize
from holdfast.ops.scatter.torch_op import (
    gather as gather,
    index_add as index_add,
    index_put as index_put,
    index_select as index_select,
    scatter_add as scatter_add,
    scatter_reduce as scatter_reduce,
    segment_reduce as segment_reduce,
)

__version__: str

__all__ = [
    "CollectiveFailed",
    "Format",
    "Granularity",
    "HoldfastError",
    "InvalidArgs",
    "InvalidDescriptor",
    "InvalidIndex",
    "KernelSku",
    "NUMERICS_VERSION",
    "NotReproducible",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "PlanPreference",
    "PrecisionGuarantee",
    "SteKind",
    "Stream",
    "Unsupported",
    "Verdict",
    "Workspace",
    "WorkspaceTooSmall",
    "__version__",
    "affine_grid",
    "check_errors",
    "choose_scale",
    "dequantize",
    "distributed",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "embedding",
    "embedding_bag",
    "export",
    "fake_quantize",
    "formats",
    "gather",
    "grid_sample",
    "index_add",
    "index_put",
    "index_select",
    "install",
    "installed",
    "interpolate",
    "lsq_init",
    "nn",
    "observe_range",
    "pack",
    "plans",
    "qat",
    "quantize",
    "quantize_dynamic",
    "scale_of_range",
    "scatter_add",
    "scatter_reduce",
    "segment_reduce",
    "status",
    "testing",
    "uninstall",
    "unpack",
]
