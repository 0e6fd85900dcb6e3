"""Flattens the outputs of a step into named tensors and plain values, and compares their bits."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.core import private
from holdfast.core.bits import canonical
from holdfast.core.checks import kind_of
from holdfast.core.errors import InvalidArgs

#: Types that are compared with ==. Floats and complex numbers are compared as tensors.
_PLAIN = (bool, int, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, slice, range)

#: Dtypes whose elements torch cannot copy or compare. They are compared as bytes.
BYTES = {
    getattr(torch, name)
    for name in ("float4_e2m1fn_x2", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)))
    if hasattr(torch, name)
}

#: Outputs by path, such as ``output['loss']`` or ``grads['encoder.weight']``.
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """An output that differs between two runs: in ``count`` of its ``size`` elements."""

    path: str
    first: str
    second: str
    count: int = 1
    size: int = 1

    def __str__(self) -> str:
        many = f" ({self.count:,} of {self.size:,} elements differ)" if self.size > 1 else ""
        return f"{self.path}: {self.first} and {self.second}{many}"


def flattened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each tensor and plain value in ``value``. Tensors are copied to the CPU."""
    if isinstance(value, torch.Tensor):
        yield from _tensor(value, path)
    elif isinstance(value, torch.nn.Module):
        yield from of_module(value, f"{path}.")
    elif isinstance(value, np.ndarray | np.generic):
        yield path, _from_numpy(np.asarray(value), path)
    elif isinstance(value, float | complex):
        dtype = torch.float64 if isinstance(value, float) else torch.complex128
        yield path, torch.tensor(value, dtype=dtype)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flattened(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flattened(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from flattened(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, _PLAIN):  # before tuple, because torch.Size is one
        yield path, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from flattened(item, f"{path}[{number}]")
    else:
        raise InvalidArgs(
            f"{path} is {kind_of(value)}, which cannot be compared bit for bit. Return tensors, "
            f"arrays, numbers, strings, modules, or dicts, lists, tuples and dataclasses of them."
        )


def of_module(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters, their gradients, and the buffers of a module."""
    for name, parameter in module.named_parameters():
        yield from _tensor(parameter, f"{prefix}params[{name!r}]")
        if parameter.grad is not None:
            yield from _tensor(parameter.grad, f"{prefix}grads[{name!r}]")
    for name, buffer in module.named_buffers():
        yield from _tensor(buffer, f"{prefix}buffers[{name!r}]")


def _incomparable(tensor: torch.Tensor) -> str | None:
    """What a tensor is that has no bits to compare; None for other tensors."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor on the meta device"
    return None if tensor.layout == torch.strided else f"a tensor of layout {tensor.layout}"


def _tensor(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        indices, values = private.sparse_parts(tensor)
        yield f"{path}.indices", indices.cpu().clone()
        yield f"{path}.values", values.cpu().clone()
    elif (kind := _incomparable(tensor)) is not None:
        raise InvalidArgs(
            f"{path} is {kind}, which cannot be compared bit for bit. Return a dense or a sparse COO tensor "
            "on the CPU or on CUDA."
        )
    else:
        if tensor.dtype in BYTES:
            tensor = tensor.view(torch.uint8)
        yield path, tensor.to("cpu", copy=True).resolve_conj().resolve_neg()


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise InvalidArgs(
            f"{path} is an array of {array.dtype}, which has no torch dtype. Return an array of numbers."
        ) from None


def differences(first: Outputs, second: Outputs) -> list[Difference]:
    """Every output that differs between two runs."""
    found = []
    for path in dict.fromkeys([*first, *second]):
        if path in first and path in second:
            one = difference(path, first[path], second[path])
        else:
            there, gone = _described(first.get(path, second.get(path))), "nothing"
            one = Difference(path, *((there, gone) if path in first else (gone, there)))
        found += [one] if one else []
    return found


def difference(path: str, first: Any, second: Any) -> Difference | None:
    """The first difference of two values, or None. All NaNs are equal; 0.0 and -0.0 are different."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        same = type(first) is type(second) and not isinstance(first, torch.Tensor) and first == second
        return None if same else Difference(path, _described(first), _described(second))
    if first.shape != second.shape or first.dtype != second.dtype:
        return Difference(path, _described(first), _described(second))
    places = _differing(first, second).nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    where = f"{path}[{', '.join(map(str, index))}]" if index else path
    return Difference(where, _shown(first[index]), _shown(second[index]), len(places), first.numel())


def _differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Mask of the elements whose bits differ."""
    if first.is_complex():
        return _differing(first.real, second.real) | _differing(first.imag, second.imag)
    return _bits(first) != _bits(second)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        # float8 has no isnan, but widening to float32 is exact.
        return tensor.contiguous().view(torch.uint8).masked_fill(tensor.float().isnan(), 0xFF)
    return canonical(tensor)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def _shown(element: torch.Tensor) -> str:
    size = element.element_size()
    bits = bytes(element.reshape(1).contiguous().view(torch.uint8).tolist()[::-1]).hex()
    return f"{element.item()!r} (0x{bits:0>{2 * size}})"
