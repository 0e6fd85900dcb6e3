"""The exact outputs of every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch

import holdfast as hf
from exact import indexed, resized, sampling, scaled
from exact.element import Element
from exact.numbers import ulp
from holdfast.core.case import Case
from holdfast.proof.conformance import execute, select_on

Exactly = Callable[[Any, Any], Iterator[Element]]

_BY_OP: dict[tuple[str, str], Exactly] = {
    ("segment_sum", "forward"): indexed.segment_sum,
    ("embedding", "forward"): indexed.embedding,
    ("embedding", "backward"): indexed.embedding_backward,
    ("embedding_bag", "forward"): indexed.embedding_bag,
    ("embedding_bag", "backward"): indexed.embedding_bag_backward,
    ("grid_sample", "forward"): sampling.grid_sample,
    ("grid_sample", "backward"): sampling.grid_sample_backward,
    ("affine_grid", "forward"): sampling.affine_grid,
    ("affine_grid", "backward"): sampling.affine_grid_backward,
    ("scatter", "forward"): indexed.scatter,
    ("gather", "forward"): indexed.gather,
    ("interpolate", "forward"): resized.interpolate,
    ("interpolate", "backward"): resized.interpolate_backward,
    ("quantize", "forward"): scaled.quantize,
    ("quantize", "backward"): scaled.quantize_backward,
    ("dequantize", "forward"): scaled.dequantize,
    ("dequantize", "backward"): scaled.dequantize_backward,
    ("fake_quantize", "forward"): scaled.fake_quantize,
    ("fake_quantize", "backward"): scaled.fake_quantize_backward,
    ("fake_quantize_learned", "backward"): scaled.learned_backward,
    ("lsq_init", "forward"): scaled.lsq_init,
    ("observe_range", "forward"): scaled.observe_range,
    ("choose_scale", "forward"): scaled.choose_scale,
    ("dynamic_quantize", "forward"): scaled.dynamic_quantize,
    ("dynamic_fake_quantize", "forward"): scaled.dynamic_fake_quantize,
    ("dynamic_fake_quantize", "backward"): scaled.dynamic_fake_quantize_backward,
}

#: By plan name. The tests fail for plans that are missing here.
EXACTLY: dict[str, Exactly] = {
    name: _BY_OP[plan.op, plan.direction]
    for name, plan in hf.plans.all().items()
    if (plan.op, plan.direction) in _BY_OP
}


def checked(plan: Any, desc: Any, args: Any, backend: str) -> dict[str, tuple[int, float]]:
    """Run a problem and compare its outputs with the exact results."""
    case = Case("exact", desc, lambda: args)
    made = select_on(backend)(plan, case, hf.Stream.current("cpu"))
    result = execute(plan, case, args, lambda *_: made)
    return compared(plan, desc, args, result, made.precision_guarantee().ulp)


def compared(
    plan: Any, desc: Any, args: Any, result: Any, bounds: Mapping[str, float]
) -> dict[str, tuple[int, float]]:
    """For each output, the number of compared elements and the largest error relative to the allowed one.

    ``args`` are the args before the run. If the allowed error is 0, the fraction is 1.
    """
    values = {name: flat(desc, getattr(result, name)) for name in plan.outputs}
    compute = getattr(desc, "compute", None) or desc.real.compute
    found: dict[str, tuple[int, float]] = {}
    for element in EXACTLY[plan.__name__](desc, result):
        name = element.output
        dtype = values[name].dtype
        if not element.codes and element.overflows(dtype, compute.torch):
            continue
        value = Fraction(float(values[name][element.place]))
        error, allowed = abs(value - element.right), element.allowed(bounds[name], dtype)
        if getattr(args, "accumulate", False):
            old = Fraction(float(flat(desc, getattr(args, name))[element.place]))
            error, allowed = _accumulated(element, value, old, bounds[name], dtype, compute.torch)
        assert error <= allowed, (
            f"{plan.__name__}, {name}[{element.place}] of {desc}: {float(value)!r} is off by "
            f"{float(error):.3g} from {float(element.right)!r}; {bounds[name]} ULP, or {float(allowed):.3g}, "
            "are stated"
        )
        count, share = found.get(name, (0, 0.0))
        found[name] = count + 1, max(share, float(error / allowed) if allowed else 1.0)
    return found


def _accumulated(
    element: Element, value: Fraction, old: Fraction, bound: float, dtype: torch.dtype, compute: torch.dtype
) -> tuple[Fraction, Fraction]:
    """The error of a result that was added to ``old``, and the allowed error, with one more rounding."""
    magnitude = element.magnitude + abs(old)
    unit, narrowed = ulp(magnitude, dtype), Fraction(0)
    if dtype != compute and bound < 0.5:
        narrowed = unit / 2
    allowed = Fraction(bound) * unit + narrowed + ulp(magnitude, compute) + element.lost
    return abs(value - (old + element.right)), allowed


def flat(desc: Any, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        return torch.zeros(0)
    if getattr(desc, "per_byte", 1) > 1 and tensor.dtype == torch.uint8:
        tensor = hf.unpack(tensor.contiguous(), desc.codes.torch, desc.shape[-1])
    if tensor.dtype == torch.float8_e4m3fn:  # number the codes from 0, negative codes downwards
        bits = tensor.view(torch.uint8).to(torch.int16)
        tensor = torch.where(bits > 127, 128 - bits, bits)
    return tensor.reshape(-1)
