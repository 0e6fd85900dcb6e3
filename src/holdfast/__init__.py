"""Forward and backward kernels for training that hold their bits.

The functions come from ``ops/<op>/torch_op.py``: what ``__all__`` lists there is exported here. Type checkers
read ``__init__.pyi``. Importing holdfast imports neither Numba nor Triton.
"""

from __future__ import annotations

from holdfast import backends as _backends  # noqa: F401  (registers the backends)
from holdfast import ops as _ops
from holdfast import plans
from holdfast.core import formats
from holdfast.core.contract import NUMERICS_VERSION, KernelSku, PlanPreference, PrecisionGuarantee, Verdict
from holdfast.core.device_errors import check_errors
from holdfast.core.errors import (
    CollectiveFailed,
    HoldfastError,
    InvalidArgs,
    InvalidDescriptor,
    InvalidIndex,
    NotReproducible,
    Unsupported,
    WorkspaceTooSmall,
)
from holdfast.core.formats import Format
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.stream import Stream, Workspace

_functions = {
    name: getattr(module, name)
    for module in _ops.modules("torch_op")
    for name in getattr(module, "__all__", ())
}
globals().update(_functions)

from holdfast import distributed, export, nn, qat, testing  # noqa: E402  (made of the functions)
from holdfast.install import install, installed, status, uninstall  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "NUMERICS_VERSION", "CollectiveFailed", "Format", "Granularity", "HoldfastError", "InvalidArgs",
    "InvalidDescriptor", "InvalidIndex", "KernelSku", "NotReproducible", "PerChannel", "PerGroup",
    "PerTensor", "PerToken", "PlanPreference", "PrecisionGuarantee", "Stream", "Unsupported", "Verdict",
    "Workspace", "WorkspaceTooSmall", "__version__", "check_errors", "distributed", "export", "formats",
    "install", "installed", "nn", "plans", "qat", "status", "testing", "uninstall", *sorted(_functions),
]  # fmt: skip
