"""Number formats and granularities in ONNX, and the opset that has each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import Unsupported
from holdfast.core.formats import INTEGERS, Format, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerToken, granularity_named

#: The first opset in which QuantizeLinear and DequantizeLinear have each format, as they are used here.
OPSETS = {
    "int8": 19, "uint8": 19, "float8_e4m3fn": 19, "int4": 21, "uint4": 21, "int16": 21, "uint16": 21,
    "int2": 25, "uint2": 25,
}  # fmt: skip
#: The first opset with ``block_size``.
BLOCKED_OPSET = 21
#: The opset of a file if the caller names none and the model needs no later one.
DEFAULT_OPSET = 21
#: The first opset in which convolutions take bfloat16.
BFLOAT16_OPSET = 22


@dataclass(frozen=True)
class Layout:
    """How QuantizeLinear and DequantizeLinear apply the scales of a granularity.

    ``attributes`` are those of the node. ``scale_shape`` is the shape of its scale input, as an argument of
    Reshape: 0 copies the size of that axis of the scale, and -1 is all that is left.
    """

    attributes: Mapping[str, int]
    scale_shape: tuple[int, ...]


def layout_of(granularity: Granularity, shape: tuple[Any, ...]) -> Layout:
    """The layout of the scales of a tensor of ``shape``. A size that changes from call to call is no int."""
    rank = len(shape)
    if isinstance(granularity, PerChannel):
        return Layout({"axis": granularity.axis % rank}, (-1,))
    if isinstance(granularity, PerGroup):
        axis = granularity.axis % rank
        return Layout({"axis": axis, "block_size": granularity.group_size}, (0,) * rank)
    if isinstance(granularity, PerToken) and rank > 1:
        if not isinstance(shape[-1], int):
            raise Unsupported(
                f"the last axis of a tensor of shape {shape} is dynamic, and its scales are per token; ONNX "
                "needs its size as block_size. Export with a fixed size of that axis."
            )
        return Layout({"axis": rank - 1, "block_size": shape[-1]}, (*(0,) * (rank - 1), 1))
    return Layout({}, ())


def needed_opset(codes: Format, granularity: Granularity) -> int:
    """The first opset that has these codes with these scales."""
    if codes.name not in OPSETS:
        raise Unsupported(f"ONNX has no codes of {codes.torch}; it has {', '.join(OPSETS)}.")
    blocked = isinstance(granularity, PerGroup | PerToken)
    return max(OPSETS[codes.name], BLOCKED_OPSET if blocked else 0)


def codes_of(arguments: Mapping[str, Any]) -> tuple[Format, tuple[int, int]]:
    """The format and the range of the codes in the arguments of an operator.

    If only the range is given, the format is the smallest one that has the range.
    """
    dtype = arguments.get("code_dtype") or arguments.get("dtype")
    given = (arguments.get("q_min"), arguments.get("q_max"))
    if dtype is not None:
        codes = format_of(parse_dtype(dtype), "dtype")
        low, high = (
            end if end is not None else own for end, own in zip(given, codes.code_range, strict=True)
        )
        return codes, (low, high)
    low, high = int(given[0]), int(given[1])  # type: ignore[arg-type]
    for codes in sorted(INTEGERS.values(), key=lambda record: record.bits):
        if codes.code_range[0] <= low and high <= codes.code_range[1]:
            return codes, (low, high)
    raise Unsupported(f"ONNX has no integer codes for the range {low} to {high}.")


def granularity_of(arguments: Mapping[str, Any]) -> Granularity:
    return granularity_named(arguments["granularity"])
