"""The errors: one tree, each also the builtin that a Python user would catch."""

from __future__ import annotations


class HoldfastError(Exception):
    """Every error that this library raises on purpose."""


class InvalidDescriptor(HoldfastError, ValueError):
    """The problem as described does not make sense."""


class InvalidArgs(HoldfastError, ValueError, TypeError):
    """The tensors given to a plan are not the ones that its descriptor describes."""


class InvalidIndex(HoldfastError, IndexError):
    """An index names no row."""


class Unsupported(HoldfastError, NotImplementedError):
    """The problem makes sense, but nothing here can serve it; the message says why for each candidate."""


class WorkspaceTooSmall(HoldfastError, ValueError):
    """The workspace given to ``run`` has fewer bytes than ``workspace_size()``."""


class CollectiveFailed(HoldfastError, RuntimeError):
    """The processes that share a batch did not all take part in a collective operation."""


class NotReproducible(HoldfastError, AssertionError):
    """A step gave other bits than it did before; the message says which, where, and between which runs."""
