"""The class of a parametrized module."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def give_own_class(module: nn.Module) -> None:
    """Give a parametrized module a copy of its class; other modules keep theirs.

    torch makes a class for a parametrized module, with a property for each parametrized tensor. Copies of the
    module have the same class, so a property that is added or removed would change them as well.
    """
    if not is_parametrized(module):
        return
    kind = type(module)
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, members)
