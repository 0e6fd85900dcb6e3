"""Declarations of an op: the args of a plan, and names that are derived from its class.

The args of a plan are a class whose fields are its operands::

    @arguments
    class ScaledAddArgs(Args):
        x: torch.Tensor
        y: torch.Tensor
        out: Output

A field of type ``Output`` is written. A field of type ``bool`` is an option, such as ``accumulate``. Every
other field is read. The descriptor's ``expected(name)`` gives the shape and dtype of each.

The name of a plan's class gives the rest: ``ScaledAddBackwardPlan`` is the backward of the op
``scaled_add``, and its kernels are the classes ``ScaledAddBackward`` in the files ``cpu.py``, ``gpu.py`` and
``reference.py`` of the same folder, if these files exist.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.machinery import PathFinder
from typing import Annotated, Any, TypeVar

import torch

from holdfast.core import registry
from holdfast.core.contract import Direction, PlanPreference

_OUTPUT = "output"

#: A tensor that the kernel writes.
Output = Annotated[torch.Tensor, _OUTPUT]

T = TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, eq_default=False)
def arguments(kind: type[T]) -> type[T]:
    """Make a dataclass of operands and options, with fast ``operands()`` and ``options()`` for every run."""
    made: Any = dataclass(kw_only=True, slots=True, eq=False)(kind)
    hints = typing.get_type_hints(made, include_extras=True)
    names = [field.name for field in fields(made)]
    made.outputs = tuple(name for name in names if _is_output(hints[name]))
    made.flags = tuple(name for name in names if hints[name] is bool)
    made.inputs = tuple(name for name in names if name not in (*made.outputs, *made.flags))
    made.operands = _getter((*made.outputs, *made.inputs))
    made.options = _getter(made.flags)
    made.of = _maker(made, made.flags, (*made.outputs, *made.inputs))
    return typing.cast(type[T], made)


def _is_output(hint: Any) -> bool:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(hint) is typing.Union:
        kinds = typing.get_args(hint)
    return any(_OUTPUT in getattr(kind, "__metadata__", ()) for kind in kinds)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    values = "".join(f"self.{name}, " for name in names)
    return typing.cast(Callable[[Any], tuple[Any, ...]], eval(f"lambda self: ({values})"))


def _maker(kind: Any, *names: Sequence[str]) -> Callable[..., Any]:
    """A function that makes args of these fields, given by position."""
    given = [name for group in names for name in group]
    fields = ", ".join(f"{name}={name}" for name in given)
    return typing.cast(Callable[..., Any], eval(f"lambda {', '.join(given)}: make({fields})", {"make": kind}))


@dataclass(frozen=True)
class Implementation:
    """A kernel class that computes a plan on a backend.

    ``entry_point`` is "module:class", imported on selection; a leading dot means the plan's package. ``name``
    distinguishes several implementations on one backend; the first has none. ``why_not`` returns the reason
    why the implementation does not support a problem, or "".
    """

    backend: str
    entry_point: str
    name: str = ""
    why_not: Callable[[Any, torch.device, PlanPreference], str] | None = None

    @property
    def module(self) -> str:
        return self.entry_point.partition(":")[0]

    def absolute(self, module: str) -> Implementation:
        """This implementation with an absolute module name; ``module`` is the plan's."""
        if not self.entry_point.startswith("."):
            return self
        return replace(self, entry_point=module.rpartition(".")[0] + self.entry_point)


def on_backends(kernel: str) -> tuple[Implementation, ...]:
    """The class ``kernel`` in the file of each backend, such as ``cpu.py``."""
    return tuple(Implementation(backend, f".{backend}:{kernel}") for backend in registry.backends())


def resolved(module: str, implementations: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """The implementations whose modules exist, with absolute names. ``module`` is the plan's."""
    absolute = (impl.absolute(module) for impl in implementations)
    return tuple(impl for impl in absolute if _exists(impl.module))


def _exists(module: str) -> bool:
    """Whether the module exists. Imports nothing."""
    package = sys.modules.get(module.rpartition(".")[0])
    if module in sys.modules or package is None:
        return not module.startswith(".")  # if the package is not imported yet, assume that the module exists
    return PathFinder.find_spec(module, package.__path__) is not None


def name_of_op(plan: str) -> tuple[str, Direction, str]:
    """The op, the direction and the kernel class, derived from the name of a plan's class."""
    kernel = plan.removesuffix("Plan")
    forward = kernel.removesuffix("Backward")
    op = re.sub(r"(?<!^)(?=[A-Z])", "_", forward).lower()
    return op, "forward" if forward == kernel else "backward", kernel


def bound_types(plan: type) -> tuple[type, type] | None:
    """The descriptor and args classes in ``Plan[descriptor, args]``, if the class has such a base."""
    for base in vars(plan).get("__orig_bases__", ()):
        given = typing.get_args(base)
        if len(given) == 2 and all(isinstance(kind, type) for kind in given):
            return given
    return None
