"""Descriptors: a problem without its tensors. They are frozen, hashable and convertible to and from JSON."""

from __future__ import annotations

import json
import math
import operator
import sys
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch

from holdfast.core import registry
from holdfast.core.checks import kind_of, shown
from holdfast.core.dtypes import Float, dtype_name, float_dtype, parse_dtype
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.granularity import Granularity, granularity_named

#: The shape and dtype that an operand must have.
Expected = tuple[tuple[int, ...], torch.dtype]

MAX_RANK = 8
#: Exclusive limit of the elements of a tensor.
MOST_ELEMENTS = 2**60


def whole_numbers(name: str, given: Any, example: tuple[int, ...]) -> tuple[int, ...]:
    """The argument ``name`` as a tuple of ints."""
    try:
        if any(isinstance(number, bool) for number in given):
            raise TypeError
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise InvalidDescriptor(
            f"{name} is {shown(given)}; it must be a sequence of whole numbers, such as {example}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Base class of descriptors. ``select`` validates it; ``validate`` may be called before.

    A subclass has a field ``dtype``, or overrides ``real`` and ``named_dtypes``.
    """

    shape: tuple[int, ...]

    _by_name: ClassVar[dict[str, type[Descriptor]]] = {}

    def __init_subclass__(cls) -> None:
        Descriptor._by_name[cls.__name__] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", whole_numbers("shape", self.shape, (64, 3, 7, 7)))

    @property
    def empty(self) -> bool:
        """Whether there are no elements. Then nothing is compiled or launched."""
        return 0 in self.shape

    def expected(self, name: str) -> Expected | None:
        """The required shape and dtype of the operand ``name``; None if the operand must be None."""
        return self.shape, self.real.torch

    @property
    def real(self) -> Float:
        """The floating dtype that determines the compute type."""
        return float_dtype(cast(Any, self).dtype, "dtype")

    @property
    def compute(self) -> Float:
        """The dtype that kernels compute in."""
        return self.real.compute

    @property
    def named_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the input and the output, as the SKU names them."""
        return self.real.torch, self.real.torch

    def validate(self) -> None:
        """Raise InvalidDescriptor if the problem is not valid."""
        kind: Any = type(self)
        for name, hint in field_types(kind).items():
            _validate_field(name, getattr(self, name), hint)
        if len(self.shape) > MAX_RANK:
            raise InvalidDescriptor(
                f"shape {self.shape} has rank {len(self.shape)}; accepted are ranks 0 to {MAX_RANK}. "
                "Flatten neighbouring axes first."
            )
        if any(size < 0 for size in self.shape):
            raise InvalidDescriptor(f"shape {self.shape} has a negative size; sizes count from 0.")
        if math.prod(self.shape) >= MOST_ELEMENTS:
            raise InvalidDescriptor(
                f"shape {shown(self.shape)} has more elements than any tensor; check its sizes."
            )
        _ = self.real  # raises if it is not a floating dtype

    def to_json(self) -> str:
        """The descriptor as a JSON object; ``Descriptor.from_json`` reads it back."""
        values = {f.name: encoded(getattr(self, f.name)) for f in fields(self)}
        return json.dumps({"descriptor": type(self).__name__, **values})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The validated descriptor in ``text``. It must be an instance of ``cls``."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidDescriptor(
                f"the descriptor is not JSON ({error}); write it with to_json()."
            ) from None
        if not isinstance(data, dict):
            raise InvalidDescriptor(
                f"the JSON is {kind_of(data)}, not an object; write descriptors with to_json()."
            )
        return cls.from_fields(data)

    @classmethod
    def from_fields(cls, data: dict[str, Any]) -> Self:
        """The validated descriptor with these fields, which have JSON types."""
        data = dict(data)
        name = data.pop("descriptor", cls.__name__)
        kind: Any = Descriptor._by_name.get(name) if isinstance(name, str) else None
        if kind is None or not issubclass(kind, cls) or _is_abstract(kind):
            wanted = sorted(
                n for n, k in Descriptor._by_name.items() if issubclass(k, cls) and not _is_abstract(k)
            )
            raise InvalidDescriptor(f'"descriptor" is {name!r}; accepted here: {", ".join(wanted)}.')
        hints = field_types(kind)
        unknown = sorted(data.keys() - hints.keys())
        if unknown:
            raise InvalidDescriptor(f"{name} has no field {unknown[0]!r}; its fields are {', '.join(hints)}.")
        missing = [f.name for f in fields(kind) if f.name not in data and _required(f)]
        if missing:
            needed = " and ".join(f"{field} ({_described(hints[field])})" for field in missing)
            raise InvalidDescriptor(f"{name} needs {needed}; its fields are {', '.join(hints)}.")
        values = {key: _decode(value, hints[key], f"{name}.{key}") for key, value in data.items()}
        made = kind(**values)
        made.validate()
        return cast(Self, made)


def _is_abstract(kind: type[Descriptor]) -> bool:
    """Whether a descriptor is a base of others and belongs to no plan itself."""
    return bool(kind.__subclasses__()) and all(
        kind is not plan.Descriptor for plan in registry.plans().values()
    )


def _required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


@cache
def field_types(kind: type[Descriptor]) -> dict[str, Any]:
    """The type of each field of a descriptor."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


#: For each type of a field, a description for error messages and the accepted types.
_FIELDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a finite number", (int, float)),
    str: ("a string", (str,)),
    torch.dtype: ("a dtype of torch, such as torch.float32", (torch.dtype,)),
}


def _validate_field(name: str, value: Any, hint: Any) -> None:
    """Raise if the value of a field has the wrong type. A bool is not a number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (kind,) = (option for option in options if option is not type(None))
    if kind not in _FIELDS or (value is None and type(None) in options):
        return
    what, accepted = _FIELDS[kind]
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if fits and kind is float:
        fits = abs(value) <= sys.float_info.max
    if not fits:
        none = " or None" if len(options) > 1 else ""
        raise InvalidDescriptor(f"{name} is {shown(value)}; it must be {what}{none}.")


def encoded(value: Any) -> Any:
    """The value of a field as a JSON type."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Granularity):
        return value.name
    return [encoded(item) for item in value] if isinstance(value, tuple) else value


def _decode(value: Any, hint: Any, where: str) -> Any:
    """``value`` from JSON as the field's type. The error says what the field accepts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        (hint,) = (option for option in options if option is not type(None))
    if hint is torch.dtype and isinstance(value, str):
        return parse_dtype(value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_decode(item, typing.get_args(hint)[0], where) for item in value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            accepted = ", ".join(repr(member.value) for member in hint)
            raise InvalidDescriptor(f"{where} is {shown(value)}; accepted are {accepted}.") from None
    if hint is Granularity and isinstance(value, str):
        return granularity_named(value)
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise InvalidDescriptor(f"{where} is {shown(value)}; it must be {_described(hint)}.")


def _described(hint: Any) -> str:
    if hint is torch.dtype:
        return "the name of a dtype, such as 'float32'"
    if hint is Granularity:
        return "the name of a granularity, such as 'per_channel:0'"
    if typing.get_origin(hint) is tuple:
        return "a list of numbers" if typing.get_args(hint)[0] is float else "a list of whole numbers"
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return named.get(hint, str(hint))
