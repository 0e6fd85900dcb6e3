"""Example calls of pack and unpack."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import BYTES, CODES
from holdfast.ops.packing.torch_op import pack, unpack

CALLS = {
    "pack": Call(pack, {"codes": CODES, "dtype": torch.int4}),  # type: ignore[attr-defined]
    "unpack": Call(unpack, {"packed": BYTES, "dtype": torch.int4, "length": 5}),  # type: ignore[attr-defined]
}
